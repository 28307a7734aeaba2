#!/usr/bin/env python3
"""Checks and measures experts on KT beside a GPU: run it on a machine with CUDA, torch, transformers and kt_kernel.

    PYTHONPATH=build/python python3 tools/hybrid_gpu.py [--parts logits,graph,overlap,decode] [--models DIR] [--out F.json]

logits   tiny Qwen3-MoE and DeepSeek-V3 (trained ones of --models where given, random ones otherwise) with attention on the
         GPU and BF16 experts on KT, against pure transformers on the same device: logits and greedy tokens
graph    one layer, eager against replays of a captured graph, inputs and mask changed between replays
overlap  a layer's time with GPU and CPU work, against each alone
decode   a few layers of the shape of Qwen3-30B-A3B under Zipf routing: tokens/s, share of the CPU's memory bandwidth,
         gain of hot experts on the GPU

Each part stands alone: one that fails is reported, the others still run. The last line of output is one JSON object; the
exit code is 1 if a check failed or a part broke.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
import traceback

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
DEVICE = "cuda"


def worst(ours, theirs):
    """max|a - b| / max|b| over positions; infinite where ours is not finite."""
    ours, theirs = ours.float(), theirs.float()
    if not torch.isfinite(ours).all():
        return float("inf")
    return ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).max().item()


def typical(ours, theirs):
    """The median over positions of what worst() takes the maximum of: two experts of nearly equal scores that change
    places move a position of a bf16 model by more than any bound on roundings."""
    ours, theirs = ours.float(), theirs.float()
    return ((ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)).median().item()


def median_ms(call, repeats=30, warm=5):
    """Wall time of a call and of the device's work it started."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


# --- logits ---


def models_to_compare(arguments, root):
    """(name, folder) of checkpoints in bf16."""
    if arguments.models:
        for name in ("tiny-qwen3moe", "tiny-deepseekv3"):
            folder = pathlib.Path(arguments.models, name)
            if (folder / "config.json").exists():
                yield name, folder
    import tiny_models

    sizes = dict(hidden_size=512, moe_intermediate_size=256, num_hidden_layers=6)
    for key, experts in (("qwen3_moe", "num_experts"), ("deepseek_v3", "n_routed_experts")):
        model = tiny_models.build(key, torch.bfloat16, **{**sizes, experts: 32})
        yield f"random {key}", tiny_models.save(model, root / key, torch.bfloat16)


def stock(folder, dtype):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval().to(DEVICE)


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits.float()


def greedy_agreement(ours, theirs, ids, bound):
    """Tokens compared up to the first whose margin is within twice the bound, and whether all of them agree."""
    how = dict(max_new_tokens=48, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    expected, got = theirs.generate(ids, **how), ours.generate(ids, **how)
    start = ids.shape[1]
    for step, scores in enumerate(expected.logits):
        scores = scores[0].float()
        best = scores.topk(2).values
        if best[0] - best[1] <= 2 * bound * scores.abs().max():
            return step, True
        if got.sequences.shape[1] <= start + step or got.sequences[0, start + step] != expected.sequences[0, start + step]:
            return step, False
    return len(expected.logits), True


def compare(name, folder):
    """Two rows: everything f32 (only the order of sums differs), and bf16 as it is used."""
    import kt_kernel.transformers as kt

    exact = stock(folder, torch.float32)
    vocabulary = exact.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, vocabulary, (1, 96), generator=generator).to(DEVICE)
    reference = logits_of(exact, ids)
    rows = []
    for dtype, activations, gpu_experts in (
        (torch.float32, "f32", None),
        (torch.float32, "f32", 0.25),
        (torch.bfloat16, "default", None),
        (torch.bfloat16, "default", 0.25),
    ):
        model = kt.enable(folder, format="bf16", dtype=dtype, attn_implementation="eager", activations=activations,
                          gpu_experts=gpu_experts, device=DEVICE)
        if dtype == torch.float32:
            theirs, bound, measure = exact, 1e-4, worst
        else:
            # Stock bf16 rounds in the same places and more; both stay that far from the exact logits.
            theirs = stock(folder, dtype)
            measure = typical
            bound = 1.5 * typical(logits_of(theirs, ids), reference)
        error = measure(logits_of(model, ids), reference)
        tokens, agree = greedy_agreement(model, theirs, ids[:, :16], 4 * bound if dtype != torch.float32 else bound)
        rows.append(dict(model=name, dtype=str(dtype).removeprefix("torch."), gpu_experts=gpu_experts, error=error,
                         bound=bound, tokens_compared=tokens, tokens_equal=agree, ok=bool(error < bound and agree)))
        del model
        torch.cuda.empty_cache()
    return rows


def part_logits(arguments):
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name, folder in models_to_compare(arguments, pathlib.Path(root)):
            rows += compare(name, folder)
    return dict(rows=rows, ok=all(row["ok"] for row in rows))


# --- one layer ---


