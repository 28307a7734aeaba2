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
         "share/kt/demo/tiny-deepseekv3/model-00001-of-00002.safetensors",
         "share/kt/demo/tiny-deepseekv3/model-00002-of-00002.safetensors", "share/doc/kt/README.md",
         "share/doc/kt/LICENSE", "lib/systemd/system/kt.service", "lib/sysusers.d/kt.conf"]


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
    devel = re.compile(r"include/kt/|lib[\w/-]*/(libkt_\w+\.a$|cmake/kt/)")  # embed_test.py builds with them
    strangers = {name for name in found if not name.startswith(("bin/kt", "share/"))
                 and not devel.match(name)} - set(FILES)
    assert not strangers
    assert not any(name.endswith(".tar.xz") for name in found)  # the demo is there unpacked
    assert os.access(prefix / "bin/kt", os.X_OK)


def test_unit(prefix, tmp_path):
    """Whole, hardened, and enabled by nobody."""
    unit = (prefix / "lib/systemd/system/kt.service").read_text()
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet=",
                 "SystemCallFilter=@system-service", "User=kt",
                 "ExecStart=kt run $KT_RUN", "ExecReload=kill -HUP $MAINPID"):
        assert f"\n{line}\n" in unit
    assert not list(prefix.rglob("*.wants"))
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed: the unit was only read")
    # The program and its user are not on this machine.
    (tmp_path / "kt.service").write_text(unit.replace("ExecStart=kt", f"ExecStart={prefix}/bin/kt"))
    checked = run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", tmp_path / "kt.service")
    assert checked.returncode == 0 and "kt.service:" not in checked.stderr, checked.stderr


def test_installed_program_works_elsewhere(prefix, tmp_path):
    program = prefix / "bin/kt"
    assert version_of(program, cwd=tmp_path) == version_of(KT)
    assert "Examples:" in run(program, "help", cwd=tmp_path).stdout
    told = run(program, "generate", prefix / "share/kt/demo/tiny-deepseekv3", "-p", "Once upon a time",
               "--max-tokens", 8, cwd=tmp_path)
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
    words = ["cmake", f"-DSOURCE={tmp_path}", "-DBASE=0.1.0", f"-DOUTPUT={tmp_path}", "-P",
             ROOT / "cmake/version.cmake"]
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
    assert not (top / "include").exists() and not list(top.rglob("*.a"))  # the program alone
    assert version_of(top / "bin/kt") == version_of(KT)


# ---- install.sh

def install_sh(tmp_path, *words, python=None, **variables):
    """install.sh with a make and a cmake that print what they were asked for, and perhaps another python3."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, script in {"make": 'echo "make $*"', "cmake": 'echo "cmake $*" >&2',
                         **({"python3": python} if python else {})}.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CPUINFER_")
           and name not in ("PREFIX", "BUILD")}
    return run(ROOT / "install.sh", *words, stdin=subprocess.DEVNULL, cwd=tmp_path,
               env={**env, "PATH": f"{tools}:{env['PATH']}", "PREFIX": str(tmp_path / "usr"), **variables})


def python_that_is(version, owner, lacks=""):
    """Answers install.sh's questions; does nothing else."""
    return f'echo "{version} {owner} {lacks}"'


def test_install_sh_says_first_what_it_will_do(tmp_path):
    result = install_sh(tmp_path, "--dry-run", python=python_that_is("3.11.2", "pip"), CPUINFER_PARALLEL="3")
    first, packages, program, package = result.stdout.splitlines()
    assert result.returncode == 0 and first == "install.sh: this will be done:"
    assert packages.startswith("  packages ") and f"build with 3 jobs, then {tmp_path}/usr/bin/kt" in program
    assert f"kt_kernel into Python 3.11.2, {tmp_path}/tools/python3" in package
    result = install_sh(tmp_path, "build", "--dry-run", python=python_that_is("3.11.2", "system"))
    assert "packages" not in result.stdout and f"kt_kernel into {tmp_path}/usr/share/kt/python" in result.stdout
    result = install_sh(tmp_path, "deps", "--dry-run")
    assert len(result.stdout.splitlines()) == 2
    result = install_sh(tmp_path, "deps", "build", "--no-python", "--dry-run")
    assert "packages" in result.stdout and "program" in result.stdout
    result = install_sh(tmp_path, "build", "--no-python", "--dry-run", "--prefix", "here")  # of whoever calls it
    assert f"then {tmp_path}/here/bin/kt" in result.stdout
    result = install_sh(tmp_path, "build", "--dry-run", "--no-python", "--prefix", tmp_path / "other")
    assert f"{tmp_path}/other/bin/kt" in result.stdout and "--no-python" in result.stdout
    assert not (tmp_path / "usr").exists()


