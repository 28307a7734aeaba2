"""Whole models with BF16 experts on KT against pure transformers on the same device.

The reference is pure transformers in f32. In f32 (activations="f32" in KT) only the order of sums differs: F32_BOUND.

In bf16 both round, in different places. How far that may take the logits is read off pure transformers itself: its
worst error against f32, times FACTOR, because the hybrid's roundings are others of the same size and the maximum of two
draws is larger than that of one. Two things are compared:

- forced: every layer uses the expert ids and weights of the f32 run, in both. All positions must be within the bound.
- free: routers decide. Where two scores are nearly equal a rounding decides which expert runs, and that moves logits by
  more than any bound on roundings. Positions where some layer chose other experts than the f32 run are counted, may be
  no more than pure transformers in bf16 has (with room for chance), and all others must be within the bound. An expert
  that changed at one position also reaches later ones through attention; the bound is read off positions with the same
  history.

Tokens: greedy ones of the reference, fed to both. Wherever its margin exceeds twice the bound, ours are the same.
"""

import pathlib
import tempfile

import torch

F32_BOUND = 1e-4
FACTOR = 2.0
PROMPT = 48  # tokens


class Routing:
    """Records what experts modules are asked for, or makes them use what another run recorded."""

    def __init__(self, model, forced=None):
        self.ids, self.weights, self._hooks = [], [], []
        modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
        for at, module in enumerate(modules):
            given = None if forced is None else (forced.ids[at], forced.weights[at])
            self._hooks.append(module.register_forward_pre_hook(self._hook(given)))

    def _hook(self, given):
        def hook(module, inputs):
            hidden, ids, weights = inputs
            self.ids.append(ids.clone())
            self.weights.append(weights.float().clone())
            return None if given is None else (hidden, given[0], given[1].to(weights.dtype))

        return hook

    def stop(self):
        for hook in self._hooks:
            hook.remove()

    def same(self, other):
        """bool [positions]: all layers chose the same experts."""
        layers = [(a.sort(-1).values == b.sort(-1).values).all(-1) for a, b in zip(self.ids, other.ids)]
        return torch.stack(layers).all(0)


def run(model, ids, forced=None):
    """(logits f32 [positions, vocabulary], Routing)"""
    routing = Routing(model, forced)
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    routing.stop()
    return logits, routing


def errors(ours, right):
    """max|a - b| / max|b| of every position; infinite where ours is not finite."""
    out = (ours - right).abs().amax(-1) / right.abs().amax(-1)
    return torch.where(torch.isfinite(ours).all(-1), out, float("inf"))


def worst(values, where=None):
    values = values if where is None else values[where]
    return values.max().item() if values.numel() else 0.0


# --- models ---


def checkpoints(gpu, arguments, root):
    """(name, folder, prompt ids or None)"""
    import transformers

    folders, demo = {}, pathlib.Path(__file__).parents[2] / "demo"
    story = (demo / "stories.txt").read_text()[:2000]
    for base in filter(None, (arguments.models, demo)):
        for name in ("tiny-qwen3moe", "tiny-deepseekv3"):
            folder = pathlib.Path(base, name)
            if (folder / "config.json").exists():
                folders.setdefault(name, folder)
    for name, folder in folders.items():
        ids = transformers.AutoTokenizer.from_pretrained(folder)(story, return_tensors="pt")["input_ids"]
        yield name, folder, ids[:, :PROMPT]
    import tiny_models

    sizes = dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=4, num_experts_per_tok=8)
    experts = 64
    if gpu.dry:
        sizes, experts = dict(hidden_size=64, moe_intermediate_size=32, num_hidden_layers=3, num_experts_per_tok=4), 16
    for key, field in (("qwen3_moe", "num_experts"), ("deepseek_v3", "n_routed_experts")):
        model = tiny_models.build(key, torch.bfloat16, **{**sizes, field: experts})
        yield f"random {key}", tiny_models.save(model, root / key, torch.bfloat16), None


def stock(gpu, folder, dtype):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                              experts_implementation="eager")
    return model.eval().to(gpu.device)


def hybrid(gpu, folder, dtype, gpu_experts):
    import kt_kernel.transformers as kt

    return kt.enable(folder, format="bf16", dtype=dtype, attn_implementation="eager", gpu_experts=gpu_experts,
                     activations="f32" if dtype == torch.float32 else "default", device=gpu.device)


# --- comparisons ---


def clear_positions(right, bound):
    """Where the margin of the best token exceeds twice the bound."""
    best = right.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1] > 2 * bound * right.abs().amax(-1)


