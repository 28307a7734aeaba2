"""Replays of captured graphs against the same calls made eagerly, and what a call costs the host.

Results must be equal bit by bit: the CPU's sums do not depend on who asks for them.
"""

import torch

from .device import host_us
from .layers import random_layer, routed

REPLAYS = 12


def _eager(gpu, layer, inputs):
    out = layer.forward(*inputs, gpu.handle()).clone()
    gpu.synchronize()
    return out


def _warm(gpu, stream, call):
    """Buffers of the stream are made before the capture."""
    gpu.join(stream)
    with gpu.on(stream):
        for _ in range(3):
            call()
    stream.synchronize()


def _replay(gpu, graph):
    graph.replay()
    gpu.synchronize()


def batch_sizes(gpu, sizes):
    """Several batch sizes of one layer captured, replays in mixed order; inputs and the mask change between them."""
    from kt_kernel import KTMoEWrapper

    experts, top_k, hidden = sizes["experts"], 4, sizes["hidden"]
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 8, 16])
    layer = random_layer(experts, top_k, hidden, sizes["inter"])
    stream = gpu.stream()
    captured = {}
    for tokens in (16, 1, 8, 2):
        inputs = routed(gpu, tokens, experts, top_k, hidden, seed=tokens)

        def call(inputs=inputs):
            layer.submit_forward(*inputs, gpu.handle())
            return layer.sync_forward(inputs[0], gpu.handle()).clone()

        _warm(gpu, stream, call)
        captured[tokens] = (inputs, *gpu.capture(call, stream))
    masks = [torch.zeros(experts, dtype=torch.bool), torch.arange(experts) % 3 == 0, torch.arange(experts) < 20,
             torch.ones(experts, dtype=torch.bool)]
    equal = {tokens: 0 for tokens in captured}
    changed = {tokens: 0 for tokens in captured}
    before = {}
    for seed in range(REPLAYS):
        layer.gpu_experts_mask.copy_(masks[seed % len(masks)])
        for tokens in ((1, 8, 2, 16), (16, 2, 8, 1))[seed % 2]:
            inputs, graph, out = captured[tokens]
            new = routed(gpu, tokens, experts, top_k, hidden, seed // 4)  # the same inputs under all masks
            for old, value in zip(inputs, new):
                old.copy_(value)
            eager = _eager(gpu, layer, new)
            _replay(gpu, graph)
            equal[tokens] += bool(torch.equal(out, eager))
            changed[tokens] += tokens not in before or not torch.equal(out, before[tokens])
            before[tokens] = out.clone()
    layer.check()
    return [dict(what="batch sizes and masks", tokens=tokens, replays=REPLAYS, equal=equal[tokens],
                 ok=equal[tokens] == REPLAYS and changed[tokens] > REPLAYS // 2) for tokens in sorted(captured)]


def streams(gpu, sizes):
    """Two streams, two layers in flight on each, both graphs replayed at once without a wait between replays."""
    experts, top_k, hidden, tokens = sizes["experts"], 4, sizes["hidden"], 4
    layers = [random_layer(experts, top_k, hidden, sizes["inter"], layer=at) for at in range(4)]
    parts = []
    for at in (0, 1):
        pair, stream = layers[2 * at : 2 * at + 2], gpu.stream()
        inputs = routed(gpu, tokens, experts, top_k, hidden, seed=at)

        def call(pair=pair, inputs=inputs):
            first, second = pair
            first.submit_forward(*inputs, gpu.handle())
            second.submit_forward(*inputs, gpu.handle())
            return first.sync_forward(inputs[0], gpu.handle()).clone(), second.sync_forward(inputs[0],
                                                                                            gpu.handle()).clone()

        _warm(gpu, stream, call)
        parts.append((pair, inputs, stream, *gpu.capture(call, stream)))
    equal = 0
    for seed in range(REPLAYS):
        expected = []
        for at, (pair, inputs, *_) in enumerate(parts):
            for old, value in zip(inputs, routed(gpu, tokens, experts, top_k, hidden, 100 * at + seed)):
                old.copy_(value)
            expected.append([_eager(gpu, layer, inputs) for layer in pair])
        gpu.synchronize()
        for _ in range(8):
            for _, _, stream, graph, _ in parts:
                with gpu.on(stream):
                    graph.replay()
        gpu.synchronize()
        equal += all(torch.equal(ours, right) for part, rights in zip(parts, expected)
                     for ours, right in zip(part[4], rights))
    for layer in layers:
        layer.check()
    return [dict(what="two streams, two layers each", tokens=tokens, replays=8 * REPLAYS, equal=equal,
                 ok=equal == REPLAYS)]


def deferral(gpu, sizes):
    """Three layers, the first two put two experts of a token off to the next one."""
    experts, top_k, hidden, tokens = sizes["experts"], 4, sizes["hidden"], 4
    layers = [random_layer(experts, top_k, hidden, sizes["inter"], layer=at, deferred=2 if at < 2 else 0)
              for at in range(3)]
    x, ids, weights = routed(gpu, tokens, experts, top_k, hidden, seed=0)

    def call():
        y = x
        for layer in layers:
            y = layer.forward(y, ids, weights, gpu.handle()).clone()
        return y

    stream = gpu.stream()
    _warm(gpu, stream, call)
    graph, out = gpu.capture(call, stream)
    whole = random_layer(experts, top_k, hidden, sizes["inter"])  # the first layer, nothing put off
    equal = less = 0
    for seed in range(REPLAYS):
        for old, value in zip((x, ids, weights), routed(gpu, tokens, experts, top_k, hidden, seed)):
            old.copy_(value)
        gpu.synchronize()
        eager = call()
        gpu.synchronize()
        _replay(gpu, graph)
        equal += bool(torch.equal(out, eager))
        less += not torch.equal(_eager(gpu, whole, (x, ids, weights)), _eager(gpu, layers[0], (x, ids, weights)))
    for layer in layers:
        layer.check()
    return [dict(what="deferral, three layers", tokens=tokens, replays=REPLAYS, equal=equal,
                 ok=equal == REPLAYS and less == REPLAYS)]


def errors(gpu, sizes):
    """A NaN weight in a replay: zeros come out, check() raises, the next replay is right again."""
    experts, top_k, hidden, tokens = sizes["experts"], 4, sizes["hidden"], 2
    layer = random_layer(experts, top_k, hidden, sizes["inter"])
    inputs = routed(gpu, tokens, experts, top_k, hidden, seed=0)
    stream = gpu.stream()

    def call():
        return layer.forward(*inputs, gpu.handle()).clone()

    _warm(gpu, stream, call)
    graph, out = gpu.capture(call, stream)
    right = _eager(gpu, layer, inputs)
    good = inputs[2].clone()
    inputs[2].fill_(float("nan"))
    message = ""
    try:
        _replay(gpu, graph)
        zeros = not out.any()
        layer.check()
    except Exception as error:
        message, zeros = str(error), gpu.dry or zeros
    inputs[2].copy_(good)
    _replay(gpu, graph)
    return [dict(what="NaN in a replay", tokens=tokens, replays=2, equal=int(torch.equal(out, right)), message=message,
                 ok=bool(message) and bool(zeros) and torch.equal(out, right))]


def host_times(gpu, sizes):
    """A forward of one token in a graph, and by submit and sync; experts are all elsewhere, so that nothing is
    computed."""
    experts, top_k, hidden = sizes["experts"], 4, sizes["hidden"]
    layer = random_layer(experts, top_k, hidden, sizes["inter"])
    layer.gpu_experts_mask.fill_(True)
    inputs = routed(gpu, 1, experts, top_k, hidden, seed=0)
    stream = gpu.stream()

    def call():
        layer.submit_forward(*inputs, gpu.handle())
        return layer.sync_forward(inputs[0], gpu.handle())

    _warm(gpu, stream, call)
    graph, _ = gpu.capture(call, stream)
    with gpu.on(stream):
        handle = gpu.handle()
        rows = []
        for what, work, bar in (
            ("graph.replay()", graph.replay, 15.0),
            ("submit_forward + sync_forward", lambda: (layer.submit_forward(*inputs, handle),
                                                       layer.sync_forward(inputs[0], handle)), None),
        ):
            median, p90 = host_us(gpu, work)
            rows.append(dict(what=what, tokens=1, host_us=median, host_us_p90=p90,
                             ok=gpu.dry or bar is None or median < bar))

        def through():
            work()
            gpu.synchronize()

        work = graph.replay
        rows.append(dict(what="there and back, graph", tokens=1, host_us=host_us(gpu, through)[0], ok=True))
    return rows


def part(gpu, arguments):
    sizes = dict(experts=32, hidden=64, inter=32) if gpu.dry else dict(experts=32, hidden=1024, inter=512)
    rows = []
    for check in (batch_sizes, streams, deferral, errors, host_times):
        rows += check(gpu, sizes)
    return dict(rows=rows, ok=all(row["ok"] for row in rows))
