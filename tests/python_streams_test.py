"""kt_kernel in CUDA streams, on the test driver of src/cuda/testing, which keeps streams and graphs on the CPU.
KT_TEST_CUDA names the folder with its libcuda.so.1. Each test is a process of its own, which finds that library
first."""
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import torch_processes

CUDA = os.environ.get("KT_TEST_CUDA", "")
pytestmark = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists(),
                                reason="KT_TEST_CUDA does not name a folder with the test driver")

SETUP = """
import ctypes, faulthandler, gc, threading
faulthandler.dump_traceback_later(600, exit=True)
from kt_kernel import kt_kernel_ext
assert kt_kernel_ext.has_cuda(), kt_kernel_ext.cuda_status()
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    result = getattr(cuda, name)(*args)
    assert result == 0, (name, result)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
class Stream:
    def __init__(self):
        handle = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(handle), 1)
        self.handle = handle.value
    def wait(self): call("cuStreamSynchronize", ctypes.c_void_p(self.handle))
class Graph:
    def __init__(self, stream, record):
        graph, self.executable = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream.handle), 1)
        record()
        call("cuStreamEndCapture", ctypes.c_void_p(stream.handle), ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), graph, ctypes.c_ulonglong(0))
    def launch(self, stream): call("cuGraphLaunch", self.executable, ctypes.c_void_p(stream.handle))
def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
def bad(): raise LookupError("of a task")
infer = kt_kernel_ext.CPUInfer(2)
stream = Stream()
"""

LAYER = """
import torch
from kt_kernel import KTMoEWrapper
def device(tensor):
    address = ctypes.c_ulonglong()
    size = tensor.numel() * tensor.element_size()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    write(address.value, tensor)
    return address.value
def write(address, tensor):
    call("cuMemcpy", ctypes.c_ulonglong(address), ctypes.c_ulonglong(tensor.data_ptr()),
         ctypes.c_size_t(tensor.numel() * tensor.element_size()))
def read(address, shape):
    out = torch.empty(shape)
    call("cuMemcpy", ctypes.c_ulonglong(out.data_ptr()), ctypes.c_ulonglong(address), ctypes.c_size_t(out.numel() * 4))
    return out
def layer(index=0):
    w = KTMoEWrapper(index, 4, 2, 64, 64, None, 2, 1, None, 16, method="BF16")
    torch.manual_seed(index)
    w.load_weights_from_tensors(*(torch.randn(4, 64, 64).bfloat16() * 0.1 for _ in range(3)))
    return w
x, ids, scores = torch.ones(2, 64), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2)
X, IDS, SCORES, OUT = device(x), device(ids), device(scores), device(torch.zeros(2, 64))
def submit(w, on=None): return w._layer.submit(2, X, 0, 64, IDS, True, SCORES, (on or stream).handle)
def sync(w, on=None): w._layer.sync(OUT, 2, (on or stream).handle)
"""


def run(code, layers=False, first=""):
    path = CUDA + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    code = first + SETUP + (LAYER if layers else "") + code + "\nprint('done')"
    if layers:
        done = torch_processes.run(code, path)
    else:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900,
                              env={**os.environ, "LD_LIBRARY_PATH": path})
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stdout + done.stderr
    return done.stdout


def test_tasks_run_in_the_order_of_the_stream():
    run("""
seen = []
for i in range(20):
    infer.submit_with_cuda_stream(stream.handle, lambda i=i: seen.append(i))
infer.sync_with_cuda_stream(stream.handle)
stream.wait()
assert seen == list(range(20)), seen
""")


def test_python_objects_are_given_back_by_a_call_not_by_a_callback():
    run("""
ended = []
class Task:
    def __call__(self): self.ran = True
    def __del__(self): ended.append(threading.current_thread())
for _ in range(50):
    infer.submit_with_cuda_stream(stream.handle, Task())
infer.sync_with_cuda_stream(stream.handle)
before = len(ended)  # by one of the calls above
stream.wait()
assert len(ended) == before, "while no call could give them back"
infer.sync()
assert len(ended) == 50 and set(ended) == {threading.main_thread()}, set(ended)
""")