def generated(model, prompt, count):
    how = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0]


def agreeing_tokens(ours, theirs, start, clear):
    """(how many new tokens of two greedy runs were compared, whether they agree): up to the first that is not clear."""
    compared = 0
    for at in range(start, min(len(ours), len(theirs))):
        if not clear[at - 1]:
            break
        if ours[at] != theirs[at]:
            return compared, False
        compared += 1
    return compared, True


def f32_row(gpu, name, folder, case, gpu_experts):
    ids, right, routing, prompt = case
    model = hybrid(gpu, folder, torch.float32, gpu_experts)
    ours, chosen = run(model, ids)
    same = chosen.same(routing)
    error = worst(errors(ours, right), same)
    clear = clear_positions(right, F32_BOUND)
    tokens, agree = agreeing_tokens(generated(model, ids[:, :prompt], ids.shape[1] - prompt), ids[0], prompt, clear)
    return dict(model=name, dtype="f32", gpu_experts=gpu_experts, error=error, bound=F32_BOUND,
                other_experts=int((~same).sum()),
                positions=len(same), clear=int(clear.sum()), tokens=tokens,
                ok=bool(error < F32_BOUND and (~same).sum() <= 1 and agree and equal_tokens(ours, right, clear & same)))


def equal_tokens(ours, right, where):
    return bool(torch.equal(ours.argmax(-1)[where], right.argmax(-1)[where]))


def bf16_rows(gpu, name, folder, case):
    ids, right, routing, prompt = case
    theirs = stock(gpu, folder, torch.bfloat16)
    forced, _ = run(theirs, ids, forced=routing)
    free, chosen = run(theirs, ids)
    same_there = chosen.same(routing)
    bound = {"forced": FACTOR * worst(errors(forced, right)), "free": FACTOR * worst(errors(free, right), same_there)}
    greedy = generated(theirs, ids[:, :prompt], ids.shape[1] - prompt)
    clear_there = clear_positions(run(theirs, greedy[None])[0], bound["free"])
    del theirs
    rows = []
    for gpu_experts in (None, 0.25):
        model = hybrid(gpu, folder, torch.bfloat16, gpu_experts)
        ours, _ = run(model, ids, forced=routing)
        common = dict(model=name, dtype="bf16", gpu_experts=gpu_experts)
        error, clear = worst(errors(ours, right)), clear_positions(right, bound["forced"])
        rows.append(dict(common, routing="forced", error=error, bound=bound["forced"], positions=len(clear),
                         clear=int(clear.sum()),
                         ok=error < bound["forced"] and equal_tokens(ours, right, clear)))
        ours, chosen = run(model, ids)
        same, clear = chosen.same(routing), clear_positions(right, bound["free"])
        error, other, most = worst(errors(ours, right), same), int((~same).sum()), allowed(int((~same_there).sum()))
        tokens, agree = agreeing_tokens(generated(model, ids[:, :prompt], ids.shape[1] - prompt), greedy, prompt,
                                        clear_there)
        rows.append(dict(common, routing="free", error=error, bound=bound["free"], positions=len(same),
                         clear=int(clear.sum()),
                         other_experts=other, other_experts_allowed=most, tokens=tokens,
                         ok=bool(error < bound["free"] and other <= most and agree
                                 and equal_tokens(ours, right, clear & same))))
        del model
    return rows


def allowed(theirs):
    """Positions with other experts than in f32: as many as pure transformers has, and three times the spread of such a
    count."""
    return theirs + 3 + int(3 * theirs**0.5)


def compare(gpu, name, folder, prompt):
    exact = stock(gpu, folder, torch.float32)
    if prompt is None:
        generator = torch.Generator().manual_seed(7)
        prompt = torch.randint(3, exact.config.get_text_config().vocab_size, (1, 16 if gpu.dry else 64),
                               generator=generator)
    prompt = prompt.to(gpu.device)
    ids = generated(exact, prompt, 16 if gpu.dry else 48)[None]
    right, routing = run(exact, ids)
    case = (ids, right, routing, prompt.shape[1])
    del exact
    rows = [f32_row(gpu, name, folder, case, gpu_experts) for gpu_experts in (None, 0.25)]
    gpu.give_back()
    return rows + bf16_rows(gpu, name, folder, case)


def part(gpu, arguments):
    if not gpu.dry:
        torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name, folder, prompt in checkpoints(gpu, arguments, pathlib.Path(root)):
            rows += compare(gpu, name, folder, prompt)
            gpu.give_back()
    return dict(rows=rows, factor=FACTOR, ok=all(row["ok"] for row in rows))
