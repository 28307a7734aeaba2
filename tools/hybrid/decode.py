"""Decoding with a random model of the shape of Qwen3-30B-A3B: attention, norms and routers on the GPU (stock
transformers), experts on KT, hot ones on the GPU too.

Routers compute as they do; the experts they name are then replaced by draws made beforehand: ranks by Zipf's law
(without replacement, exponent in the report), shuffled in each layer. All layers hold the same random weights, each in
memory of its own. A step is one captured graph, sampling included, and is compared with eager steps from the same
state.

The limit is that of memory: the bytes of the experts that a token needs from the CPU over the read bandwidth that
`kt microbench roofline` finds. Everything else of a step, GPU included, counts as loss.
"""

import json
import os
import statistics
import subprocess
import time
import traceback

import torch

BITS = {"int4": 4.0, "int8": 8.0, "bf16": 16.0}
SHARES = (0.0, 0.10, 0.25, 0.50)
REAL = dict(experts=128, top_k=8, hidden=2048, inter=768, vocabulary=151936, heads=32, kv_heads=4, head_dim=128)
SMALL = dict(experts=16, top_k=4, hidden=64, inter=32, vocabulary=300, heads=4, kv_heads=2, head_dim=16)
PROMPT = 16


class ZipfRouter(torch.nn.Module):
    """The stock router's work and weights, other experts. `at` is the step's number, on the device: a graph reads
    it."""

    def __init__(self, gate, shape, exponent, seed, at, draws=4096):
        super().__init__()
        self.gate, self.at = gate, at
        generator = torch.Generator().manual_seed(seed)
        odds = torch.arange(1, shape["experts"] + 1, dtype=torch.float64) ** -exponent
        ranks = torch.multinomial(odds.expand(draws, -1), shape["top_k"], replacement=False, generator=generator)
        table = torch.randperm(shape["experts"], generator=generator)[ranks]
        self.counts = torch.bincount(table.flatten(), minlength=shape["experts"]).double()
        self.register_buffer("table", table.to(at.device), persistent=False)

    def forward(self, hidden):
        logits, weights, chosen = self.gate(hidden)
        rows = torch.arange(chosen.shape[0], device=chosen.device) + self.at
        return logits, weights, self.table.index_select(0, rows % self.table.shape[0])


def make_model(gpu, shape, layers):
    """Everything but the experts, random, in bf16 on the device."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], num_hidden_layers=layers,
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], head_dim=shape["head_dim"],
        moe_intermediate_size=shape["inter"], num_experts=shape["experts"], num_experts_per_tok=shape["top_k"],
        intermediate_size=3 * shape["hidden"], norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        max_position_embeddings=4096, tie_word_embeddings=False, attn_implementation="sdpa")
    # Experts of one row: they only hold the place until KT's come.
    config.moe_intermediate_size = 1
    with torch.device(gpu.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def put_experts(gpu, model, shape, format, zipf, threads):
    """KT's experts into every layer; (routers, the step's number)."""
    from kt_kernel.transformers import KTExperts, method_of
    from kt_kernel.transformers.experts import Options, Shape

    generator = torch.Generator(gpu.device).manual_seed(5)

    def values(n, k):
        drawn = torch.randn(shape["experts"], n, k, generator=generator, device=gpu.device, dtype=torch.bfloat16)
        return (drawn / k**0.5).cpu()

    weights = [values(shape["inter"], shape["hidden"]), values(shape["inter"], shape["hidden"]),
               values(shape["hidden"], shape["inter"])]
    at = torch.zeros(1, dtype=torch.int64, device=gpu.device)
    options = Options(method=method_of(format), max_tokens=64, threads=threads)
    routers = []
    for layer, block in enumerate(model.model.layers):
        module = KTExperts(Shape(layer, shape["experts"], shape["top_k"], shape["hidden"], shape["inter"]), options)
        module.load(weights)
        block.mlp.experts = module.eval()
        block.mlp.gate = ZipfRouter(block.mlp.gate, shape, zipf, layer, at)
        routers.append(block.mlp.gate)
    return routers, at


class Decoder:
    """Steps of one token, greedy, on a static cache."""

    def __init__(self, gpu, model, at, room):
        from transformers import StaticCache

        self.gpu, self.model, self.at = gpu, model, at
        self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=gpu.device)
        self.at.zero_()
        with torch.no_grad():
            prompt = torch.arange(1, PROMPT + 1, device=gpu.device)[None]
            self.token.copy_(model(prompt, past_key_values=self.cache, use_cache=True).logits[:, -1:].argmax(-1))

    def step(self):
        with torch.no_grad():
            logits = self.model(self.token, past_key_values=self.cache, use_cache=True).logits
            self.token.copy_(logits[:, -1:].argmax(-1))
            self.at.add_(1)

    def run(self, call, steps):
        """(the tokens, median ms of a step)"""
        tokens, times = [], []
        for _ in range(steps):
            self.gpu.synchronize()
            start = time.perf_counter()
            call()
            self.gpu.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            tokens.append(int(self.token.item()))
        return tokens, statistics.median(times)

    def in_a_row(self, call, steps):
        """ms of a step without a wait between them, as an engine would run them."""
        self.gpu.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        self.gpu.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    def graph(self):
        """A captured step. Steps before it made the buffers."""
        stream = self.gpu.stream()
        self.gpu.join(stream)
        with self.gpu.on(stream):
            for _ in range(2):
                self.step()
        stream.synchronize()
        return self.gpu.capture(self.step, stream, returns=False)[0]


def measured(gpu, model, at, steps):
    """Eager and captured steps of one placement."""
    room = PROMPT + 2 * steps + 32
    eager = Decoder(gpu, model, at, room)
    for _ in range(2):  # as many as a capture makes before
        eager.step()
    few = max(4, steps // 4)
    tokens, eager_ms = eager.run(eager.step, few)
    del eager
    out = dict(eager_ms=eager_ms)
    decoder = Decoder(gpu, model, at, room)
    try:
        graph = decoder.graph()
    except Exception as error:  # what is left then is the eager step
        return dict(out, step_ms=eager_ms, graph_error=f"{type(error).__name__}: {error}"[:300], tokens_equal=None)
    replayed, graph_ms = decoder.run(graph.replay, few)
    row = decoder.in_a_row(graph.replay, steps)
    return dict(out, graph_ms=graph_ms, step_ms=row, tokens_equal=replayed == tokens)


def experts_alone(gpu, model, at, steps):
    """ms of a layer's experts, CPU and GPU together, without the rest of the model: layers take turns as in a step."""
    hidden = torch.randn(1, model.config.hidden_size, device=gpu.device, dtype=torch.bfloat16)
    blocks = [block.mlp for block in model.model.layers]

    def call():
        for block in blocks:
            _, weights, ids = block.gate(hidden)
            block.experts(hidden, ids, weights)
        at.add_(1)

    stream = gpu.stream()
    gpu.join(stream)
    with torch.no_grad():
        with gpu.on(stream):
            call()
        stream.synchronize()
        graph, _ = gpu.capture(call, stream, returns=False)
    graph.replay()
    gpu.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        graph.replay()
    gpu.synchronize()
    return (time.perf_counter() - start) * 1e3 / steps / len(blocks)


