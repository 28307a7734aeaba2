#!/usr/bin/env python3
"""A whole model in training: random, of the shape of Qwen3-30B-A3B or of layers of DeepSeek-V3, experts on KT, the rest
on the GPU where there is one; LoRA of stock PEFT on attention and experts, AdamW, a plain loop. No checkpoint is
written or read: a layer's experts are made, packed and forgotten, so that memory holds one layer in bf16 and the packed
ones.

    PYTHONPATH=build/python train_speed.py --shape qwen3-30b --format int8 --tokens 4096 --json model.json
    PYTHONPATH=build/python train_speed.py --shape deepseek-v3 --format int4,bf16 --tokens 8192

Routers compute as they do; the experts they name are replaced by draws that are even, each with the router's own
weight, so its gradient is what it would be. Duty is the share of a step in which calls of experts run, on the caller's
clock. "device alone" is a step whose experts give their input back, without an optimizer; "hand-over" what is left of a
step when calls of experts, the device alone and the optimizer are taken out: copies, waiting and Python. --dry: small,
for a machine that only shows that it runs. """
import argparse
import contextlib
import gc
import json
import pathlib
import statistics
import sys
import time

import torch

SHAPES = {
    "qwen3-30b": dict(family="qwen3_moe", layers=48, experts=128, top_k=8, hidden=2048, inter=768, vocabulary=151936,
                      heads=32, kv_heads=4, head_dim=128),
    "deepseek-v3": dict(family="deepseek_v3", layers=4, experts=32, top_k=8, hidden=7168, inter=2048, vocabulary=129280,
                        heads=128, kv_heads=128, head_dim=128, q_rank=1536, kv_rank=512, rope=64),
}
DRY = dict(layers=2, experts=8, top_k=2, hidden=64, inter=32, vocabulary=256, heads=4, kv_heads=2, head_dim=16,
           q_rank=32,
           kv_rank=32, rope=16)


def sizes_of(args, name):
    shape = dict(SHAPES[name])
    if args.dry:
        shape.update({key: value for key, value in DRY.items() if key in shape})
        if shape["family"] == "deepseek_v3":
            shape["kv_heads"] = shape["heads"]
    if args.layers:
        shape["layers"] = args.layers
    return shape


# --- the model ---

def config_of(s):
    import transformers
    common = dict(vocab_size=s["vocabulary"], hidden_size=s["hidden"], num_hidden_layers=s["layers"],
                  num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head_dim"],
                  num_experts_per_tok=s["top_k"], intermediate_size=3 * s["hidden"], max_position_embeddings=16384,
                  tie_word_embeddings=False, attn_implementation="sdpa")
    if s["family"] == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**common, num_experts=s["experts"], moe_intermediate_size=s["inter"],
                                           norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    del common["head_dim"]
    return transformers.DeepseekV3Config(**common, n_routed_experts=s["experts"], moe_intermediate_size=s["inter"],
                                         n_shared_experts=1, first_k_dense_replace=0, n_group=1, topk_group=1,
                                         q_lora_rank=s["q_rank"], kv_lora_rank=s["kv_rank"], qk_rope_head_dim=s["rope"],
                                         qk_nope_head_dim=s["head_dim"], v_head_dim=s["head_dim"])


class EvenRouter(torch.nn.Module):
    """The stock router's work and gradient; which experts it names is drawn."""

    def __init__(self, gate, s, seed):
        super().__init__()
        self.gate, self.experts, self.top_k, self.seed = gate, s["experts"], s["top_k"], seed
        self.drawn = None

    def forward(self, hidden):
        logits, weights, chosen = self.gate(hidden)
        tokens = chosen.shape[0]
        if self.drawn is None or self.drawn.shape[0] != tokens:
            generator = torch.Generator().manual_seed(self.seed)
            ids = torch.rand(tokens, self.experts, generator=generator).topk(self.top_k).indices
            self.drawn = ids.to(chosen.device)
        taken = logits.float().reshape(tokens, -1).softmax(-1).gather(1, self.drawn)
        return logits, (taken / taken.sum(-1, keepdim=True)).to(weights.dtype), self.drawn


def blocks_of(model):
    return [layer.mlp for layer in model.get_submodule("model").layers]


def make_model(args, s, device):
    """Everything but the experts, in bf16 on the device."""
    import transformers
    config = config_of(s)
    inter = config.moe_intermediate_size
    config.moe_intermediate_size = 1  # experts of one row hold the place until KT's come
    if s["family"] == "deepseek_v3":
        config.n_shared_experts = inter  # that many times one row
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.moe_intermediate_size = inter
    return model.requires_grad_(False)