def random_layer(experts=32, top_k=4, hidden=1024, inter=512, method="BF16", max_tokens=64):
    from kt_kernel import KTMoEWrapper

    generator = torch.Generator().manual_seed(1)
    layer = KTMoEWrapper(0, experts, top_k, hidden, inter, None, 0, 0, None, max_tokens, method=method)

    def values(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)

    layer.load_weights_from_tensors(values(experts, inter, hidden), values(experts, inter, hidden),
                                    values(experts, hidden, inter), torch.arange(experts))
    return layer


def routed(tokens, experts, top_k, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def part_graph(arguments):
    from kt_kernel import KTMoEWrapper

    experts, top_k, hidden = 32, 4, 1024
    rows = []
    KTMoEWrapper.set_capture_batch_sizes([1, 8])
    for tokens in (1, 8):
        layer = random_layer(experts, top_k, hidden)
        x, ids, weights = routed(tokens, experts, top_k, hidden, seed=0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):  # buffers are made before the capture
                layer.forward(x, ids, weights, stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layer.submit_forward(x, ids, weights, torch.cuda.current_stream().cuda_stream)
            out = layer.sync_forward(x, torch.cuda.current_stream().cuda_stream)
        equal, host = 0, []
        masks = [torch.zeros(experts, dtype=torch.bool), torch.arange(experts) % 3 == 0, torch.arange(experts) < 20]
        for seed in range(12):
            new = routed(tokens, experts, top_k, hidden, seed)
            for old, value in zip((x, ids, weights), new):
                old.copy_(value)
            layer.gpu_experts_mask.copy_(masks[seed % len(masks)])
            torch.cuda.synchronize()
            eager = layer.forward(*new, torch.cuda.current_stream().cuda_stream).clone()
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            host.append((time.perf_counter() - start) * 1e6)
            torch.cuda.synchronize()
            equal += bool(torch.equal(out, eager))
        rows.append(dict(tokens=tokens, replays=12, equal=equal, host_us=statistics.median(host), ok=equal == 12))
    return dict(rows=rows, ok=all(row["ok"] for row in rows))


def part_overlap(arguments):
    experts, top_k, hidden, inter = 64, 8, 2048, 768
    layer = random_layer(experts, top_k, hidden, inter)
    matrix = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    rows = []
    for tokens in (1, 16):
        x, ids, weights = routed(tokens, experts, top_k, hidden, seed=0)
        stream = torch.cuda.current_stream().cuda_stream

        def on_cpu():
            layer.submit_forward(x, ids, weights, stream)
            layer.sync_forward(x, stream)

        cpu = median_ms(on_cpu)
        one = median_ms(lambda: torch.mm(matrix, matrix))
        for share in (0.5, 1.0, 2.0):
            times = max(1, round(share * cpu / max(one, 1e-3)))

            def on_gpu():
                for _ in range(times):
                    torch.mm(matrix, matrix)

            def both():
                layer.submit_forward(x, ids, weights, stream)
                on_gpu()
                layer.sync_forward(x, stream)

            gpu, together = median_ms(on_gpu), median_ms(both)
            rows.append(dict(tokens=tokens, cpu_ms=cpu, gpu_ms=gpu, both_ms=together,
                             over_larger=together / max(cpu, gpu), sum_ms=cpu + gpu))
    # Approaches the larger of the two: nearer to it than to the sum.
    ok = all(row["both_ms"] - max(row["cpu_ms"], row["gpu_ms"]) < 0.5 * min(row["cpu_ms"], row["gpu_ms"]) for row in rows)
    return dict(rows=rows, timeline=timeline(layer, matrix), ok=ok)


def timeline(layer, matrix):
    """Device times of one layer's steps in ms, from its submit on: the products end while the CPU still works."""
    x, ids, weights = routed(16, 64, 8, 2048, seed=0)
    stream = torch.cuda.current_stream().cuda_stream
    marks = {name: torch.cuda.Event(enable_timing=True) for name in ("start", "submitted", "gpu_done", "synced")}
    torch.cuda.synchronize()
    marks["start"].record()
    layer.submit_forward(x, ids, weights, stream)
    marks["submitted"].record()
    torch.mm(matrix, matrix)
    marks["gpu_done"].record()
    layer.sync_forward(x, stream)
    marks["synced"].record()
    torch.cuda.synchronize()
    return {name: marks["start"].elapsed_time(event) for name, event in marks.items()}


# --- decode ---


def read_bandwidth():
    """GB/s of all cores summing a tensor that no cache holds."""
    values = torch.ones(1 << 30, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        values.sum()
        best = max(best, values.numel() * 4 / (time.perf_counter() - start) / 1e9)
    return best


class ZipfRouter(torch.nn.Module):
    """Stands for a router: its choices are drawn beforehand, expert ranks by Zipf's law, shuffled in each layer."""

    def __init__(self, experts, top_k, exponent, seed, draws=4096):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        odds = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
        ranks = torch.multinomial(odds.expand(draws, -1), top_k, replacement=False, generator=generator)
        self.table = torch.randperm(experts, generator=generator)[ranks].to(DEVICE)
        self.counts = torch.bincount(self.table.flatten().cpu(), minlength=experts)
        self.weights = torch.full((draws, top_k), 1 / top_k, device=DEVICE, dtype=torch.bfloat16)
        self.at = 0

    def forward(self, hidden):
        tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
        if self.at + tokens > len(self.table):
            self.at = 0
        rows = slice(self.at, self.at + tokens)
        self.at += tokens
        return None, self.weights[rows], self.table[rows]


def decode_model(layers, method):
    import transformers

    import kt_kernel.transformers as kt

    config = transformers.Qwen3MoeConfig(
        vocab_size=32768, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, intermediate_size=6144,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_(0, 0.02)
    return kt.enable(model, format=method)


def decode_ms(model, steps=48, warm=8):
    """Median time of a step of one token after a prompt of 16."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    times = []
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long, device=DEVICE), past_key_values=cache, use_cache=True)
        for step in range(steps + warm):
            torch.cuda.synchronize()
            start = time.perf_counter()
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            torch.cuda.synchronize()
            if step >= warm:
                times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def experts_ms(module, router):
    """A layer's experts alone, one token at a time."""
    hidden = torch.randn(1, 2048, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        def call():
            _, weights, ids = router(hidden)
            module(hidden, ids, weights)

        return median_ms(call, repeats=100, warm=10)


def part_decode(arguments):
    from kt_kernel.transformers.placement import apply_masks, modules_of

    layers, bits = arguments.layers, {"int4": 4.0, "int8": 8.0, "bf16": 16.0}[arguments.format]
    bandwidth = read_bandwidth()
    model = decode_model(layers, arguments.format)
    routers = []
    for layer, block in enumerate(model.model.layers):
        block.mlp.gate = ZipfRouter(128, 8, arguments.zipf, seed=layer)
        routers.append(block.mlp.gate)
    modules = list(modules_of(model).values())
    counts = torch.stack([router.counts for router in routers]).double()
    rows = []
    for share in (0.0, 0.10, 0.25, 0.50):
        masks = torch.zeros(layers, 128, dtype=torch.bool)
        for layer in range(layers):
            masks[layer, counts[layer].topk(round(share * 128)).indices] = True
        apply_masks(model, masks)
        left = float((counts * ~masks).sum() / counts.sum())  # of the pairs, on the CPU
        bytes_read = left * 8 * 3 * 2048 * 768 * bits / 8  # of a layer and token
        step, alone = decode_ms(model), experts_ms(modules[0], routers[0])
        limit = bytes_read / bandwidth / 1e6
        rows.append(dict(on_gpu=share, pairs_on_cpu=left, step_ms=step, tokens_s=1e3 / step, layer_ms=alone,
                         limit_ms=limit, of_bandwidth=limit / alone))
    for row in rows:
        row["gain"] = rows[0]["step_ms"] / row["step_ms"]
        row["layer_gain"] = rows[0]["layer_ms"] / row["layer_ms"]
    return dict(rows=rows, layers=layers, format=arguments.format, zipf=arguments.zipf, read_gb_s=bandwidth, ok=True)


# --- all of it ---

PARTS = {"logits": part_logits, "graph": part_graph, "overlap": part_overlap, "decode": part_decode}


def show(name, result):
    print(f"\n== {name}: {'ok' if result.get('ok') else 'FAILED'}")
    if "error" in result:
        print(result["error"])
    rows = result.get("rows", [])
    if not rows:
        return
    cells = [list(rows[0])] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)))


def run_part(name, arguments):
    """The part's result; whatever goes wrong is part of it."""
    start = time.perf_counter()
    try:
        result = PARTS[name](arguments)
    except Exception:
        result = dict(ok=False, error=traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - start, 1)
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:  # a device that is gone: the other parts will say so too
        result["ok"] = False
        result.setdefault("error", str(error))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default=None, help="folder with tiny-qwen3moe and tiny-deepseekv3")
    parser.add_argument("--layers", type=int, default=4, help="of the decode part")
    parser.add_argument("--format", default="int4", choices=["int4", "int8", "bf16"], help="of the decode part")
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--out", default=None, help="write the JSON there too")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        sys.exit("hybrid_gpu: torch sees no CUDA device")
    if arguments.models is None and os.environ.get("KT_TEST_DATA"):
        arguments.models = os.path.join(os.environ["KT_TEST_DATA"], "models")
    import transformers

    import kt_kernel

    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, transformers=transformers.__version__,
                  kt_kernel=kt_kernel.__version__, isa=kt_kernel.__cpu_variant__, cores=len(os.sched_getaffinity(0)),
                  parts={})
    for name in chosen:
        report["parts"][name] = run_part(name, arguments)
        show(name, report["parts"][name])
    line = json.dumps(report)
    if arguments.out:
        pathlib.Path(arguments.out).write_text(line + "\n")
    print("\n" + line)
    sys.exit(0 if all(part["ok"] for part in report["parts"].values()) else 1)


if __name__ == "__main__":
    main()
