"""kt_kernel as part of a process: what importing costs, variables, forks, memory, logging. Each test is a process of
its own."""
import os
import subprocess
import sys

import pytest

pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")


def python(code, **variables):
    env = {name: value for name, value in os.environ.items() if name not in ("KT_ISA", "KT_KERNEL_CPU_VARIANT")}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900,
                          env={**env, **variables})


def said(code, **variables):
    done = python(code, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


LAYER = """
import torch
from kt_kernel import KTMoEWrapper
def layer(seed=0):
    w = KTMoEWrapper(0, 4, 2, 64, 64, None, 2, 1, None, 16, method="BF16")
    torch.manual_seed(seed)
    w.load_weights_from_tensors(*(torch.randn(4, 64, 64).bfloat16() * 0.1 for _ in range(3)))
    return w
x, ids, scores = torch.ones(1, 64).bfloat16(), torch.tensor([[0, 3]]), torch.ones(1, 2)
"""


def test_import_is_quick_and_needs_no_torch():
    code = """
import sys, time
sys.modules["torch"] = None  # importing it fails
began = time.process_time()
import kt_kernel
from kt_kernel import KTMoEWrapper, kt_kernel_ext
KTMoEWrapper.set_capture_batch_sizes([1])
KTMoEWrapper.clear_buffer_cache()
kt_kernel.__version__, kt_kernel.__cpu_variant__, dir(kt_kernel)
print(time.process_time() - began)
"""
    assert float(said(code)) < 1


def test_variants():
    ask = "import kt_kernel; print(kt_kernel.__cpu_variant__)"
    known = said("from kt_kernel import kt_kernel_ext as e; print(*(n for n, lacks in e.isas() if not lacks))").split()
    assert said(ask, KT_KERNEL_CPU_VARIANT="portable").strip() == "portable"
    for theirs, ours in (("avx2", "avx2"), ("avx512_base", "avx512"), ("avx512_vnni", "avx512_vnni"),
                         ("avx512_vbmi", "avx512_vnni"), ("amx", "amx")):
        if ours in known:
            assert said(ask, KT_KERNEL_CPU_VARIANT=theirs).strip() == theirs
    assert said("import kt_kernel; print('imported')", KT_KERNEL_CPU_VARIANT="sse9").strip() == "imported"
    bad = python(ask, KT_KERNEL_CPU_VARIANT="sse9")
    assert bad.returncode and "ValueError" in bad.stderr and "sse9" in bad.stderr and "portable" in bad.stderr


def test_debug_says_what_was_chosen_and_why():
    for variables, reason in (({}, "the best that runs here"), ({"KT_KERNEL_CPU_VARIANT": "portable"}, "=portable"),
                              ({"KT_KERNEL_CPU_VARIANT": "sse9"}, "unknown ISA 'sse9'")):
        done = python("import kt_kernel", KT_KERNEL_DEBUG="1", **variables)
        assert done.returncode == 0 and reason in done.stderr
    assert python("import kt_kernel").stderr == ""


def test_fork():
    """A wrapper of the parent raises in the child; a new one works there; the parent goes on."""
    assert said(LAYER + """
import os
old = layer()
want = old.forward(x, ids, scores).clone()
child = os.fork()
if child == 0:
    code = 1
    try:
        try:
            old.forward(x, ids, scores)
        except RuntimeError as error:
            assert "forked" in str(error), error
            new = layer()
            code = 0 if torch.equal(new.forward(x, ids, scores), want) else 3
            del old, new
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(old.forward(x, ids, scores), want)
print("done")
""").strip() == "done"


def test_memory_does_not_grow():
    grown = said(LAYER + """
import os
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
w = layer()
for _ in range(1000): w.forward(x, ids, scores)
before = resident()
for _ in range(10000): w.forward(x, ids, scores)
for _ in range(20): layer(1).forward(x, ids, scores)
print(resident() - before)
""")
    assert int(grown) < 4 << 20


def test_the_wrapper_ends_before_its_results():
    assert said(LAYER + """
y = layer().forward(x, ids, scores)
mask = layer().gpu_experts_mask
mask[0] = True
print(bool(y.isfinite().all()), mask.tolist())
""").strip() == "True [True, False, False, False]"


def test_log_lines_go_to_logging():
    assert said(LAYER + """
import logging
from kt_kernel import kt_kernel_ext
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("kt_kernel").addHandler(Keep())
w = layer()
kt_kernel_ext._log(2, "100% odd {}")
kt_kernel_ext._log(1, "not shown")
w.forward(x, ids, scores)
assert lines == [("WARNING", "100% odd {}")], lines
logging.getLogger("kt_kernel").setLevel(logging.INFO)
layer()
lines.clear()
kt_kernel_ext._log(1, "shown")
w.forward(x, ids, scores)
assert lines == [("INFO", "shown")], lines
class Broken(logging.Handler):
    def emit(self, record): raise ZeroDivisionError
logging.getLogger("kt_kernel").addHandler(Broken())
kt_kernel_ext._log(3, "worse")
w.forward(x, ids, scores)
print("done")
""").strip() == "done"


def test_python_tasks_at_the_end_of_the_process():
    """A queue that still holds Python tasks neither hangs nor kills the interpreter."""
    done = python("""
import time
from kt_kernel import kt_kernel_ext
infer = kt_kernel_ext.CPUInfer(2)
for _ in range(20): infer.submit(lambda: time.sleep(0.01))
print("end")
""")
    assert done.returncode == 0 and done.stdout.strip() == "end", done.stderr
