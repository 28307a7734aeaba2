"""What `make install` and `make package` put where, and that the installed program works from anywhere. KT_PROGRAM
names the program; its build folder (or KT_BUILD) is what gets installed."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

KT = os.environ.get("KT_PROGRAM")
BUILD = pathlib.Path(os.environ.get("KT_BUILD") or (pathlib.Path(KT).resolve().parent.parent if KT else "/nonexistent"))
ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program"),
              pytest.mark.skipif(not (BUILD / "cmake_install.cmake").exists(), reason=f"{BUILD} is no build folder"),
              pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")]

FILES = ["bin/kt", "share/man/man1/kt.1", "share/bash-completion/completions/kt", "share/zsh/site-functions/_kt",
         "share/fish/vendor_completions.d/kt.fish", "share/kt/demo/stories.txt",
         "share/kt/demo/tiny-deepseekv3/config.json", "share/kt/demo/tiny-deepseekv3/tokenizer.json",
         "share/kt/demo/tiny-deepseekv3/model-00001-of-00002.safetensors", "share/doc/kt/README.md",
         "share/doc/kt/LICENSE"]


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    made = run("cmake", "--build", BUILD, "--target", "kt_documents")
    assert made.returncode == 0, made.stdout[-2000:]
    folder = tmp_path_factory.mktemp("installed") / "usr"
    done = run("cmake", "--install", BUILD, "--prefix", folder)
    assert done.returncode == 0, done.stderr
    return folder


def version_of(program, **options):
    return re.search(r"^kt-kernel: (\S+) \(", run(program, "version", **options).stdout, re.M)[1]


def test_files(prefix):
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    assert set(FILES) <= found
    strangers = {name for name in found if not name.startswith(("bin/kt", "share/"))}
    assert not strangers
    assert os.access(prefix / "bin/kt", os.X_OK)


def test_installed_program_works_elsewhere(prefix, tmp_path):
    program = prefix / "bin/kt"
    assert version_of(program, cwd=tmp_path) == version_of(KT)
    assert "Examples:" in run(program, "help", cwd=tmp_path).stdout
    told = run(program, "generate", prefix / "share/kt/demo/tiny-deepseekv3", "-p", "Once upon a time", "--max-tokens", 8,
               cwd=tmp_path)
    assert told.returncode == 0 and told.stdout.strip(), told.stderr


def test_documents_are_the_program_s_own(prefix):
    program = prefix / "bin/kt"
    assert (prefix / "share/man/man1/kt.1").read_text() == run(program, "help", "--man").stdout
    for shell, file in (("bash", FILES[2]), ("zsh", FILES[3]), ("fish", FILES[4])):
        assert (prefix / file).read_text() == run(program, "completion", shell).stdout


@pytest.mark.parametrize("state, wanted", [
    ("no git", r"0\.1\.0"),
    ("inside another repository", r"0\.1\.0"),
    ("no tag", r"0\.1\.0\+g[0-9a-f]{10}"),
    ("changed", r"0\.1\.0\+g[0-9a-f]{10}\.dirty"),
    ("tagged", r"0\.2\.0"),
    ("tagged and changed", r"0\.2\.0\+dirty"),
    ("after the tag", r"0\.2\.0\+1\.g[0-9a-f]{10}"),
])
@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_version_from_git(tmp_path, state, wanted):
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("one\n")

    def git(*words, at=source):
        done = run("git", "-c", "user.name=n", "-c", "user.email=e@localhost", *words, cwd=at)
        assert done.returncode == 0, done.stderr

    if state == "inside another repository":
        git("init", "-q", at=tmp_path)
        git("add", ".", at=tmp_path)
        git("commit", "-qm", "other", at=tmp_path)
    elif state != "no git":
        git("init", "-q")
        git("add", ".")
        git("commit", "-qm", "one")
    if "tag" in state and state != "no tag":
        git("tag", "v0.2.0")
    if state == "after the tag":
        git("commit", "-q", "--allow-empty", "-m", "two")
    if "changed" in state:
        (source / "file").write_text("two\n")
    out = tmp_path / "out"
    done = run("cmake", f"-DSOURCE={source}", "-DBASE=0.1.0", f"-DOUTPUT={out}", "-P", ROOT / "cmake/version.cmake")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f'#define KT_VERSION "{wanted}"\n', (out / "kt_version.h").read_text())


def test_version_keeps_its_time_stamp(tmp_path):
    words = ["cmake", f"-DSOURCE={tmp_path}", "-DBASE=0.1.0", f"-DOUTPUT={tmp_path}", "-P", ROOT / "cmake/version.cmake"]
    run(*words)
    before = (tmp_path / "kt_version.h").stat().st_mtime_ns
    run(*words)
    assert (tmp_path / "kt_version.h").stat().st_mtime_ns == before


@pytest.fixture(scope="module")
def packages(prefix, tmp_path_factory):
    if not shutil.which("cpack"):
        pytest.skip("cpack is not installed")
    folder = tmp_path_factory.mktemp("packages")
    done = run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="dpkg-deb is not installed")
def test_deb(packages, tmp_path):
    deb, = packages.glob("*.deb")
    architecture = run("dpkg", "--print-architecture").stdout.strip()
    fields = {name: run("dpkg-deb", "-f", deb, name).stdout.strip()
              for name in ("Package", "Version", "Architecture", "Maintainer", "Depends")}
    assert fields["Package"] == "kt" and fields["Architecture"] == architecture
    assert fields["Version"] == version_of(KT) and deb.name == f"kt_{fields['Version']}_{architecture}.deb"
    assert fields["Maintainer"].startswith("KT developers")
    assert "libc6" in fields["Depends"] and "libstdc++6" in fields["Depends"]
    listed = {line.split()[-1] for line in run("dpkg-deb", "-c", deb).stdout.splitlines()}
    for name in FILES:
        # Debian's zsh looks elsewhere.
        assert "./usr/" + name.replace("zsh/site-functions", "zsh/vendor-completions") in listed
    assert run("dpkg-deb", "-x", deb, tmp_path).returncode == 0
    assert version_of(tmp_path / "usr/bin/kt") == fields["Version"]


def test_tgz(packages, tmp_path):
    archive, = packages.glob("*.tar.gz")
    assert run("tar", "xzf", archive, "-C", tmp_path).returncode == 0
    top, = tmp_path.iterdir()
    assert top.name == f"kt-{version_of(KT)}-linux-{os.uname().machine}"
    for name in FILES:
        assert (top / name).is_file()
    assert version_of(top / "bin/kt") == version_of(KT)


# ---- install.sh

def install_sh(tmp_path, *words, **variables):
    """install.sh with a make that prints what it was asked for."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "make").write_text('#!/bin/sh\necho "make $*"\n')
    (tools / "make").chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CPUINFER_")}
    return run(ROOT / "install.sh", *words, env={**env, "PATH": f"{tools}:{env['PATH']}", **variables}, cwd=tmp_path)


