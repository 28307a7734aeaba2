#!/usr/bin/env python3
"""Forward and backward of one MoE layer with LoRA on its experts, as others do it on the CPU, timed as `kt microbench
moe
--train` times ours: even routing, layers in turn, frozen weights, gradients of input, routing weights and all factors,
medians. Prints a line of JSON for each.

    train_rival.py --kinds grouped_mm,loop --dtypes bf16,f32 --shape qwen3-30b --tokens 1024,4096 --threads 14,16
    train_rival.py --kinds kt-kernel --package FOLDER --dtypes bf16,int8 --tokens 1024,4096 --threads 14,16

grouped_mm, eager   stock transformers' experts with that implementation, LoRA by stock PEFT's target_parameters
loop                a loop over experts written out: x W^T + s (x A^T) B^T, nothing else, W never touched
kt-kernel           AMXSFTMoEWrapper's extension; FOLDER holds the unpacked wheel, of which the extension alone is used

Each measurement runs in a process of its own, which says what memory it takes above what it had before there were
weights, and above those. A kind that fails says why and leaves the others their turn.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

SHAPES = {"qwen3-30b": (128, 2048, 768, 8), "deepseek-v3": (32, 7168, 2048, 8), "small": (8, 64, 32, 2)}
STOCK = ("grouped_mm", "eager")


# --- memory of this process ---

def status(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def reset_peak():
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak then is that of loading, which is no higher here


def peak():
    try:
        return status("VmHWM")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- layers: (forward() -> what backward wants, backward(that)) ---

class Torch:
    """Layers of torch: stock ones with PEFT around them, or the loop."""

    def __init__(self, args, kind, dtype, tokens):
        import torch
        self.torch = torch
        torch.manual_seed(1)
        experts, hidden, inter, top_k = SHAPES[args.shape]
        self.dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        layers = [self.layer(kind, experts, hidden, inter, top_k) for _ in range(args.layers)]
        self.weights_bytes = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
        if kind in STOCK:
            self.layers = [self.with_peft(layer, args.rank) for layer in layers]
        else:
            self.layers = [Loop(torch, layer, args.rank) for layer in layers]
        self.x = torch.randn(tokens, hidden).to(self.dtype).requires_grad_()
        self.grad = (1e-3 * torch.randn(tokens, hidden)).to(self.dtype)
        self.shares = torch.full((tokens, top_k), 1 / top_k, dtype=self.dtype, requires_grad=True)
        self.routes = [torch.rand(tokens, experts).topk(top_k).indices for _ in range(4)]

    def layer(self, kind, experts, hidden, inter, top_k):
        import transformers
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        torch = self.torch
        config = transformers.Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inter, num_experts=experts,
                                             num_experts_per_tok=top_k)
        config._experts_implementation = kind if kind in STOCK else "eager"
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        module = module.to(self.dtype).to_empty(device="cpu").requires_grad_(False)
        for parameter in module.parameters():  # one expert's numbers for all: each has memory of its own
            one = (torch.randn(parameter.shape[1:]) * parameter.shape[-1] ** -0.5).to(self.dtype)
            for expert in parameter:
                expert.copy_(one)
        holder = torch.nn.Module()
        holder.experts = module
        holder.forward = lambda *given: holder.experts(*given)
        return holder

    def with_peft(self, layer, rank):
        import peft
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank,
                                 target_parameters=["experts.gate_up_proj", "experts.down_proj"])
        tuned = peft.inject_adapter_in_model(config, layer)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                self.torch.nn.init.normal_(parameter, std=0.01)
        return tuned

    def forward(self, call):
        layer = self.layers[call % len(self.layers)]
        return layer(self.x, self.routes[call % len(self.routes)], self.shares)

    def backward(self, output):
        output.backward(self.grad)

    def after(self):
        for tensor in (self.x, self.shares):
            if tensor.grad is None or not self.torch.isfinite(tensor.grad).all():
                sys.exit("no gradient, or one that is not finite")
            tensor.grad = None
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.grad = None


class Loop:
    """Factors of gate|up share one A; delta and weights are never added up."""

    def __init__(self, torch, layer, rank):
        self.torch, self.experts, self.scale = torch, layer.experts, 2.0
        count, both, hidden = layer.experts.gate_up_proj.shape
        inter = both // 2

        def factor(*shape):
            return torch.nn.Parameter((0.02 * torch.randn(shape)).to(layer.experts.gate_up_proj.dtype))

        self.a1, self.b1 = factor(count, rank, hidden), factor(count, both, rank)
        self.a2, self.b2 = factor(count, rank, inter), factor(count, hidden, rank)

    def parameters(self):
        return [self.a1, self.b1, self.a2, self.b2]

    def __call__(self, x, ids, shares):
        linear, w = self.torch.nn.functional.linear, self.experts
        out = self.torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            rows = x[tokens]
            both = linear(rows, w.gate_up_proj[expert])
            both = both + self.scale * linear(linear(rows, self.a1[expert]), self.b1[expert])
            gate, up = both.chunk(2, dim=-1)
            mid = self.torch.nn.functional.silu(gate) * up
            y = linear(mid, w.down_proj[expert]) + self.scale * linear(linear(mid, self.a2[expert]), self.b2[expert])
            out = out.index_add(0, tokens, y * shares[tokens, slots, None])
        return out


class KtKernel:
    """Its extension: the package around it wants libraries that a bare machine lacks."""

    CLASSES = {"bf16": "AMXBF16_SFT_MOE", "int8": "AMXInt8_SFT_MOE", "int4": "AMXInt4_SFT_MOE"}

    def __init__(self, args, dtype, tokens):
        import torch
        self.torch = torch
        [library] = pathlib.Path(args.package, "kt_kernel").glob("_kt_kernel_ext_amx*.so")
        spec = importlib.util.spec_from_file_location("kt_kernel_ext", library)
        ext = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(ext)
        self.experts, self.hidden, self.inter, self.top_k = SHAPES[args.shape]
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [args.threads[0]]
        self.infer = ext.CPUInfer(pool)
        torch.manual_seed(1)
        e, h, i, r = self.experts, self.hidden, self.inter, args.rank

        def repeated(n, k):
            return (torch.randn(1, n, k) * k ** -0.5).bfloat16().repeat(e, 1, 1)

        weights = dict(gate_proj=repeated(i, h), up_proj=repeated(i, h), down_proj=repeated(h, i))
        shapes = dict(gate_lora_a=(r, h), gate_lora_b=(i, r), up_lora_a=(r, h), up_lora_b=(i, r), down_lora_a=(r, i),
                      down_lora_b=(h, r))
        self.order = torch.arange(e, dtype=torch.int64)
        self.layers, self.held, self.weights_bytes = [], [weights], 0
        for number in range(args.layers):
            factors = {name: (0.02 * torch.randn(e, *shape)).bfloat16() for name, shape in shapes.items()}
            grads = {name: torch.zeros(e, *shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
            config = ext.moe.MOESFTConfig(e, self.top_k, h, i)
            config.layer_idx, config.pool, config.max_len = number, self.infer.backend_, -(-tokens // 512) * 512
            config.lora_rank, config.lora_alpha, config.max_cache_depth = r, 2.0 * r, 1
            wanted = dict(lora_dropout=0.0, full_weight_grad=False, share_backward_bb=True, share_cache_pool=False,
                          authoritative_optimizer_grads=False, physical_to_logical_map=self.order.data_ptr())
            for name, value in wanted.items():  # versions differ in these
                if hasattr(type(config), name):
                    setattr(config, name, value)
            for name, tensor in (*weights.items(), *factors.items()):
                setattr(config, name, tensor.data_ptr())
            moe = getattr(ext.moe, self.CLASSES[dtype])(config)
            self.run(moe.load_weights_task())
            self.layers.append((moe, list(grads.values())))
            self.held += [factors, grads, config]
        self.x = torch.randn(tokens, h).bfloat16()
        self.y, self.grad_x = torch.empty_like(self.x), torch.empty_like(self.x)
        self.grad = (1e-3 * torch.randn(tokens, h)).bfloat16()
        self.shares = torch.full((tokens, self.top_k), 1 / self.top_k)
        self.grad_shares = torch.empty_like(self.shares)
        self.count = torch.tensor([tokens], dtype=torch.int32)
        self.routes = [torch.rand(tokens, e).topk(self.top_k).indices.contiguous() for _ in range(4)]

    def run(self, task):
        self.infer.submit(task)
        self.infer.sync()

    def forward(self, call):
        moe, grads = self.layers[call % len(self.layers)]
        self.run(moe.forward_sft_task(self.count.data_ptr(), self.top_k, self.routes[call % 4].data_ptr(),
                                      self.shares.data_ptr(), self.x.data_ptr(), self.y.data_ptr(), True))
        return moe, grads

    def backward(self, of):
        moe, grads = of
        self.run(moe.backward_task(self.grad.data_ptr(), self.grad_x.data_ptr(), *(g.data_ptr() for g in grads),
                                   self.grad_shares.data_ptr(), 0, 0, 0))

    def after(self):
        for name, tensor in (("output", self.y), ("gradient", self.grad_x)):
            if not self.torch.isfinite(tensor).all() or not tensor.any():
                sys.exit(f"the {name} is zeros, or not finite")


# --- measuring ---

def measure(args):
    kind, dtype, tokens, threads = args.kinds[0], args.dtypes[0], args.tokens[0], args.threads[0]
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    torch.set_num_threads(threads)
    if kind in STOCK:
        import peft  # noqa: F401  before memory is looked at
        import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
    before = status("VmRSS")
    layers = KtKernel(args, dtype, tokens) if kind == "kt-kernel" else Torch(args, kind, dtype, tokens)
    loaded = status("VmRSS")
    reset_peak()
    forward, backward, begin, call = [], [], time.perf_counter(), 0
    while call < args.warmup + 3 or time.perf_counter() - begin < args.seconds:
        start = time.perf_counter()
        output = layers.forward(call)
        between = time.perf_counter()
        layers.backward(output)
        end = time.perf_counter()
        del output
        layers.after()
        if call >= args.warmup:
            forward.append(between - start)
            backward.append(end - between)
        call += 1
    both = [f + b for f, b in zip(forward, backward)]
    highest = peak()
    return dict(forward_ms=1e3 * statistics.median(forward), backward_ms=1e3 * statistics.median(backward),
                both_ms=1e3 * statistics.median(both), calls=len(both), weights_bytes=layers.weights_bytes,
                peak_bytes=highest - before, above_weights_bytes=highest - loaded)


def one(args, kind, dtype, tokens, threads):
    """What a process of its own measures, or why it does not."""
    chosen = ["--kinds", kind, "--dtypes", dtype, "--tokens", tokens, "--threads", threads, "--one"]
    command = [sys.executable, *sys.argv, *map(str, chosen)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return dict(error=f"over {args.limit:g} s")
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    lines = done.stderr.strip().splitlines()
    return dict(error=lines[-1][:300] if lines else f"exit status {done.returncode}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words, numbers = lambda text: text.split(","), lambda text: [int(word) for word in text.split(",")]
    parser.add_argument("--kinds", type=words, default=["grouped_mm", "loop"])
    parser.add_argument("--dtypes", type=words, default=["bf16"])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument("--tokens", type=numbers, default=[1024, 4096])
    parser.add_argument("--threads", type=numbers, default=[os.cpu_count()])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--package", default="carry/rival")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement, and three calls at least")
    parser.add_argument("--warmup", type=int, default=1, help="calls that do not count")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one process")
    parser.add_argument("--one", action="store_true", help="this process measures the single case given")
    args = parser.parse_args()
    known = {*STOCK, "loop", "kt-kernel"}
    if unknown := set(args.kinds) - known:
        parser.error(f"--kinds: no {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    if args.one:
        print(json.dumps(measure(args)))
        return
    worked = False
    for kind in args.kinds:
        for dtype in args.dtypes:
            if dtype not in (KtKernel.CLASSES if kind == "kt-kernel" else ("bf16", "f32")):
                continue
            for tokens in args.tokens:
                for threads in args.threads:
                    found = one(args, kind, dtype, tokens, threads)
                    worked |= "error" not in found
                    row = dict(kind=kind, shape=args.shape, dtype=dtype, tokens=tokens, threads=threads, rank=args.rank,
                               layers=args.layers)
                    print(json.dumps({**row, **found}), flush=True)
    sys.exit(0 if worked else 1)


if __name__ == "__main__":
    main()