def test_a_callback_does_not_wait_for_the_gil():
    """The library is called with the GIL held while the stream runs its callbacks: tasks wait for the GIL, streams do
    not."""
    run("""
holding = ctypes.PyDLL("libcuda.so.1")
class Task:
    def __call__(self): pass
for i in range(200):
    infer.submit_with_cuda_stream(stream.handle, Task())
    assert holding.cuStreamSynchronize(ctypes.c_void_p(stream.handle)) == 0
infer.sync()
""")


def test_errors_are_of_the_stream_they_came_from():
    run("""
other = Stream()
stranger = kt_kernel_ext.CPUInfer(2)  # the same threads
infer.submit_with_cuda_stream(stream.handle, bad)
stream.wait()
stranger.sync()
infer.sync_with_cuda_stream(other.handle)
infer.submit_with_cuda_stream(other.handle, lambda: None)
other.wait()
assert raised(LookupError, lambda: infer.sync_with_cuda_stream(stream.handle)) == "of a task"
infer.sync_with_cuda_stream(stream.handle)
infer.submit_with_cuda_stream(stream.handle, bad)
stream.wait()
stranger.sync()
assert raised(LookupError, infer.sync) == "of a task"
infer.sync()
infer.submit(bad)
stranger.sync()
infer.sync_with_cuda_stream(stream.handle)
assert raised(LookupError, infer.sync) == "of a task"
""")


def test_captured_tasks_run_at_each_replay():
    run("""
seen = []
def record():
    infer.submit_with_cuda_stream(stream.handle, lambda: seen.append(len(seen)))
    infer.sync_with_cuda_stream(stream.handle)
graph = Graph(stream, record)
for _ in range(5):
    graph.launch(stream)
stream.wait()
assert seen == [0, 1, 2, 3, 4], seen
failing = Graph(stream, lambda: infer.submit_with_cuda_stream(stream.handle, bad))
for _ in range(3):
    failing.launch(stream)
stream.wait()
infer.submit(lambda: None)
assert raised(LookupError, infer.sync) == "of a task"
""")


def test_tasks_of_low_level_layers_in_streams_and_graphs():
    run("""
import torch
torch.manual_seed(0)
weights = [torch.randn(4, 64, 64).bfloat16() * 0.1 for _ in range(3)]
config = kt_kernel_ext.moe.MOEConfig(4, 2, 64, 64)
config.pool, config.max_len = infer.backend_, 8
config.gate_proj, config.up_proj, config.down_proj = (w.data_ptr() for w in weights)
moe = kt_kernel_ext.moe.AMXBF16_MOE(config)
infer.submit_with_cuda_stream(stream.handle, moe.load_weights_task())
tokens, ids, scores = torch.tensor([2], dtype=torch.int32), torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2)
x, out = torch.randn(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
def task():
    return moe.forward_task(tokens.data_ptr(), 2, ids.data_ptr(), scores.data_ptr(), x.data_ptr(), out.data_ptr())
def record():
    infer.submit_with_cuda_stream(stream.handle, task())
    infer.sync_with_cuda_stream(stream.handle)
record()
stream.wait()
want = out.clone()
assert want.abs().sum() > 0
graph = Graph(stream, record)
for count in (2, 1, 2):
    out.zero_()
    tokens[0] = count
    graph.launch(stream)
    stream.wait()
    assert torch.equal(out[:count], want[:count]) and not out[count:].any()
""")


def test_tasks_and_their_queue_may_end_before_the_stream():
    run("""
import time
for _ in range(10):
    short = kt_kernel_ext.CPUInfer(1)
    for _ in range(5):
        short.submit_with_cuda_stream(stream.handle, lambda: time.sleep(0.001))
    del short
    gc.collect()
stream.wait()
infer.sync()
""")


