"""Trainers of stock TRL and transformers over models with experts on KT, beside the same over stock models, f32.

Losses and reward margins of four steps are within 1e-4. TRL adds a balancing loss for models whose config names
one; it is switched off, so that the numbers are those of the method.
"""

import os
import pathlib
import sys

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
pytest.importorskip("accelerate", reason="accelerate is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
trl = pytest.importorskip("trl", reason="trl is not installed")
import tokenizers

import kt_kernel.transformers
from sft_models import lora_config, ours, stock, trained, with_lora

BOUND = 1e-4
CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' . ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WORDS = (
    "the ship sails far over a dark sea and we sing of gold rum wind stars salt home old young captain boat".split()
)
SIZES = {"num_hidden_layers": 2, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def tokenizer():
    words = ["<pad>", "<eos>", "user:", "assistant:", ".", "<unk>", *WORDS]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    out = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    out.chat_template = CHAT
    return out


def sentence(seed, length):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (length,), generator=generator))


def user(i):
    return {"role": "user", "content": sentence(i, 3 + i % 4)}


def answer(i):
    return {"role": "assistant", "content": sentence(1000 + i, 4 + i % 5)}


TALKS = [{"messages": [user(i), answer(i)]} for i in range(32)]
PAIRS = [{"prompt": [user(i)], "chosen": [answer(i)], "rejected": [answer(100 + i)]} for i in range(32)]
JUDGED = [
    {"prompt": p["prompt"], "completion": p["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
    for i, p in enumerate(PAIRS)
]


def settings(config, folder, accumulate=1, checkpointing=True, **more):
    return config(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=4,
        logging_steps=1,
        learning_rate=5e-3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=1,
        gradient_checkpointing=checkpointing,
        **{"save_strategy": "no", "max_length": 64, **more},
    )


def trainer_of(kind, model, folder, tokenizer, rows=None, **how):
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer, config, data, more = {
        "sft": (trl.SFTTrainer, trl.SFTConfig, TALKS, {}),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, {"beta": 0.1}),
        "kto": (trl.KTOTrainer, trl.KTOConfig, JUDGED, {"beta": 0.1}),
        "orpo": (ORPOTrainer, ORPOConfig, PAIRS, {"beta": 0.1}),
        "simpo": (CPOTrainer, CPOConfig, PAIRS, {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0}),
    }[kind]
    peft_config = None if hasattr(model, "peft_config") else lora_config()
    torch.manual_seed(5)
    return trainer(
        model,
        args=settings(config, folder, **more, **how),
        train_dataset=datasets.Dataset.from_list(data[:rows]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def logged(trainer):
    """[(loss, margin of rewards)] of each step."""
    return [
        (float(log["loss"]), float(log.get("rewards/margins", 0)))
        for log in trainer.state.log_history
        if "loss" in log
    ]


def assert_equal(ours_, theirs):
    assert len(ours_) == len(theirs) == 4
    assert len({loss for loss, _ in theirs}) == 4  # something is learnt
    for one, other in zip(ours_, theirs):
        assert one == pytest.approx(other, abs=BOUND, rel=BOUND)


# Every combination in the full matrix.
USUAL = [
    ("sft", True, 1),
    ("sft", False, 4),
    ("dpo", True, 4),
    ("dpo", False, 1),
    ("kto", True, 1),
    ("orpo", True, 1),
    ("simpo", True, 1),
]
ALL = [
    (kind, checkpointing, n)
    for kind in ("sft", "dpo", "kto", "orpo", "simpo")
    for checkpointing in (True, False)
    for n in (1, 4)
]


class TestTrainers:
    @pytest.mark.parametrize("kind,checkpointing,accumulate", ALL if os.environ.get("KT_TEST_FULL") else USUAL)
    def test_as_stock(self, tmp_path, tokenizer, kind, checkpointing, accumulate):
        logs, names = [], []
        for make in (stock, ours):
            trainer = trainer_of(
                kind,
                make(config=SIZES) if make is ours else make(**SIZES),
                tmp_path,
                tokenizer,
                checkpointing=checkpointing,
                accumulate=accumulate,
            )
            trainer.train()
            logs.append(logged(trainer))
            names.append(sorted(trained(trainer.model)))
        assert names[0] == names[1] and any(".experts." in name for name in names[0])
        assert_equal(logs[1], logs[0])
        if kind in ("dpo", "kto", "simpo"):
            assert any(margin for _, margin in logs[0])

    def test_experts_run_once_in_checkpointed_blocks(self, tmp_path, tokenizer, caplog):
        """The trainer's own switch finds our contexts."""
        trainer = trainer_of("sft", ours(config=SIZES), tmp_path, tokenizer)
        with caplog.at_level("WARNING", logger="kt_kernel"):
            trainer.train()
        assert "twice" not in caplog.text

    def test_dpo_on_an_adapter(self, tmp_path, tokenizer):
        """Its reference is the adapter as it was: TRL copies it to one called "ref"."""
        logs = []
        for make in (stock, ours):
            model = with_lora(make(config=SIZES) if make is ours else make(**SIZES), init_lora_weights=False)
            trainer = trainer_of("dpo", model, tmp_path, tokenizer)
            assert sorted(trainer.model.peft_config) == ["default", "ref"]
            trainer.train()
            logs.append(logged(trainer))
        assert logs[0][0][0] == pytest.approx(0.6931472, abs=1e-6)
        assert_equal(logs[1], logs[0])


class TestTransformersTrainer:
    def trainer(self, folder, tokenizer, model=None, **how):
        rows = [
            tokenizer(tokenizer.apply_chat_template(t["messages"], tokenize=False))["input_ids"][:8] for t in TALKS
        ]
        data = datasets.Dataset.from_list([{"input_ids": r, "labels": r} for r in rows if len(r) == 8])
        how.pop("max_length", None)
        args = settings(lambda max_length, **k: transformers.TrainingArguments(**k), folder, **how)
        model = with_lora(ours(config=SIZES), seed=7) if model is None else model
        return transformers.Trainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    @pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
    def test_resume_is_bitwise(self, tmp_path, tokenizer, optimizer):
        whole = self.trainer(tmp_path / "whole", tokenizer, save_strategy="steps", save_steps=2, optim=optimizer)
        whole.train()
        names = {p.name for p in (tmp_path / "whole" / "checkpoint-2").iterdir()}
        assert {
            "adapter_model.safetensors",
            "adapter_config.json",
            "optimizer.pt",
            "scheduler.pt",
            "trainer_state.json",
        } <= names
        again = self.trainer(
            tmp_path / "again", tokenizer, model=with_lora(ours(config=SIZES), seed=99), optim=optimizer
        )
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert logged(whole) == logged(again)
        assert all(torch.equal(p, trained(again.model)[name]) for name, p in trained(whole.model).items())

    def test_from_a_path(self, tmp_path, tokenizer):
        """A model that has our quantizer: Trainer asks it whether it trains."""
        import tiny_models

        tiny_models.save(stock(**SIZES), tmp_path / "model", torch.bfloat16)
        model = kt_kernel.transformers.enable(
            tmp_path / "model",
            trainable=True,
            activations="f32",
            dtype=torch.float32,
            attn_implementation="eager",
            threads=2,
        )
        by_path = self.trainer(tmp_path / "path", tokenizer, model=with_lora(model, seed=7))
        by_path.train()
        loaded = self.trainer(tmp_path / "loaded", tokenizer)
        loaded.train()
        assert logged(by_path) == logged(loaded)
        assert not list((tmp_path / "path").glob("**/model.safetensors"))

    def test_optimizers_are_seen_by_generation(self, tmp_path, tokenizer):
        """Factors are packed for passes without gradients; a step makes that old, whatever the optimizer."""
        from sft_models import IDS, draw_b, logits

        ids = IDS % 20
        for optimizer in (torch.optim.AdamW, lambda p, **k: torch.optim.AdamW(p, fused=True, **k), torch.optim.SGD):
            model = with_lora(ours(config=SIZES))
            draw_b(model)
            steps = optimizer([p for p in trained(model).values()], lr=0.1)
            before = logits(model, ids)
            model(input_ids=ids, labels=ids).loss.backward()
            assert torch.equal(logits(model, ids), before)
            steps.step()
            after = logits(model, ids)
            fresh = with_lora(ours(config=SIZES))
            fresh.load_state_dict(model.state_dict())
            assert torch.equal(after, logits(fresh, ids)) and not torch.equal(after, before)