def put_experts(model, s, format, args):
    from kt_kernel.sft.attach import attach
    from kt_kernel.sft.experts import TrainableExperts
    from kt_kernel.transformers import method_of
    from kt_kernel.transformers.experts import Options, Shape

    options = Options(method=method_of(format), max_tokens=args.tokens, threads=args.threads, cpu_activation="retain")
    generator = torch.Generator().manual_seed(5)

    def values(n, k):
        one = (torch.randn(1, n, k, generator=generator) / k ** 0.5).bfloat16()
        return one.expand(s["experts"], n, k).contiguous()

    weights = [values(s["inter"], s["hidden"]), values(s["inter"], s["hidden"]), values(s["hidden"], s["inter"])]
    for number, block in enumerate(blocks_of(model)):
        module = TrainableExperts(Shape(number, s["experts"], s["top_k"], s["hidden"], s["inter"]), options)
        module.load(weights)
        block.experts = module
        block.gate = EvenRouter(block.gate, s, number)
        print(f"  experts of layer {number + 1} of {s['layers']}", file=sys.stderr, end="\r")
    print(file=sys.stderr)
    attach(model)


def put_lora(model, s, rank):
    import peft
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if s["family"] == "qwen3_moe" else [
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))


# --- steps ---

def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_steps(model, optimizer, batch, device, steps):
    """A row for each step: seconds, and those of experts."""
    from kt_kernel.sft.train.watch import CLOCK
    rows = []
    for _ in range(steps):
        synchronize(device)
        before, begin = CLOCK.now(), time.perf_counter()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        synchronize(device)
        forward = time.perf_counter()
        loss.backward()
        synchronize(device)
        backward = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize(device)
        end = time.perf_counter()
        spent = [now - then for now, then in zip(CLOCK.now(), before)]
        if not torch.isfinite(loss):
            sys.exit("the loss is not finite")
        rows.append(dict(seconds=end - begin, forward=forward - begin, backward=backward - forward,
                         optimizer=end - backward,
                         experts_forward=spent[0], experts_backward=spent[1], operations=spent[2] + spent[3],
                         loss=float(loss.detach())))
    return rows


@contextlib.contextmanager
def experts_that_give_back(model):
    from kt_kernel.sft.experts import TrainableExperts
    stock = TrainableExperts.forward
    TrainableExperts.forward = lambda self, hidden, ids, weights: (
        hidden * weights.sum(-1, keepdim=True)).to(hidden.dtype)
    try:
        yield
    finally:
        TrainableExperts.forward = stock


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def measured(args, name, format, device):
    from kt_kernel.sft.train.watch import CLOCK
    s = sizes_of(args, name)
    torch.manual_seed(1)
    before, begin = resident(), time.perf_counter()
    model = make_model(args, s, device)
    put_experts(model, s, format, args)
    gc.collect()
    loaded, load_s = resident(), time.perf_counter() - begin
    if args.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = put_lora(model, s, args.rank).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [dict(params=[p for p in trained if p.device.type == kind], fused=True)
         for kind in ("cpu", "cuda") if any(p.device.type == kind for p in trained)], lr=1e-4)
    batch = torch.randint(s["vocabulary"], (args.rows, args.tokens // args.rows), device=device)
    CLOCK.install()
    run_steps(model, optimizer, batch, device, args.warmup)
    rows = run_steps(model, optimizer, batch, device, args.steps)
    with experts_that_give_back(model):
        alone = run_steps(model, None, batch, device, 2)[-1]["seconds"]

    def middle(key):
        return statistics.median(row[key] for row in rows)

    seconds, experts = middle("seconds"), middle("experts_forward") + middle("experts_backward")
    left = seconds - experts - alone - middle("optimizer")
    return dict(shape=name, format=format, layers=s["layers"], experts=s["experts"], tokens=args.tokens, rank=args.rank,
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", steps=args.steps,
                tokens_per_s=args.tokens / seconds, step_s=seconds, forward_s=middle("forward"),
                backward_s=middle("backward"), optimizer_s=middle("optimizer"), experts_s=experts,
                duty=experts / seconds,
                experts_forward_s=middle("experts_forward"), experts_backward_s=middle("experts_backward"),
                experts_tflops=middle("operations") / experts / 1e12, device_alone_s=alone,
                over_both_alone=seconds / (experts + alone), optimizer_share=middle("optimizer") / seconds,
                hand_over_share=max(0.0, left) / seconds, load_s=load_s,
                loaded_bytes=loaded - before, resident_bytes=resident() - before,
                lora_bytes=16 * sum(p.numel() for p in trained), first_loss=rows[0]["loss"], last_loss=rows[-1]["loss"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument("--format", default="int8", help="of the experts; a list measures each")
    parser.add_argument("--layers", type=int, default=0, help="default: the shape's")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--rows", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="also into this file, a line for each format")
    args = parser.parse_args()
    if args.tokens % args.rows:
        parser.error(f"--tokens {args.tokens} is no multiple of --rows {args.rows}")
    if args.dry:
        args.tokens, args.steps, args.warmup = min(args.tokens, 64), 2, 1
    device = torch.device(args.device)
    for format in args.format.split(","):
        row = measured(args, args.shape, format, device)
        text = json.dumps(row)
        print(text, flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(text + "\n")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
