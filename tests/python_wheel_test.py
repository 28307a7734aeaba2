"""The wheel: built from the source folder, installed into an empty environment, used from anywhere. KT_WHEEL_BUILD names a
folder for the build, which is kept; compiling everything takes minutes without a compiler cache."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = os.environ.get("KT_WHEEL_BUILD")


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not FOLDER:
        pytest.skip("KT_WHEEL_BUILD names no folder (compiles everything once more)")
    out = tmp_path_factory.mktemp("wheel")
    # What a compiler cache may find again: the same compiler under the same name.
    define = "--config-settings=cmake.define."
    settings = [f"{define}CMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    first = pathlib.Path(os.environ.get("KT_PROGRAM", "bin/kt")).parent.parent / "CMakeCache.txt"
    if first.exists() and (compiler := re.search(r"^CMAKE_CXX_COMPILER:\w+=(.+)$", first.read_text(), re.M)):
        settings.append(f"{define}CMAKE_CXX_COMPILER={compiler[1]}")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps", "-w", out,
        f"--config-settings=build-dir={FOLDER}", *settings)
    return next(out.glob("kt_kernel-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    run(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index", wheel)
    return folder / "bin"


def test_what_is_in_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("kt_kernel/__init__.py", "kt_kernel/py.typed", "kt_kernel/kt_kernel_ext.pyi", "kt_kernel/ext_moe.py",
                   "kt_kernel/transformers/__init__.py"):
        assert wanted in names
    assert any(re.fullmatch(r"kt_kernel/kt_kernel_ext\..*so", name) for name in names)
    assert any(name.endswith("data/scripts/kt") for name in names)
    # The tag and the extension say the same about the stable ABI.
    assert any(name.endswith(".abi3.so") for name in names) == ("-abi3-" in wheel.name)
    strangers = [name for name in names if not re.match(r"kt_kernel(/|-[^/]*\.(dist-info|data)/)", name)]
    assert not strangers


def test_it_works_elsewhere(installed, tmp_path):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KT_DEMO_MODEL")}
    version = run(installed / "python", "-c", "import kt_kernel; print(kt_kernel.__version__, kt_kernel.__cpu_variant__)",
                  cwd=tmp_path, env=clean).split()[0]
    assert f"kt-kernel: {version} (" in run(installed / "kt", "version", cwd=tmp_path, env=clean)
    assert run(installed / "kt", "generate", "demo", "-p", "Once upon a time", "--max-tokens", 4, cwd=tmp_path,
               env=clean).strip()


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
