"""The CUDA side of KTMoEWrapper on a machine without a GPU: the stream's work goes to the test driver
(src/cuda/testing), and tensors on the device are stand-ins that know an address and a shape.

Everything the wrapper does on a GPU runs as it is, but for torch's own kernels: casts and copies on the device are not
here. KT_TEST_CUDA names the folder of the test driver.
"""

import os
import pathlib
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import torch_processes

LIBRARY = pathlib.Path(os.environ.get("KT_TEST_CUDA", ""), "libcuda.so.1")
pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="KT_TEST_CUDA does not name a folder with the test driver")

SETUP = """
import contextlib, ctypes, os, types, torch
cuda = ctypes.CDLL(os.environ["KT_TEST_CUDA"] + "/libcuda.so.1")  # before the package looks for a library of this name

def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: error {result}"

def made(name, *arguments):
    handle = ctypes.c_void_p()
    call(name, ctypes.byref(handle), *arguments)
    return handle

call("cuInit", 0)
context = made("cuDevicePrimaryCtxRetain", 0)
call("cuCtxSetCurrent", context)

class Stream:
    def __init__(self, handle=None):
        self.handle = handle or made("cuStreamCreate", 1)
        self.cuda_stream = self.handle.value

    def synchronize(self):
        call("cuStreamSynchronize", self.handle)

current = [types.SimpleNamespace(cuda_stream=0)]

class DeviceTensor(torch.Tensor):
    # Memory is the driver's; values come and go by host() and fill().
    @staticmethod
    def of(like, address=None):
        self = torch.Tensor._make_subclass(DeviceTensor, torch.empty(like.shape, dtype=like.dtype))
        size = ctypes.c_size_t(max(like.numel(), 1) * like.element_size())
        self.address = address or made("cuMemAlloc_v2", size).value
        return self

    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)
    device = property(lambda self: torch.device("cuda", 0))

    def data_ptr(self):
        return self.address

    def __getitem__(self, rows):
        assert isinstance(rows, slice) and not rows.start
        return DeviceTensor.of(torch.empty(rows.stop, *self.shape[1:], dtype=self.dtype), self.address)

    def reshape(self, *shape):
        return DeviceTensor.of(torch.empty(self.shape, dtype=self.dtype).reshape(*shape), self.address)

    view = reshape

    def contiguous(self):
        return self

    def detach(self):
        return DeviceTensor.of(torch.empty(self.shape, dtype=self.dtype), self.address)

    def fill(self, values):
        values = values.contiguous()
        call("cuMemcpy", ctypes.c_uint64(self.address), ctypes.c_uint64(values.data_ptr()),
             ctypes.c_size_t(values.numel() * values.element_size()))
        return self

    def host(self):
        out = torch.empty(self.shape, dtype=self.dtype)
        call("cuMemcpy", ctypes.c_uint64(out.data_ptr()), ctypes.c_uint64(self.address),
             ctypes.c_size_t(out.numel() * out.element_size()))
        return out

def on_device(values):
    return DeviceTensor.of(values).fill(values)

@contextlib.contextmanager
def using(stream):
    current.append(stream)
    yield
    current.pop()

def capturing():
    status = ctypes.c_int()
    call("cuStreamIsCapturing", ctypes.c_void_p(current[-1].cuda_stream), ctypes.byref(status))
    return status.value == 1

def external(handle, device=None):
    return types.SimpleNamespace(cuda_stream=handle)

class Torch:
    # torch, with a device
    cuda = types.SimpleNamespace(is_available=lambda: False, current_stream=lambda device=None: current[-1],
                                 device=lambda device: contextlib.nullcontext(), stream=using, ExternalStream=external,
                                 is_current_stream_capturing=capturing)

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, shape, dtype=None, device="cpu", **more):
        if torch.device(device).type == "cpu":
            return torch.zeros(shape, dtype=dtype)
        return on_device(torch.zeros(shape, dtype=dtype))

    def empty_like(self, tensor):
        return DeviceTensor.of(tensor)

class Graph:
    def __init__(self, stream, record):
        call("cuStreamBeginCapture_v2", stream.handle, 0)
        with using(stream):
            self.result = record()
        graph = ctypes.c_void_p()
        call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
        self.executable = made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        call("cuGraphDestroy", graph)

    def end(self):
        call("cuGraphExecDestroy", self.executable)

    def replay(self, stream):
        call("cuGraphLaunch", self.executable, stream.handle)
        stream.synchronize()

from kt_kernel import KTMoEWrapper, kt_kernel_ext, moe_wrapper
assert kt_kernel_ext.has_cuda(), kt_kernel_ext.cuda_status()
EXPERTS, TOP_K, HIDDEN, INTER = 8, 2, 64, 32
draw = torch.Generator().manual_seed(1)

def layer(index=0, chunk=64, **more):
    generator = torch.Generator().manual_seed(index)
    made_ = KTMoEWrapper(index, EXPERTS, TOP_K, HIDDEN, INTER, None, 2, 1, None, chunk, method="BF16", **more)
    values = [torch.randn(EXPERTS, *shape, generator=generator).bfloat16() / 8
              for shape in ((INTER, HIDDEN),) * 2 + ((HIDDEN, INTER),)]
    made_.load_weights_from_tensors(*values)
    moe_wrapper._torch = Torch()
    return made_

def inputs(tokens):
    return (torch.randn(tokens, HIDDEN, generator=draw).bfloat16(),
            torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)]),
            torch.rand(tokens, TOP_K, generator=draw))
"""