def read_bandwidth(program, threads):
    command = [program, "microbench", "roofline", "--json"] + (["--threads", str(threads)] if threads else [])
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    return found["read_gb_per_s"]


def place(model, routers, share, experts):
    """The hottest experts of each layer on the GPU; the share of pairs that is left to the CPU."""
    from kt_kernel.transformers.placement import apply_masks

    counts = torch.stack([router.counts for router in routers])
    masks = torch.zeros(len(routers), experts, dtype=torch.bool)
    for layer in range(len(routers)):
        masks[layer, counts[layer].topk(round(share * experts)).indices] = True
    apply_masks(model, masks)
    return float((counts * ~masks).sum() / counts.sum())


def of_share(gpu, model, routers, at, shape, steps, share, bytes_each, bandwidth):
    begin, layers = time.perf_counter(), len(routers)
    left = place(model, routers, share, shape["experts"])
    placed = time.perf_counter() - begin
    limit = left * layers * shape["top_k"] * 3 * shape["hidden"] * shape["inter"] * bytes_each / bandwidth / 1e6
    found = measured(gpu, model, at, steps)
    layer = experts_alone(gpu, model, at, steps) if "graph_ms" in found else None
    return dict(pairs_on_cpu=left, step_ms=found["step_ms"], tokens_s=1e3 / found["step_ms"], gain=None, limit_ms=limit,
                of_limit=limit / found["step_ms"], layer_us=layer and 1e3 * layer,
                layer_of_limit=layer and limit / layers / layer,
                place_s=round(placed, 1), **{key: value for key, value in found.items() if key != "step_ms"})


def of_format(gpu, arguments, format, bandwidth):
    from kt_kernel import KTMoEWrapper

    shape, layers, steps = (SMALL, 2, 8) if gpu.dry else (REAL, arguments.layers, arguments.steps)
    begin = time.perf_counter()
    model = make_model(gpu, shape, layers)
    routers, at = put_experts(gpu, model, shape, format, arguments.zipf, arguments.threads)
    load = time.perf_counter() - begin
    rows = []
    for share in SHARES:
        row = dict(format=format, on_gpu=share, load_s=round(load, 1))
        try:
            row.update(of_share(gpu, model, routers, at, shape, steps, share, BITS[format] / 8, bandwidth))
        except Exception as error:  # the other placements still count
            row["error"] = f"{type(error).__name__}: {error}"[:500]
            traceback.print_exc()
        rows.append(row)
        gpu.synchronize()
        KTMoEWrapper.clear_buffer_cache()  # graphs of this placement are gone
    for row in rows:
        if "step_ms" in rows[0] and "step_ms" in row:
            row["gain"] = rows[0]["step_ms"] / row["step_ms"]
    return rows


def part(gpu, arguments):
    formats = arguments.formats.split(",")
    bandwidth = 10.0 if gpu.dry and not os.path.exists(arguments.program) else read_bandwidth(arguments.program,
                                                                                              arguments.threads)
    rows = []
    for format in formats:
        rows += of_format(gpu, arguments, format, bandwidth)
        gpu.give_back()
    ok = all(row.get("tokens_equal") is True for row in rows)
    return dict(rows=rows, zipf=arguments.zipf, layers=2 if gpu.dry else arguments.layers, read_gb_s=bandwidth, ok=ok)