def test_install_sh_builds(tmp_path):
    result = install_sh(tmp_path, "build", "--manual", CPUINFER_PARALLEL="3", CPUINFER_BUILD_TYPE="Debug")
    assert result.returncode == 0 and result.stderr == ""
    line = result.stdout.splitlines()[0]
    assert "program" in line and "JOBS=3" in line and "-DCMAKE_BUILD_TYPE=Debug" in line


def test_install_sh_ignores_isa_choices_with_a_note(tmp_path):
    result = install_sh(tmp_path, "build", CPUINFER_CPU_INSTRUCT="AVX512", CPUINFER_ENABLE_AMX="ON", CPUINFER_USE_CUDA="1")
    assert result.returncode == 0
    notes = result.stderr.splitlines()
    assert len(notes) == 3 and all(line.startswith("install.sh: note: CPUINFER_") for line in notes)
    assert sum("all instruction sets are in one library" in line for line in notes) == 2


@pytest.mark.parametrize("words, variables", [(["nonsense"], {}), (["--manual"], {}), (["deps", "--manual"], {}),
                                              (["build"], {"CPUINFER_PARALLEL": "many"})])
def test_install_sh_bad_words(tmp_path, words, variables):
    result = install_sh(tmp_path, *words, **variables)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_install_sh_help(tmp_path):
    result = install_sh(tmp_path, "--help")
    assert result.returncode == 0 and "CPUINFER_PARALLEL" in result.stdout and "#" not in result.stdout
