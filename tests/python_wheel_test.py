"""What pip installs. The wheel is the one that install.sh made of this build (KT_INSTALLED names the folder it
installed to, its build folder has the wheel); it goes into an empty environment and is used from anywhere.
KT_WHEEL_BUILD names a folder for building the sdist as pip does, in an empty environment, which is kept; compiling
everything takes minutes without a compiler cache."""
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = os.environ.get("KT_WHEEL_BUILD")
INSTALLED = os.environ.get("KT_INSTALLED")


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def clean(**more):
    """An environment in which only what is installed is found."""
    names = ("PYTHONPATH", "KT_DEMO_MODEL", "KT_PROGRAM", "PYTHONPYCACHEPREFIX")
    return {name: value for name, value in os.environ.items() if name not in names} | more


def empty_environment(folder):
    """Nothing but Python; pip of the one that runs the tests installs into it."""
    venv.create(folder)
    return folder / "bin"


def install(into, *words, **options):
    run(sys.executable, "-m", "pip", "--python", into / "python", "install", "--no-cache-dir", *words, **options)


# A layer by its addresses, which needs neither torch nor numpy: two experts, of which one is asked.
LAYER = """
import ctypes, math, random, struct
import kt_kernel
from kt_kernel_ext.moe import AMXBF16_MOE, MOEConfig
random.seed(1)
H, I, E = 64, 32, 2
def bf16(values):
    return (ctypes.c_uint16 * len(values))(*[struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values])
def plain(codes):
    return [struct.unpack("<f", struct.pack("<I", c << 16))[0] for c in codes]
gate, up, down, x = (bf16([random.gauss(0, 0.3) for _ in range(n)]) for n in (E * I * H, E * I * H, E * H * I, H))
config = MOEConfig(E, 1, H, I, 0)
config.gate_proj, config.up_proj, config.down_proj = map(ctypes.addressof, (gate, up, down))
config.max_len = 4
infer = kt_kernel.kt_kernel_ext.CPUInfer(1)
config.pool = infer.backend_
moe = AMXBF16_MOE(config)
order = (ctypes.c_int64 * E)(0, 1)
infer.submit(moe.load_weights_task(ctypes.addressof(order)))
infer.sync()
tokens, ids, weights = ctypes.c_int32(1), (ctypes.c_int64 * 1)(1), (ctypes.c_float * 1)(0.5)
out = (ctypes.c_uint16 * H)()
infer.submit(moe.forward_task(ctypes.addressof(tokens), 1, *map(ctypes.addressof, (ids, weights, x, out)), False))
infer.sync()
g, u, d, v = map(plain, (gate, up, down, x))
dot = lambda rows, n, y: sum(a * b for a, b in zip(rows[n:n + len(y)], y))
mid = []
for i in range(I):
    a, b = dot(g, (I + i) * H, v), dot(u, (I + i) * H, v)
    mid.append(a / (1 + math.exp(-a)) * b)
want = [0.5 * dot(d, H * I + h * I, mid) for h in range(H)]
size = math.sqrt(sum(w * w for w in want))
assert size > 1 and math.dist(plain(out), want) < 0.02 * size, (plain(out)[:4], want[:4])
print(kt_kernel.__version__, kt_kernel.__cpu_variant__)
"""


def works(folder, elsewhere):
    """Of what was installed there: the program, its demo, and a layer."""
    version = run(folder / "python", "-c", LAYER, cwd=elsewhere, env=clean()).split()[0]
    assert f"kt-kernel: {version} (" in run(folder / "kt", "version", cwd=elsewhere, env=clean())
    assert run(folder / "kt", "--version", cwd=elsewhere, env=clean()) == f"kt {version}\n"
    assert run(folder / "kt", "generate", "demo", "-p", "Once upon a time", "--max-tokens", 4, cwd=elsewhere,
               env=clean()).strip()


@pytest.fixture(scope="module")
def wheel():
    if not INSTALLED:
        pytest.skip("KT_INSTALLED does not name a folder that install.sh installed to")
    found, = (pathlib.Path(INSTALLED).parent / "package").glob("kt_kernel-*.whl")
    return found


@pytest.fixture(scope="module")
def tagged(wheel, tmp_path_factory):
    pytest.importorskip("auditwheel", reason="auditwheel is not installed")
    folder = tmp_path_factory.mktemp("tagged")
    run(ROOT / "scripts/wheel.sh", "--tag", wheel, "--out", folder / "dist", "--build", folder,
        "--python", sys.executable)
    found, = (folder / "dist").glob("kt_kernel-*.whl")
    return found


def look_into(file):
    names = zipfile.ZipFile(file).namelist()
    for wanted in ("kt_kernel/__init__.py", "kt_kernel/py.typed", "kt_kernel/kt_kernel_ext.pyi", "kt_kernel/ext_moe.py",
                   "kt_kernel/transformers/__init__.py", "kt_kernel/sft/__init__.py"):
        assert wanted in names
    assert any(re.fullmatch(r"kt_kernel/kt_kernel_ext\..*so", name) for name in names)
    assert any(name.endswith("data/scripts/kt") for name in names)
    # The demo's weights are there unpacked; in the sdist, packed.
    assert len([name for name in names if re.search(r"data/share/kt/demo/tiny-deepseekv3/.*\.safetensors$", name)]) == 2
    assert not any(name.endswith(".tar.xz") for name in names)
    # The tag and the extension say the same about the stable ABI.
    assert any(name.endswith(".abi3.so") for name in names) == ("-abi3-" in file.name)
    strangers = [name for name in names if not re.match(r"kt_kernel(/|-[^/]*\.(dist-info|data)/)", name)]
    assert not strangers


