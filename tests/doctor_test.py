"""kt doctor from outside: exit codes, JSON, what each finding says. Faked /proc and /sys trees are given with --root.
KT_PROGRAM names the program."""
import json
import os
import platform
import socket
import subprocess
import sys

import pytest

KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


def doctor(*args, **env):
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("KT_", "OMP_", "MALLOC_")) or name == "KT_PROGRAM"}
    return subprocess.run([KT, "doctor", *args], capture_output=True, text=True, env={**clean, **env})


def report(*args, code=0, **env):
    result = doctor("--json", *args, **env)
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout)


def about(found, topic):
    return [finding for finding in found["findings"] if finding["topic"] == topic]


def sound(found):
    """What holds for every report: what is not ok says what it costs and what to type."""
    assert found["healthy"] == all(finding["level"] != "FAIL" for finding in found["findings"])
    for finding in found["findings"]:
        assert finding["found"] and finding["level"] in ("ok", "warning", "FAIL")
        assert bool(finding["cost"]) == bool(finding["fix"]) == (finding["level"] != "ok"), finding
    return found


@pytest.fixture
def tree(tmp_path):
    """A machine of two even nodes and 64 GiB; write() adds or changes a file."""
    def write(path, content):
        file = tmp_path / "tree" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 58720256 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n")
    write("proc/self/cgroup", "0::/\n")
    write("proc/sys/kernel/numa_balancing", "1\n")
    for node in (0, 1):
        write(f"sys/devices/system/node/node{node}/cpulist", f"{node}\n")
        write(f"sys/devices/system/node/node{node}/meminfo",
              f"Node {node} MemTotal: 33554432 kB\nNode {node} MemFree: 16777216 kB\n")
    write.root = str(tmp_path / "tree")
    return write


def test_everything_is_looked_at(tmp_path):
    found = sound(report("--disk", str(tmp_path), KT_HOME=str(tmp_path)))
    assert {finding["topic"] for finding in found["findings"]} >= {
        "cpu", "caches", "frequency", "isa", "memory", "swap", "numa", "huge pages", "read", "kernels", "disk",
        "disk read", "cuda", "python", "port", "files", "limits", "environment"}
    assert found["read_gb_per_s"] > 0 and found["kernels"] and all(check["ok"] for check in found["kernels"])
    assert found["disk"]["path"] == str(tmp_path) and found["disk"]["free_bytes"] > 0
    assert found["limits"]["open_files"] is None or found["limits"]["open_files"] > 0


def test_quick_measures_nothing_but_runs_the_kernels(tmp_path):
    found = sound(report("--quick", KT_HOME=str(tmp_path)))
    assert "read_gb_per_s" not in found and not about(found, "disk read")
    assert about(found, "kernels")[0]["level"] == "ok" and len(found["kernels"]) > 50


def test_cpu_is_the_cpu_and_memory_only():
    found = sound(report("--cpu", "--quick"))
    topics = {finding["topic"] for finding in found["findings"]}
    assert {"cpu", "isa", "memory", "kernels"} <= topics and not topics & {"disk", "cuda", "port", "files"}


def test_words_for_people(tmp_path):
    result = doctor("--quick", "--details", KT_HOME=str(tmp_path))
    assert result.returncode == 0 and result.stderr == "" and "\033" not in result.stdout
    lines = result.stdout.splitlines()
    assert any(line.startswith("kernels ") and " ok " in line for line in lines)
    assert any(line.split()[:3] == ["int4", "few", "1"] for line in lines)


def test_help_says_the_exit_codes():
    page = doctor("--help").stdout
    assert "Exit code 0" in page and "4 with one" in page and "--root" not in page


def test_forced_isa_is_a_warning():
    if report("--quick")["isa"]["best"] == "portable":
        pytest.skip("this CPU runs portable only")
    isa, = about(sound(report("--quick", KT_ISA="portable")), "isa")
    assert isa["level"] == "warning" and isa["fix"] == "unset KT_ISA"
    measured, = about(sound(report("--cpu", KT_KERNEL_CPU_VARIANT="portable")), "isa")
    assert "TOPS" in measured["cost"] and measured["fix"] == "unset KT_KERNEL_CPU_VARIANT"


def test_broken_settings_fail(tmp_path):
    (tmp_path / "config.yaml").write_text("server: [\n")
    found = sound(report("--quick", code=4, KT_HOME=str(tmp_path)))
    files, = about(found, "files")
    assert files["level"] == "FAIL" and "config.yaml" in files["found"]
    result = doctor("--quick", KT_HOME=str(tmp_path))
    line, = result.stderr.splitlines()
    assert result.returncode == 4 and line.startswith("kt: ") and "files" in line


def test_another_machine(tree):
    found = sound(report("--cpu", "--quick", "--root", tree.root))
    assert found["memory"]["installed_bytes"] == 64 << 30 and len(found["numa"]["nodes"]) == 2
    assert [finding["level"] for finding in about(found, "numa")] == ["ok", "warning"]
    assert about(found, "numa")[1]["fix"] == "sudo sysctl kernel.numa_balancing=0"


def test_hardly_any_memory_fails(tree):
    tree("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 65536 kB\n")
    found = sound(report("--cpu", "--quick", "--root", tree.root, code=4))
    assert about(found, "memory")[0]["level"] == "FAIL"


def test_container_limits(tree):
    tree("sys/fs/cgroup/memory.max", str(4 << 30))
    tree("sys/fs/cgroup/memory.current", "0")
    tree("sys/fs/cgroup/cpu.max", "50000 100000")
    found = sound(report("--cpu", "--quick", "--root", tree.root))
    assert "4.0 GiB" in about(found, "memory limit")[0]["cost"]
    assert found["cpu_quota"]["cores"] == 0.5 and about(found, "cpu quota")[0]["level"] == "warning"