def test_tasks_after_the_interpreter_began_to_end_are_dropped():
    """Handlers of atexit that were registered before kt_kernel's run after it."""
    said = run("""
ran = []
infer.submit_with_cuda_stream(stream.handle, lambda: ran.append("in a stream"))
infer.submit(lambda: __import__("time").sleep(0.3))
infer.submit(lambda: ran.append("waiting"))
graph = Graph(stream, lambda: infer.submit_with_cuda_stream(stream.handle, lambda: ran.append("replayed")))
graph.launch(stream)
stream.wait()
infer.submit(lambda: __import__("time").sleep(0.3))
infer.submit(lambda: ran.append("last"))
""", first="""
import atexit
def late():
    assert sorted(ran) == ["in a stream", "last", "replayed", "waiting"], ran
    infer.submit(lambda: ran.append("too late"))
    infer.submit_with_cuda_stream(stream.handle, lambda: ran.append("too late"))
    graph.launch(stream)
    infer.sync_with_cuda_stream(stream.handle)
    stream.wait()
    infer.sync()
    assert len(ran) == 4, ran
    print("late done")
atexit.register(late)
""")
    assert said.split() == ["done", "late", "done"]


def test_a_stream_goes_on_while_the_interpreter_ends():
    """The stream hands its task over when the interpreter is being taken apart."""
    run("""
import os, sys, time
libc, gate = ctypes.CDLL(None), ctypes.create_string_buffer(64)
assert libc.sem_init(gate, 0, 0) == 0
class Last:
    def __del__(self, opened=libc.sem_post, gate=gate, sleep=time.sleep, ends=sys.is_finalizing, leave=os._exit):
        if not ends(): leave(3)
        opened(gate)
        sleep(1)
sys.last_of_all = Last()
call("cuLaunchHostFunc", ctypes.c_void_p(stream.handle), ctypes.cast(libc.sem_wait, ctypes.c_void_p), gate)
infer.submit_with_cuda_stream(stream.handle, lambda leave=os._exit: leave(4))
""")


def test_check_raises_what_a_replay_met():
    run("""
w, other = layer(3), layer(4)
def record():
    assert submit(w)
    sync(w)
graph = Graph(stream, record)
def replay():
    graph.launch(stream)
    stream.wait()
    return read(OUT, (2, 64))
assert torch.equal(replay(), w.forward(x, ids, scores))
w.check()
spoilt = scores.clone()
spoilt[1, 0] = float("nan")
message = "layer 3: the weight of token 1, slot 0 (expert 1) is NaN"
for again in (w.check, lambda: w.forward(x, ids, scores), lambda: submit(w)):
    write(SCORES, spoilt)
    assert not replay().any()
    write(SCORES, scores)
    other.check()
    other.forward(x, ids, scores)
    assert raised(ValueError, again) == message
    w.check()
assert replay().any()
w.check()
""", layers=True)


def test_write_back_raises_errors_of_its_own_only():
    run("""
w = layer()
w13, w2 = (torch.zeros(size, dtype=torch.uint8) for size in w._layer.write_bytes(1)[::2])
w.cpu_infer.submit(bad)
w.submit_write_weight_scale_to_buffer(1, 2, [w13.data_ptr()], [0], [w2.data_ptr()], [0])
w.sync_write_weight_scale_to_buffer()
assert w13.any() and w2.any()
assert raised(LookupError, w.cpu_infer.sync) == "of a task"
""", layers=True)


