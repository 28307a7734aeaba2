"""Training runs of plain torch loops over stock models, repeated with the experts on KT: the figures below are
those of stock torch, transformers and PEFT, f32, one thread.

Five steps here; with KT_TEST_FULL 30 and 100 steps of SFT and 30 of DPO, whose figures are of rows that nothing was
trained on.
"""

import math
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import kt_kernel.transformers
from sft_models import DATA, EXPERTS, needs_data, read, trained

pytestmark = needs_data
full = pytest.mark.skipif(not os.environ.get("KT_TEST_FULL"), reason="minutes each: KT_TEST_FULL")
TARGETS = {
    "tiny-qwen3moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "tiny-deepseekv3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}
RANK, ALPHA, ROWS = 8, 16, 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name, experts=True, split=False, **how):
    """The model with LoRA on it, and its tokenizer."""
    folder = DATA / "models" / name
    how = {"activations": "f32", "dtype": torch.float32, "threads": 2, **how}
    model = kt_kernel.transformers.enable(folder, trainable=True, **how)
    more = {"target_parameters": EXPERTS} if experts else {}
    if split:
        more.update(
            rank_pattern={r".*\.experts\.gate_up_proj": 2 * RANK},
            alpha_pattern={r".*\.experts\.gate_up_proj": 2 * ALPHA},
        )
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[name], task_type="CAUSAL_LM", **more)
    torch.manual_seed(1234)
    return peft.get_peft_model(model, config), transformers.AutoTokenizer.from_pretrained(folder)


def example(tokenizer, talk, most=512):
    """(ids, labels): the last turn and its end mark are what is learnt."""
    whole = tokenizer.apply_chat_template(talk, tokenize=False).removesuffix("\n")
    asked = tokenizer.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(asked)
    ids, known = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (whole, asked))
    assert ids[: len(known)] == known
    return ids[:most], ([-100] * len(known) + ids[len(known) :])[:most]


def log_probabilities(model, examples):
    """(log-probabilities, which of them count) [rows, tokens - 1]."""
    longest = max(len(ids) for ids, _ in examples)

    def padded(rows, fill):
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

    ids, labels = padded([i for i, _ in examples], 0), padded([t for _, t in examples], -100)[:, 1:]
    mask = padded([[1] * len(i) for i, _ in examples], 0)
    scores = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
    counts = labels != -100
    return scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * counts, counts


def rate(step, steps, warm, peak):
    return (
        peak * (step + 1) / warm
        if step < warm
        else peak * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
    )


def train(model, rows, loss_of, steps, planned, warm, peak):
    """[(loss, gradient's norm)]: `steps` of a schedule of `planned`, ROWS rows each in a random order of seed 42."""
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(42)).tolist()
    model.train()
    seen = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, planned, warm, peak)
        loss = loss_of([rows[order[(step * ROWS + i) % len(rows)]] for i in range(ROWS)])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append((loss.item(), norm))
    return seen


def held_out(model, rows):
    model.eval()
    with torch.no_grad():
        parts = [log_probabilities(model, rows[i : i + 8]) for i in range(0, len(rows), 8)]
    return -sum(p.sum().item() for p, _ in parts) / sum(c.sum().item() for _, c in parts)


def sft(name, steps, planned=None, **how):
    """(model, examples, [(loss, norm)])"""
    model, tokenizer = made(name, **how)
    talks = read("style_pirate")
    rows = [example(tokenizer, row["messages"]) for row in talks[:1800]]

    def loss(batch):
        scores, counts = log_probabilities(model, batch)
        return -scores.sum() / counts.sum()

    seen = train(model, rows, loss, steps, planned or steps, 10, 1e-3)
    return model, [example(tokenizer, row["messages"]) for row in talks[1800:1900]], seen


FIRST = {
    "tiny-qwen3moe": (
        [2.84421, 3.10975, 2.77419, 2.7168, 2.9823],
        [0.76052, 0.70024, 0.81272, 0.82471, 0.95961],
        1486848,
    ),
    "tiny-deepseekv3": (
        [3.10571, 3.39881, 3.07809, 2.95404, 3.11578],
        [1.21295, 1.0902, 1.45244, 1.13835, 1.03572],
        740864,
    ),
}