# What the documents have people type and set.
@pytest.mark.parametrize("variables, notes", [
    ({}, 0),
    ({"CPUINFER_CPU_INSTRUCT": "AVX512", "CPUINFER_ENABLE_AMX": "OFF"}, 2),
    ({"CPUINFER_CPU_INSTRUCT": "AVX2", "CPUINFER_ENABLE_AMX": "OFF"}, 2),
    ({"CPUINFER_CPU_INSTRUCT": "FANCY", "CPUINFER_ENABLE_AMX": "OFF"}, 2),
    ({"CPUINFER_CPU_INSTRUCT": "NATIVE", "CPUINFER_ENABLE_AMX": "ON"}, 2),
    ({"CPUINFER_ENABLE_AVX512_VNNI": "OFF", "CPUINFER_ENABLE_AVX512_BF16": "OFF"}, 2),
    ({"CPUINFER_BUILD_TYPE": "Debug", "CPUINFER_VERBOSE": "1"}, 0),
    ({"CPUINFER_USE_CUDA": "1"}, 1),
])
@pytest.mark.parametrize("words", [["build"], ["build", "--manual"]])
def test_install_sh_builds(tmp_path, words, variables, notes):
    result = install_sh(tmp_path, *words, "--no-python", CPUINFER_PARALLEL="3", **variables)
    assert result.returncode == 0, result.stderr
    made, = [line for line in result.stdout.splitlines() if line.startswith("make ")]
    assert (" program " in made and "JOBS=3" in made
            and ("-DCMAKE_BUILD_TYPE=Debug" in made) == ("CPUINFER_BUILD_TYPE" in variables))
    said = result.stderr.splitlines()
    assert f"cmake --install build --prefix {tmp_path}/usr" in said
    about = [line for line in said if line.startswith("install.sh: note: CPUINFER_")]
    assert len(about) == notes
    assert sum("all instruction sets are in one library" in line for line in about) == (notes if notes == 2 else 0)
    assert (f"install.sh: installed {tmp_path}/usr/bin/kt" in result.stdout
            and "kt doctor" in result.stdout.splitlines()[-1])


@pytest.mark.parametrize("words, variables",
                         [(["nonsense"], {}), (["--manual"], {}), (["deps", "--manual"], {}), (["--prefix"], {}),
                          (["build"], {"CPUINFER_PARALLEL": "many"}),
                          (["build", "--python", "/nonexistent/python"], {}),
                          (["build", "--prefix", "/dev/null/kt"], {})])
def test_install_sh_bad_words(tmp_path, words, variables):
    result = install_sh(tmp_path, *words, **variables)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "make" not in result.stdout


@pytest.mark.parametrize("python, said", [(python_that_is("3.9.2", "pip"), "3.10 or newer"),
                                          (python_that_is("3.11.2", "pip", "headers"), "lacks its headers"),
                                          (python_that_is("3.11.2", "system", "headers,venv"),
                                           "lacks its headers and venv"),
                                          ("exit 1", "does not run")])
def test_install_sh_names_what_the_python_lacks(tmp_path, python, said):
    result = install_sh(tmp_path, "build", python=python)
    line, = result.stderr.splitlines()
    assert result.returncode == 2 and said in line and "--no-python" in line and "make" not in result.stdout


def test_install_sh_help(tmp_path):
    result = install_sh(tmp_path, "--help")
    assert result.returncode == 0 and "CPUINFER_PARALLEL" in result.stdout and "#" not in result.stdout
    for word in ("deps", "build [--manual]", "--prefix", "--python", "--no-python", "--dry-run", "--yes"):
        assert word in result.stdout


def test_setup_lists_what_is_missing():
    if not shutil.which("dpkg-query"):
        pytest.skip("no dpkg-query: not a Debian system")
    listed = run(ROOT / "scripts/setup.sh", "--list", "no-such-package-of-debian")
    assert listed.returncode == 0 and "no-such-package-of-debian" in listed.stdout.splitlines()
    assert run(ROOT / "scripts/setup.sh", "--nonsense").returncode == 2