def test_what_is_in_it(wheel):
    look_into(wheel)


def test_auditwheel_tags_it_for_this_glibc_or_an_older_one(tagged):
    look_into(tagged)
    name, _, machine = re.search(r"-(manylinux_2_(\d+)_(\w+?))(?:\.manylinux\w+)*\.whl$", tagged.name).groups()
    assert machine == platform.machine()
    assert int(name.split("_")[2]) <= int(platform.libc_ver()[1].split(".")[1])
    metadata = next(zipfile.ZipFile(tagged).read(entry).decode() for entry in zipfile.ZipFile(tagged).namelist()
                    if entry.endswith("/WHEEL"))
    assert name in metadata


def test_it_works_in_an_empty_environment(tagged, tmp_path):
    """pip install kt-kernel, from a folder that has the wheel."""
    environment = empty_environment(tmp_path / "environment")
    install(environment, "--no-index", "--find-links", tagged.parent, "kt-kernel")
    works(environment, tmp_path)
    listed = run(sys.executable, "-m", "pip", "--python", environment / "python", "list", "--format", "freeze").split()
    assert [line for line in listed if line.startswith("kt")] == ["kt-kernel==0.1.0"]


def test_what_install_sh_installed(wheel, tmp_path):
    usr, python = pathlib.Path(INSTALLED, "usr/bin"), pathlib.Path(INSTALLED, "python/bin")
    version = run(python / "python", "-c", "import kt_kernel; print(kt_kernel.__version__)", cwd=tmp_path,
                  env=clean()).strip()
    for program in (usr / "kt", python / "kt"):
        assert f"kt-kernel: {version} (" in run(program, "version", cwd=tmp_path, env=clean())
    # The doctor looks at that Python when it is the first of PATH.
    said = run(usr / "kt", "doctor", "--json", env=clean(PATH=f"{python}:{os.environ['PATH']}", KT_HOME=str(tmp_path)))
    facts = json.loads(said)["python"]
    assert facts["program"] == str(python / "python3") and facts["version"] == platform.python_version()
    assert facts["kt_kernel"]["version"] == version and facts["kt_kernel"]["imported"] and facts["kt_kernel"]["isa"]


def test_the_sdist_has_what_it_is_built_of(tmp_path):
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    run(ROOT / "scripts/wheel.sh", "--sdist", "--out", tmp_path, "--build", tmp_path / "build",
        "--python", sys.executable)
    sdist, = tmp_path.glob("kt_kernel-*.tar.gz")
    names = {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames() if "/" in name}
    git = subprocess.run(["git", "ls-files", "src", "python", "cmake", "demo", "CMakeLists.txt", "pyproject.toml",
                          "README.md", "LICENSE"],
                         cwd=ROOT, capture_output=True, text=True)
    wanted = set(git.stdout.splitlines()) if git.returncode == 0 else {"CMakeLists.txt", "src/cli/main.cc",
                                                                       "python/CMakeLists.txt"}
    assert wanted and not {name for name in wanted - names if (ROOT / name).exists()}
    assert not [name for name in names if re.match(r"(build|dist|out)\b|demo/.*(safetensors|unpacked)$", name)]


def test_the_sdist_builds_in_an_empty_environment(tmp_path):
    """pip install kt-kernel, from a folder that has the sources alone: pip fetches what the build needs."""
    if not FOLDER:
        pytest.skip("KT_WHEEL_BUILD names no folder (compiles everything once more)")
    if subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path / "net",
                       "scikit-build-core"],
                      capture_output=True).returncode:
        pytest.skip("pip reaches no index to fetch scikit-build-core from")
    run(ROOT / "scripts/wheel.sh", "--sdist", "--out", tmp_path / "sdist", "--build", tmp_path / "build",
        "--python", sys.executable)
    environment = empty_environment(tmp_path / "environment")
    # What a compiler cache may find again: the same compiler under the same name.
    settings = {"CMAKE_CXX_COMPILER_LAUNCHER": "ccache"} if shutil.which("ccache") else {}
    first = pathlib.Path(os.environ.get("KT_PROGRAM", "bin/kt")).parent.parent / "CMakeCache.txt"
    if first.exists() and (compiler := re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", first.read_text(), re.M)):
        settings["CXX"] = compiler[1]
    install(environment, "--find-links", tmp_path / "sdist", "--no-binary", "kt-kernel",
            "--no-deps", "kt-kernel==0.1.0", f"--config-settings=build-dir={FOLDER}", env=clean(**settings))
    works(environment, tmp_path)


@pytest.mark.parametrize("version, api", (("3.25.1", ""), ("3.26.0", "cp312"), ("4.1.2", "cp312")))
def test_the_tag_is_of_the_stable_abi_only_where_cmake_can_build_for_it(version, api, tmp_path, monkeypatch):
    reader = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    program = tmp_path / "cmake"
    answer = {"version": {"string": version}}
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CMAKE_EXECUTABLE", str(program))
    settings = reader.SettingsReader.from_file(str(ROOT / "pyproject.toml"), state="wheel").settings
    assert settings.wheel.py_api == api


def test_a_stable_abi_that_cannot_be_had_stops_the_build():
    script = ROOT / "python" / "stable_abi.cmake"
    done = subprocess.run(["cmake", "-DSKBUILD_SABI_VERSION=3.12", "-P", script], capture_output=True, text=True)
    assert done.returncode and "Python::SABIModule" in done.stderr and "3.26" in done.stderr
    run("cmake", "-DSKBUILD_SABI_VERSION=", "-P", script)
