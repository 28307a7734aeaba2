"""One layer with routed experts on both sides and a shared one on the GPU: is the smaller side hidden by the larger?

Each side alone and both together are captured graphs, so that launches do not count. `hidden` is the part of the
smaller side's time that does not show: 1 where the layer takes as long as the larger side, 0 where it takes the sum.
"""

import pathlib
import statistics
import time

import torch

from . import timeline
from .device import wall_ms
from .layers import routed

LEAST_HIDDEN = 0.7


class Layer:
    def __init__(self, gpu, tokens, method, dry):
        from kt_kernel.transformers import experts

        self.gpu, self.tokens = gpu, tokens
        count, top_k, hidden, inter = (16, 4, 64, 32) if dry else (128, 8, 2048, 768)
        self.module = experts.KTExperts(experts.Shape(0, count, top_k, hidden, inter),
                                        experts.Options(method=method, max_tokens=64))
        generator = torch.Generator(gpu.device).manual_seed(3)

        def values(*shape):
            return (torch.randn(*shape, generator=generator, device=gpu.device) / shape[-1] ** 0.5).to(torch.bfloat16)

        self.module.load([values(count, inter, hidden).cpu(), values(count, inter, hidden).cpu(),
                          values(count, hidden, inter).cpu()])
        self.module.place(torch.arange(count) < count // 4, gpu.device)
        wide = 4 * hidden
        self.shared = values(wide, hidden), values(wide, hidden), values(hidden, wide)
        self.x, self.ids, self.weights = routed(gpu, tokens, count, top_k, hidden, seed=0)

    def submit(self):
        self.module.wrapper.submit_forward(self.x, self.ids, self.weights, self.gpu.handle())

    def sync(self):
        return self.module.wrapper.sync_forward(self.x, self.gpu.handle())

    def on_cpu(self):
        self.submit()
        return self.sync().clone()

    def on_gpu(self, times):
        """The experts that live there, and the shared one so many times."""
        from torch.nn import functional

        from kt_kernel.transformers import resident

        module = self.module
        out = resident.run((module.gpu_slots, module.gpu_w13, module.gpu_w2), self.x, self.ids, self.weights)
        gate, up, down = self.shared
        for _ in range(times):
            middle = functional.silu(functional.linear(self.x, gate)) * functional.linear(self.x, up)
            out = out + functional.linear(middle, down)
        return out

    def both(self, times):
        self.submit()
        out = self.on_gpu(times)
        return out + self.sync()

    def captured(self, call):
        """A graph of the call, which ran before."""
        stream = self.gpu.stream()
        self.gpu.join(stream)
        with self.gpu.on(stream):
            for _ in range(2):
                call()
        stream.synchronize()
        return self.gpu.capture(call, stream)


def by_turns(gpu, calls, rounds=15):
    """Median ms of each, a few of one and then of the next: what the machine does meanwhile meets all of them."""
    times = [[] for _ in calls]
    for _ in range(2 if gpu.dry else rounds):
        for call, found in zip(calls, times):
            found.append(wall_ms(gpu, call, repeats=5, warm=2))
    return [statistics.median(found) for found in times]


def rows_of(gpu, layer):
    from .device import Dry

    cpu_graph, _ = layer.captured(layer.on_cpu)
    repeats = 3 if gpu.dry else 40
    cpu = wall_ms(gpu, cpu_graph.replay, repeats)
    one, many = (wall_ms(gpu, layer.captured(lambda n=n: layer.on_gpu(n))[0].replay, repeats) for n in (0, 20))
    each = max((many - one) / 20, 1e-4)
    rows = []
    for share in (0.5, 1.0, 2.0):
        times = 1 if isinstance(gpu, Dry) else min(400, max(1, round((share * cpu - one) / each)))
        gpu_graph, _ = layer.captured(lambda times=times: layer.on_gpu(times))
        both_graph, out = layer.captured(lambda times=times: layer.both(times))
        cpu, alone, together = by_turns(gpu, [graph.replay for graph in (cpu_graph, gpu_graph, both_graph)])
        eager = layer.both(times)
        gpu.synchronize()
        right = bool(((out - eager).abs().max() <= 1e-2 * eager.abs().max()).item())
        hidden = (cpu + alone - together) / min(cpu, alone)
        rows.append(dict(tokens=layer.tokens, cpu_ms=cpu, gpu_ms=alone, both_ms=together,
                         over_larger=together / max(cpu, alone),
                         hidden=hidden, right=right, ok=right and (gpu.dry or hidden >= LEAST_HIDDEN)))
    return rows, rows[1]["gpu_ms"], times


def watched(gpu, layer, gpu_graph):
    """One layer by submit, a graph of the GPU's work, sync: times in ms from the start on. The GPU's are from events,
    the CPU's end is the host's clock, put in order by the moment at which both have seen the end."""
    marks = {name: gpu.event() for name in ("start", "submitted", "gpu_done", "synced")}
    gpu.synchronize()
    marks["start"].record()
    layer.submit()
    marks["submitted"].record()
    gpu_graph.replay()
    marks["gpu_done"].record()
    layer.sync()
    marks["synced"].record()
    enqueued = time.perf_counter()
    while not marks["submitted"].query():
        pass
    layer.module.wrapper.cpu_infer.sync()
    cpu_done = time.perf_counter()
    gpu.synchronize()
    end = time.perf_counter()
    at = {name: marks["start"].elapsed_time(event) for name, event in marks.items()}
    for name, moment in (("enqueued", enqueued), ("cpu_done", cpu_done)):
        at[name] = at["synced"] - (end - moment) * 1e3
    return at


def draw(layer, at):
    lanes = [("GPU, one stream",
              [("copy", "to the host", 0, at["submitted"]), ("gpu", "experts here, shared expert", at["submitted"],
                                                                              at["gpu_done"]),
                                  ("wait", "waits, result comes", at["gpu_done"], at["synced"])]),
             ("CPU", [("cpu", "routed experts on KT", at["submitted"], max(at["cpu_done"], at["submitted"]))]),
             ("Python", [("wait", "enqueues", 0, max(at["enqueued"], 0))])]
    return timeline.svg(f"One MoE layer, {layer.tokens} tokens: GPU and CPU at work together, {at['synced']:.2f} ms",
                        lanes)


def part(gpu, arguments):
    rows, notes, times_of = [], [], {}
    for tokens in (1, 16):
        layer = Layer(gpu, tokens, "AMXINT8", gpu.dry)
        found, _, times = rows_of(gpu, layer)
        rows += found
        times_of[tokens] = max(1, times // 2)  # about as long as the CPU's part
        if tokens == 1:
            del layer
    gpu_graph, _ = layer.captured(lambda: layer.on_gpu(times_of[16]))
    seen = [watched(gpu, layer, gpu_graph) for _ in range(3 if gpu.dry else 21)][1:]
    middle = sorted(seen, key=lambda at: at["synced"])[len(seen) // 2]
    notes.append("timeline, ms: " + ", ".join(f"{name} {value:.3f}"
                                              for name, value in sorted(middle.items(), key=lambda i: i[1])))
    if arguments.out:
        pathlib.Path(arguments.out, "timeline.svg").write_text(draw(layer, middle))
    else:
        draw(layer, middle)
    return dict(rows=rows, timeline=middle, synced_ms=statistics.median(at["synced"] for at in seen), notes=notes,
                ok=all(row["ok"] for row in rows))