@pytest.mark.parametrize("name", FIRST)
def test_first_steps(name):
    """Five digits were noted: half of the last one is 2e-6 of a loss, and 1e-5 of a norm."""
    losses, norms, count = FIRST[name]
    model, _, seen = sft(name, 5, planned=100)
    assert sum(p.numel() for p in trained(model).values()) == count
    assert [loss for loss, _ in seen] == pytest.approx(losses, rel=1e-4)
    assert [norm for _, norm in seen] == pytest.approx(norms, rel=1e-3)


SFT_RUNS = [
    ("tiny-deepseekv3", 30, {}, 1.68277),
    ("tiny-deepseekv3", 30, {"experts": False}, 2.21803),
    ("tiny-deepseekv3", 30, {"split": True}, 1.53807),
    ("tiny-deepseekv3", 30, {"format": "int8"}, 1.68246),
    ("tiny-deepseekv3", 30, {"converted": "int4"}, 1.69519),
    ("tiny-deepseekv3", 30, {"activations": "bf16"}, 1.68277),
    ("tiny-deepseekv3", 30, {"cpu_activation": "recompute"}, 1.68277),
    ("tiny-qwen3moe", 30, {}, 1.54685),
    ("tiny-deepseekv3", 100, {}, 0.78996),
    ("tiny-qwen3moe", 100, {}, 0.59946),
]


@full
@pytest.mark.parametrize("name,steps,how,expected", SFT_RUNS)
def test_sft(tmp_path, name, steps, how, expected):
    """`converted`: experts as kt quant rounds them once, each row to the nearest multiples of its largest number."""
    how = dict(how)
    if method := how.pop("converted", None):
        if not os.environ.get("KT_PROGRAM"):
            pytest.skip("KT_PROGRAM does not name the kt program")
        words = ["--method", method, "--rounding", "direct", "--numa-nodes", "1"]
        subprocess.run([os.environ["KT_PROGRAM"], "quant", DATA / "models" / name, "-o", tmp_path / method, *words],
                       check=True)
        how["weights"] = tmp_path / method
    model, held, _ = sft(name, steps, **how)
    assert held_out(model, held[: 100 if steps == 100 else 40]) == pytest.approx(expected, rel=0.01)


DPO_RUNS = [
    ("tiny-deepseekv3", None, 0.31701, 2.68891, 34),
    ("tiny-qwen3moe", None, 0.39276, 1.4318, 33),
    ("tiny-deepseekv3", "int8", 0.31666, 2.6932, 35),
]


@full
@pytest.mark.parametrize("name,format,expected_loss,expected_margin,expected_right", DPO_RUNS)
def test_dpo(name, format, expected_loss, expected_margin, expected_right):
    """The reference is the same model with its adapter off."""
    beta = 0.1
    model, tokenizer = made(name, **({"format": format} if format else {}))
    pairs = [
        tuple(example(tokenizer, row["prompt"] + row[kind]) for kind in ("chosen", "rejected"))
        for row in read("pref")
    ]

    def rewards(batch):
        """Of the chosen and the rejected, as far as the adapter moved them."""
        both = [c for c, _ in batch] + [r for _, r in batch]
        with torch.no_grad(), model.disable_adapter():
            before = log_probabilities(model, both)[0].sum(-1)
        return (beta * (log_probabilities(model, both)[0].sum(-1) - before)).chunk(2)

    def loss(batch):
        chosen, rejected = rewards(batch)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    seen = train(model, pairs[:2400], loss, 30, 30, 5, 5e-4)
    assert seen[0][0] == pytest.approx(math.log(2), rel=1e-5)
    model.eval()
    with torch.no_grad():
        margins = torch.cat([torch.sub(*rewards(pairs[i : i + ROWS])) for i in range(2400, 2440, ROWS)])
    assert -torch.nn.functional.logsigmoid(margins).mean().item() == pytest.approx(expected_loss, rel=0.02)
    assert margins.mean().item() == pytest.approx(expected_margin, rel=0.05)
    assert abs((margins > 0).sum().item() - expected_right) <= 1