BODIES = {
    "eager": """
one, stream = layer(), Stream()
for tokens in (1, 3, 64):
    host = inputs(tokens)
    device = [on_device(value) for value in host]
    right = one.forward(*host).clone()
    with using(stream):
        got = one.forward(*device, stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(got.host(), right), tokens
    got = one.forward(*device, stream)  # not the current stream, as an object
    stream.synchronize()
    assert torch.equal(got.host(), right), tokens
""",
    "null_stream_and_large": """
one = layer(chunk=16384)
host = inputs(16384)  # above the size of a kept result
right = one.forward(*host).clone()
got = one.forward(*[on_device(value) for value in host], 0)
call("cuStreamSynchronize", None)
assert torch.equal(got.host(), right)
""",
    "graph": """
one, two, stream = layer(0), layer(1), Stream()
KTMoEWrapper.set_capture_batch_sizes([1, 4])
graphs = {}
for tokens in (4, 1):
    host = inputs(tokens)
    device = [on_device(value) for value in host]
    def record():
        one.submit_forward(*device, stream.cuda_stream)
        two.submit_forward(*device, stream.cuda_stream)
        return one.sync_forward(device[0], stream.cuda_stream), two.sync_forward(device[0], stream.cuda_stream)
    with using(stream):
        record()
    stream.synchronize()
    graphs[tokens] = device, Graph(stream, record)
for round in range(6):
    tokens = (4, 1)[round % 2]
    device, graph = graphs[tokens]
    host = inputs(tokens)
    for old, new in zip(device, host):
        old.fill(new)
    one.gpu_experts_mask.copy_(torch.arange(EXPERTS) % (2 + round) == 0)
    graph.replay(stream)
    for wrapper, got in zip((one, two), graph.result):
        assert torch.equal(got.host(), wrapper.forward(*host)), (round, tokens)
try:
    KTMoEWrapper.set_capture_batch_sizes([1])
    raise SystemExit("a captured size was dropped")
except ValueError as error:
    assert "[4]" in str(error), error
""",
    "graphs_keep_their_buffers": """
one, stream = layer(), Stream()
KTMoEWrapper.set_capture_batch_sizes([4])
graphs = []
for _ in range(2):
    host = inputs(4)
    device = [on_device(value) for value in host]
    one.forward(*device, stream)
    stream.synchronize()
    graphs.append((Graph(stream, lambda: one.forward(*device, stream)), one.forward(*host).clone()))
held = None
for graph, right in graphs + graphs:
    KTMoEWrapper.clear_buffer_cache()
    assert kt_kernel_ext.buffer_bytes() == (held := held or kt_kernel_ext.buffer_bytes()) > 0
    one.forward(*[on_device(value) for value in inputs(4)], stream)
    stream.synchronize()
    graph.replay(stream)
    assert torch.equal(graph.result.host(), right)
graphs[0][0].end()
KTMoEWrapper.clear_buffer_cache()
assert 0 < kt_kernel_ext.buffer_bytes() < held
graphs[1][0].replay(stream)
assert torch.equal(graphs[1][0].result.host(), graphs[1][1])
try:
    KTMoEWrapper.set_capture_batch_sizes([1])
    raise SystemExit("a captured size was dropped")
except ValueError as error:
    assert "[4]" in str(error), error
graphs[1][0].end()
KTMoEWrapper.clear_buffer_cache()
assert kt_kernel_ext.buffer_bytes() == 0
assert not moe_wrapper._captures._results
KTMoEWrapper.set_capture_batch_sizes([1])
""",
    "errors": """
one, stream = layer(), Stream()
host = inputs(2)
device = [on_device(value) for value in host]
with using(stream):
    one.forward(*device, stream.cuda_stream)  # the result's memory, which torch could make in a capture and this cannot
    stream.synchronize()
    device[2].fill(torch.full((2, TOP_K), float("nan")))
    graph = Graph(stream, lambda: one.forward(*device, stream.cuda_stream))
    graph.replay(stream)
assert not graph.result.host().any()
for attempt in (one.check, lambda: one.forward(host[0], device[1], host[2]), lambda: one.forward(*device, 12345),
                lambda: one.sync_forward(device[0], stream.cuda_stream)):
    try:
        attempt()
        raise SystemExit(f"no error: {attempt}")
    except (ValueError, RuntimeError, TypeError) as error:
        print(error)
device[2].fill(host[2])
graph.replay(stream)
one.check()
assert torch.equal(graph.result.host(), one.forward(*host))
KTMoEWrapper.clear_buffer_cache()
""",
}


SPECIAL = {
    "graphs_are_not_told_to_end": """
one, stream = layer(), Stream()
host = inputs(4)
device = [on_device(value) for value in host]
one.forward(*device, stream)
stream.synchronize()
graph = Graph(stream, lambda: one.forward(*device, stream))
KTMoEWrapper.clear_buffer_cache()
graph.replay(stream)
assert torch.equal(graph.result.host(), one.forward(*host))
graph.end()
KTMoEWrapper.clear_buffer_cache()
assert kt_kernel_ext.buffer_bytes() > 0
""",
}


@pytest.mark.parametrize("posted", ["1", "0"])
@pytest.mark.parametrize("name", BODIES)
def test_stream(name, posted):
    run(name, KT_CUDA_POST=posted)


def test_a_driver_that_does_not_tell_the_end_of_graphs():
    run("graphs_are_not_told_to_end", KT_TEST_CUDA_FAIL="cuUserObjectCreate=801")


def run(name, **env):
    done = torch_processes.run(SETUP + {**BODIES, **SPECIAL}[name], **env)
    assert done.returncode == 0, done.stdout + done.stderr
