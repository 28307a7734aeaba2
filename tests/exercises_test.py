"""The first exercises of CONTRIBUTING.md, kept as patches: each applies to the tree as it is, what it changes compiles
as far as a compiler looks before it makes code, and the one in Python runs."""
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PATCHES = sorted((ROOT / "tests" / "exercises").glob("*.patch"))
# Files that an exercise touches, as CONTRIBUTING and DESIGN's "Where things go" count them.
COUNTED = {"group_size": {"src/formats/known_formats.h"},
           "verb": {"src/cli/formats.cc", "src/cli/verbs.h", "src/cli/main.cc", "src/cli/next_step.cc"},
           "mixer": {"src/models/pass_mixer.cc", "src/models/spec.h", "src/models/mixer.h", "src/models/mixer.cc",
                     "src/models/module_tree.cc"},
           "operator": {"examples/python/counted_linear.py", "examples/python/counted_linear.yaml"}}
pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def changed(patch):
    return set(re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M))


@pytest.fixture
def applied(tmp_path):
    """apply(patch): a copy of src/ and examples/ with the patch in it."""
    def apply(patch):
        for folder in ("src", "examples"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        run("git", "apply", "--check", patch, cwd=tmp_path)
        run("git", "apply", patch, cwd=tmp_path)
        return tmp_path
    return apply


def test_there_are_as_many_as_are_told():
    assert {patch.stem for patch in PATCHES} == set(COUNTED)
    told = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"tests/exercises/{patch.name}" in told for patch in PATCHES)
    # The one that stands there whole is the one that is tested.
    line, = re.findall(r"^\+( +\{\"int4_g512\".*)$", (ROOT / "tests/exercises/group_size.patch").read_text(), re.M)
    assert line in told


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_costs_the_files_that_are_told(patch):
    assert changed(patch) == COUNTED[patch.stem]


def smallest_source_with(header, tree):
    line = f'#include "{header.removeprefix("src/")}"\n'
    sources = [path for path in (tree / "src").rglob("*.cc") if line in path.read_text()]
    return min(sources, key=lambda path: path.stat().st_size).relative_to(tree)


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
@pytest.mark.skipif(not pathlib.Path("/usr/include/CLI/CLI.hpp").exists(), reason="CLI11 is not in /usr/include")
@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch.stem != "operator"],
                         ids=lambda patch: patch.stem)
def test_compiles(patch, applied):
    tree = applied(patch)
    sources = [name for name in changed(patch) if name.endswith(".cc")]
    for name in sources or [smallest_source_with(header, tree) for header in changed(patch)]:
        run("g++", "-std=c++20", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", "-fsyntax-only",
            "-Isrc", name, cwd=tree)


def test_the_operator_runs(applied):
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
    patch, = (patch for patch in PATCHES if patch.stem == "operator")
    said = run(sys.executable, applied(patch) / "examples/python/counted_linear.py", ROOT / "demo/tiny-deepseekv3")
    assert "6 calls in 6 layers" in said and re.search(r"^routed experts .* int8 .*rule 2", said, re.M), said