def test_a_task_drops_a_wrapper_while_the_stream_is_full():
    """The thread that enqueues waits in the driver for the task."""
    run("""
import os, time
w, gone, children = layer(), [layer(1)], []
def fork():
    child = os.fork()
    if child == 0: os._exit(0)
    children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
def drop():
    while not cuda.kt_test_cuda_waiting(): time.sleep(0.001)
    gone.clear()
    gc.collect()
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
cuda.kt_test_cuda_limit(ctypes.c_uint64(6))
w.cpu_infer.submit(drop)
for _ in range(10):
    submit(w)
    sync(w)
cuda.kt_test_cuda_limit(ctypes.c_uint64(2 ** 64 - 1))
stream.wait()
w.cpu_infer.sync()
assert not gone and children == [0, 0]
""", layers=True)


def test_a_stream_for_each_layer_shares_buffers():
    run("""
layers, streams = [layer(i) for i in range(10)], [Stream() for _ in range(10)]
for _ in range(3):
    for w, own in zip(layers, streams):
        submit(w, own)
        sync(w, own)
        own.wait()
        assert torch.equal(read(OUT, (2, 64)), w.forward(x, ids, scores))
assert kt_kernel_ext.buffer_bytes() == 64 << 10, kt_kernel_ext.buffer_bytes()
KTMoEWrapper.clear_buffer_cache()
assert kt_kernel_ext.buffer_bytes() == 0
""", layers=True)


def test_a_wrapper_that_ends_before_its_sync_leaves_nothing():
    run("""
for i in range(20):
    w = layer()
    submit(w)
    queue = w.cpu_infer
    del w
    stream.wait()
    queue.sync()
    assert kt_kernel_ext.buffer_bytes() <= 128 << 10, (i, kt_kernel_ext.buffer_bytes())
KTMoEWrapper.clear_buffer_cache()
assert kt_kernel_ext.buffer_bytes() == 0
""", layers=True)


def test_forks_while_other_threads_hold_every_lock(tmp_path):
    """Threads make, load, run and drop layers, queues and log lines while the process forks. The child refuses what is
    the parent's, and what it makes itself works: it never waits for a lock whose owner is in the parent."""
    run(f"""
import os, signal
values = [torch.randn(4, 64, 64).bfloat16() * 0.1 for _ in range(3)]
def made(path=None, save=False):
    return KTMoEWrapper(0, 4, 2, 64, 64, None, 2, 1, path, 16, save, method="AMXINT8")
saved = made({str(tmp_path / "w")!r}, True)
saved.load_weights_from_tensors(*values)
want = saved.forward(x, ids, scores).clone()
stop = threading.Event()
failures = []
def hammer(work):
    call("cuCtxSetCurrent", context)
    try:
        while not stop.is_set(): work()
    except BaseException as error:
        failures.append(error)
def from_tensors():
    w = made()
    w.load_weights_from_tensors(*values)
    assert torch.equal(w.forward(x, ids, scores), want)
def from_files():
    w = made({str(tmp_path / "w")!r})
    w.load_weights()
def in_a_stream(own=Stream()):
    submit(saved, own)
    sync(saved, own)
    own.wait()
def queues(): kt_kernel_ext.CPUInfer(1).submit(lambda: None)
def lines(): kt_kernel_ext._log(1, "not shown")
threads = [threading.Thread(target=hammer, args=(work,), daemon=True)
           for work in (from_tensors, from_files, in_a_stream, queues, lines)]
for thread in threads: thread.start()
def child():
    signal.alarm(300)
    raised(RuntimeError, lambda: saved.forward(x, ids, scores))
    raised(RuntimeError, lambda: submit(saved))
    raised(RuntimeError, infer.sync)
    raised(RuntimeError, lambda: kt_kernel_ext.CPUInfer(2).submit_with_cuda_stream(stream.handle, print))
    from_tensors()
    from_files()
    queues()
    lines()
    KTMoEWrapper.clear_buffer_cache()
for i in range(25):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException as error:
            os.write(2, repr(error).encode())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, (i, code)
    assert not failures, failures
stop.set()
for thread in threads: thread.join()
assert not failures, failures
stream.wait()
""", layers=True)
