"""Every call of torch.cuda that the parts of hybrid_gpu.py make, and stand-ins for a machine without a GPU.

`Dry` keeps tensors on the CPU; a stream is nothing, a graph calls again what was recorded. It shows that the parts run
and what they would compare, never how fast.
"""

import contextlib
import statistics
import time

import torch


class Cuda:
    dry = False
    device = torch.device("cuda", 0)

    def name(self):
        return torch.cuda.get_device_name(self.device)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    def give_back(self):
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def stream(self):
        return torch.cuda.Stream(self.device)

    def on(self, stream):
        return torch.cuda.stream(stream)

    def handle(self):
        """Of the current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def join(self, stream):
        """What comes next in `stream` waits for the current one."""
        stream.wait_stream(torch.cuda.current_stream(self.device))

    def capture(self, call, stream, returns=True):
        """(graph, what the call returned): its work on `stream`, recorded and not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
        return graph, result

    def event(self):
        return torch.cuda.Event(enable_timing=True)

    def memory(self):
        return torch.cuda.memory_allocated(self.device)


class _DryStream:
    def synchronize(self):
        pass


class _DryGraph:
    """What the call returned stays where it is: a replay writes there."""

    def __init__(self, call, result):
        self._call, self._result = call, result

    def replay(self):
        for kept, new in zip(_tensors(self._result), _tensors(self._call())):
            kept.copy_(new)


class _DryEvent:
    def record(self, stream=None):
        self._at = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, other):
        return (other._at - self._at) * 1e3


def _tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [] if result is None else list(result)


class Dry:
    dry = True
    device = torch.device("cpu")

    def name(self):
        return "none (dry run)"

    def synchronize(self):
        pass

    def give_back(self):
        pass

    def stream(self):
        return _DryStream()

    def on(self, stream):
        return contextlib.nullcontext()

    def handle(self):
        return 0

    def join(self, stream):
        pass

    def capture(self, call, stream, returns=True):
        if not returns:
            return _DryGraph(call, None), None
        result = call()
        kept = [tensor.clone() for tensor in _tensors(result)]
        kept = kept[0] if isinstance(result, torch.Tensor) else None if result is None else tuple(kept)
        return _DryGraph(call, kept), kept

    def event(self):
        return _DryEvent()

    def memory(self):
        return 0


def wall_ms(gpu, call, repeats=40, warm=5):
    """Median wall time of a call and of the device's work that it started."""
    for _ in range(warm):
        call()
    gpu.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        gpu.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def host_us(gpu, call, repeats=200, warm=20):
    """(median, 90th percentile) of the time until a call returns; the device is idle before each."""
    times = []
    for at in range(warm + repeats):
        gpu.synchronize()
        start = time.perf_counter()
        call()
        if at >= warm:
            times.append((time.perf_counter() - start) * 1e6)
    gpu.synchronize()
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]
