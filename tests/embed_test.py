"""examples/embed against an installed tree: headers, libraries and the CMake package are all that another program
needs. KT_PROGRAM names the program; its build folder (or KT_BUILD) is what gets installed."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

KT = os.environ.get("KT_PROGRAM")
BUILD = pathlib.Path(os.environ.get("KT_BUILD") or (pathlib.Path(KT).resolve().parent.parent if KT else "/nonexistent"))
ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = [pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program"),
              pytest.mark.skipif(not (BUILD / "cmake_install.cmake").exists(), reason=f"{BUILD} is no build folder"),
              pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")]


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


def ok(*command, **options):
    done = run(*command, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done


def cached(name):
    """What the build that gets installed was configured with."""
    return re.search(rf"^{name}:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M)[1]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed") / "usr"
    ok("cmake", "--install", BUILD, "--prefix", folder, "--component", "devel")
    return folder


@pytest.fixture(scope="module")
def embed(prefix, tmp_path_factory):
    """The example, copied out of the tree and built with nothing of it."""
    folder = tmp_path_factory.mktemp("embed")
    shutil.copytree(ROOT / "examples" / "embed", folder / "source")
    ok("cmake", "-S", folder / "source", "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
       f"-DCMAKE_CXX_COMPILER={cached('CMAKE_CXX_COMPILER')}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
    ok("cmake", "--build", folder / "build")
    return folder / "build" / "embed"


def test_it_says_what_kt_says(embed, tmp_path):
    wanted = ok(KT, "generate", DEMO, "-p", "Once upon a time", "--max-tokens", 24).stdout
    done = ok(embed, DEMO, "Once upon a time", 24, cwd=tmp_path)
    assert done.stdout + "\n" == wanted and len(done.stdout) > 30
    assert re.match(r"6 layers, \d+\.\d MB on \d+ threads\n",
                    done.stderr) and "24 tokens, ended by length" in done.stderr


def test_errors_are_sentences_with_a_kind(embed, tmp_path):
    done = run(embed, tmp_path, "Once upon a time")
    assert done.returncode == 2 and re.fullmatch(rf"error: .*{re.escape(str(tmp_path))}.*\n", done.stderr), done.stderr
    assert run(embed).returncode == 2


def test_headers_are_those_that_the_public_ones_include(prefix):
    include = prefix / "include" / "kt"
    found = {str(path.relative_to(include)) for path in include.rglob("*") if path.is_file()}
    listed = re.search(r"set\(KT_PUBLIC_HEADERS (.*?)\)", (ROOT / "cmake" / "embedding.cmake").read_text())[1].split()
    waiting, wanted = list(listed), set()
    while waiting:
        header = waiting.pop()
        if header not in wanted:
            wanted.add(header)
            waiting += re.findall(r'^#include "([^"]+)"', (ROOT / "src" / header).read_text(), re.M)
    assert found == wanted
    told = re.findall(r"^\| `kt/([\w/.]+)` \|", (ROOT / "docs" / "embed.md").read_text(), re.M)
    assert sorted(told) == sorted(listed)


def fragments():
    """The blocks of C++ of docs/embed.md, as functions of one file: what the second one names is the first one's."""
    blocks = re.findall(r"^```cpp\n(.*?)^```", (ROOT / "docs" / "embed.md").read_text(), re.S | re.M)
    includes = "".join(line + "\n" for block in blocks for line in block.splitlines() if line.startswith("#include"))
    code = "".join(line + "\n" for block in blocks for line in block.splitlines() if not line.startswith("#include"))
    return len(blocks), f"{includes}void show(std::string_view);\nvoid fragment() {{\n{code}}}\n"


def test_the_fragments_of_its_page_compile(prefix, tmp_path):
    count, source = fragments()
    assert count == 2
    (tmp_path / "fragment.cc").write_text(source)
    ok(cached("CMAKE_CXX_COMPILER"), "-std=c++20", "-fsyntax-only", "-isystem", prefix / "include", "-isystem",
       prefix / "include/kt",
       tmp_path / "fragment.cc")


def test_another_version_is_not_taken(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\n"
                                             "find_package(kt 0.9 REQUIRED)\n")
    done = run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}",
               f"-DCMAKE_CXX_COMPILER={cached('CMAKE_CXX_COMPILER')}")
    assert done.returncode != 0 and "0.9" in done.stderr