def test_taken_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        found = sound(report("--quick", "--port", str(port)))
    finding, = about(found, "port")
    assert finding["level"] == "warning" and str(port) in finding["found"] and f"--port {port + 1}" in finding["fix"]
    if os.path.exists("/proc/net/tcp"):
        assert f"(pid {os.getpid()})" in finding["found"]


def test_environment():
    found = sound(report("--quick", OMP_NUM_THREADS="3", MALLOC_PERTURB_="7"))
    slow, rest = about(found, "environment")
    assert slow["fix"] == "unset MALLOC_PERTURB_" and "OMP_NUM_THREADS=3" in rest["found"]


@pytest.mark.parametrize("args", [["--port", "0"], ["--port", "x"], ["--nonsense"]])
def test_bad_words(args):
    result = doctor(*args)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_a_folder_that_is_not_there(tmp_path):
    found = sound(report("--quick", "--disk", str(tmp_path / "none")))
    assert about(found, "disk")[0]["level"] == "warning"


# ---- the Python on PATH

KERNEL = "__version__, __cpu_variant__ = '{version}', 'avx2'\nclass KTMoEWrapper: pass\n"
SGLANG = """print("noise")
try:
    from kt_kernel import KTMoEWrapper
    KTRANSFORMERS_AVAILABLE = True
except ImportError:
    KTRANSFORMERS_AVAILABLE = False
"""


@pytest.fixture
def python(tmp_path):
    """Stand-ins for packages by the paths of their files; gives the report on the Python that finds them."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "python3"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)

    def look(files, *args):
        for path, content in files.items():
            file = tmp_path / "site" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        for folder in (tmp_path / "site").rglob("*"):
            if folder.is_dir():
                (folder / "__init__.py").touch()
        found = sound(report("--disk", str(tmp_path), *args, KT_HOME=str(tmp_path), PYTHONPATH=str(tmp_path / "site"),
                             PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}"))
        assert found["python"]["program"] == str(program) and found["python"]["version"] == platform.python_version()
        return found
    return look


def own_version():
    return report("--quick", "--cpu")["version"]


def test_python_with_everything(python):
    found = python({"kt_kernel/__init__.py": KERNEL.format(version=own_version()),
                    "torch.py": "__version__ = '2.13.0'\nclass version: cuda = None\n"
                                "class cuda: is_available = lambda: False",
                    "sglang/srt/layers/moe/kt_ep_wrapper.py": SGLANG})
    assert found["python"]["kt_kernel"] | {"version": own_version(), "isa": "avx2",
                                           "imported": True} == found["python"]["kt_kernel"]
    assert about(found, "kt_kernel")[0]["level"] == "ok" and "(avx2)" in about(found, "kt_kernel")[0]["found"]
    assert "2.13.0, built without CUDA" in about(found, "torch")[0]["found"]
    assert about(found, "sglang")[0]["level"] == "ok" and "its kt support loads" in about(found, "sglang")[0]["found"]


WRAPPER = "sglang/srt/layers/moe/kt_ep_wrapper.py"


@pytest.mark.parametrize("files, wanted", [
    ({"kt_kernel.py": "raise ImportError('libx.so.1:\\n  not found')",
      "torch.py": "raise OSError('libcudart.so.13: cannot open')",
      WRAPPER: "import no_such_module"},
     {"kt_kernel": "cannot be imported: ImportError: libx.so.1: not found", "torch": "OSError: libcudart.so.13",
      "sglang": "does not load: ModuleNotFoundError: No module named 'no_such_module'"}),
    ({"kt_kernel.py": "import os; os.abort()"}, {"kt_kernel": "Python ended with signal 6"}),
    ({"kt_kernel.py": "import sys; sys.exit('no')", "sglang/srt/layers/moe/other.py": ""},
     {"kt_kernel": "SystemExit: no", "sglang": "this SGLang has no sglang.srt.layers.moe.kt_ep_wrapper"}),
    ({"kt_kernel.py": "def __getattr__(name): raise ValueError('KT_ISA=x: unknown')"},
     {"kt_kernel": "ValueError: KT_ISA=x: unknown"}),
    # Another version, and one that lacks what SGLang wants.
    ({"kt_kernel.py": "__version__, __cpu_variant__ = '0.7.2', 'amx'", WRAPPER: SGLANG},
     {"kt_kernel": "0.7.2 (amx); this kt is ",
      "sglang": "does not load: ImportError: cannot import name 'KTMoEWrapper'"}),
])
def test_python_with_something_broken(python, files, wanted):
    found = python(files)
    for topic, said in wanted.items():
        finding, = about(found, topic)
        assert finding["level"] == "warning" and said in finding["found"] and "\n" not in finding["found"]


def test_quick_imports_nothing(python):
    found = python({"kt_kernel.py": "raise ImportError('asked')", "sglang/__init__.py": "raise ImportError('asked')"},
                   "--quick")
    assert all(finding["level"] == "ok" for topic in ("kt_kernel", "sglang") for finding in about(found, topic))


def test_no_python_on_path(tmp_path):
    found = sound(report("--quick", PATH=str(tmp_path)))
    finding, = about(found, "python")
    assert found["python"] is None and finding["level"] == "ok" and "none on PATH" in finding["found"]
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    finding, = about(sound(report("--quick", PATH=str(tmp_path))), "python")
    assert finding["level"] == "warning" and "does not work" in finding["found"]
