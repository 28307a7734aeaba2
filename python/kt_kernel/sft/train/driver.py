"""Model, rows and trainer of a plan brought together, and the files that a run leaves."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import torch
import transformers

from . import encode, files, preferences, targets
from .events import Events, TrainingError
from .plan import Plan
from .rows import Dropped, Row, read_rows
from .trainer import GuardedTrainer, Watcher, arguments
from .watch import CLOCK


def load_model(plan: Plan) -> torch.nn.Module:
    """Its experts on KT, everything else in torch."""
    import kt_kernel.transformers

    CLOCK.install()
    s = plan.settings
    several = len(plan.devices) > 1
    more: dict[str, Any] = {}
    if s["chunk_size"]:
        more["max_tokens"] = s["chunk_size"]
    if several:
        more["device_map"] = "auto"
    elif not plan.on_cpu:
        more["device"] = plan.devices[0]
    return kt_kernel.transformers.enable(
        plan.model["path"],
        weights=plan.model["weights"],
        format=plan.model["format"],
        trainable=True,
        cpu_activation=plan.parts["cpu_activation"],
        activations=plan.parts["expert_activations"],
        threads=plan.parts["threads"],
        numa_nodes=plan.parts["nodes"],
        dtype=torch.bfloat16 if plan.bf16 else torch.float32,
        **more,
    )


def train(plan: Plan, events: Events, stop: Any, load: Callable[[Plan], torch.nn.Module] = load_model) -> bool:
    """Whether it was interrupted. `stop.asked` becomes true when it is to be."""
    output = pathlib.Path(plan.output)
    output.mkdir(parents=True, exist_ok=True)
    files.clean(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plan.model["path"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows, eval_rows = _rows(plan, events)
    sets = _encoded(plan, tokenizer, rows, eval_rows, events) if plan.stage == "sft" else (
        preferences.dataset(rows, plan), preferences.dataset(eval_rows, plan) if eval_rows else None)
    if stop.asked:
        events.send("interrupted")
        return True
    transformers.set_seed(plan["seed"])
    model = load(plan)
    model.config.use_cache = False
    trainer = _trainer(plan, model, tokenizer, *sets)
    watcher = Watcher(plan, events, stop, trainer.model)
    trainer.watched = watcher
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.add_callback(watcher)
    _tell_ready(plan, events, trainer, len(rows), len(eval_rows))
    if stop.asked:
        events.send("interrupted")
        return True
    result = trainer.train(resume_from_checkpoint=plan.resume)
    if stop.asked and trainer.state.global_step < trainer.state.max_steps:
        events.send("interrupted", step=trainer.state.global_step, path=watcher.last_saved and str(watcher.last_saved))
        return True
    _finish(plan, events, trainer, watcher, result.metrics)
    return False


# --- rows ---


def _rows(plan: Plan, events: Events) -> tuple[list[Row], list[Row]]:
    out: list[list[Row]] = []
    for name in ("train", "eval"):
        dropped = Dropped()
        found: list[Row] = []
        for source in plan.data[name]:
            found += read_rows(source, plan["max_samples"], plan["default_system"], dropped)
        for line in dropped.lines():
            events.note(line)
        if plan.data[name] and not found:
            named = ", ".join(source["name"] for source in plan.data[name])
            raise TrainingError(f"{named}: no row is left to {'train on' if name == 'train' else 'evaluate'}")
        out.append(found)
    rows, eval_rows = out
    if plan["val_size"] and not eval_rows:
        rows, eval_rows = _split(rows, float(plan["val_size"]), plan["seed"])
    return rows, eval_rows


def _split(rows, size, seed):
    """A share or a number of rows, drawn by the seed, for evaluations."""
    count = math.ceil(size * len(rows)) if size < 1 else int(size)
    if count >= len(rows):
        raise TrainingError(f"val_size: {size:g} leaves nothing to train on of {len(rows)} rows")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held = set(order[:count])
    return [r for i, r in enumerate(rows) if i not in held], [r for i, r in enumerate(rows) if i in held]


def _encoded(plan, tokenizer, rows, eval_rows, events):
    s = plan.settings
    out = []
    for part in (rows, eval_rows):
        encoder = encode.Encoder(tokenizer, s["cutoff_len"], s["mask_history"], s["train_on_prompt"],
                                 s["enable_thinking"])
        dropped = Dropped()
        encoded = encoder.rows(part, dropped)
        for line in dropped.lines():
            events.note(line)
        if encoder.counts.cut:
            events.note(f"{encoder.counts.cut} of {len(part)} rows are longer than cutoff_len {s['cutoff_len']} "
                        "and were cut")
        if encoder.counts.rewritten:
            events.note(
                f"the chat template changes {encoder.counts.rewritten} earlier answers once later turns follow; "
                "of such rows the last answer counts alone"
            )
        if part and not encoded:
            raise TrainingError("no row is left: " + "; ".join(dropped.lines()))
        if s["packing"] or s["neat_packing"]:
            encoded = encode.pack(encoded, s["cutoff_len"], bool(s["neat_packing"]))
        out.append(encode.Items(encoded) if encoded else None)
    return out


# --- the trainer ---


def _trainer(plan, model, tokenizer, rows, eval_rows):
    lora = None
    if plan.adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, plan.adapter, is_trainable=True)
    else:
        lora = targets.lora_config(model, plan)
    if plan.stage != "sft":
        trainer = preferences.preference_trainer(model, lora, plan, tokenizer, rows, eval_rows)
    else:
        if lora is not None:
            import peft

            model = peft.get_peft_model(model, lora)
        more: dict[str, Any] = {}
        if plan["compute_accuracy"] and eval_rows is not None:
            more = {"compute_metrics": _accuracy,
                    "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
        trainer = GuardedTrainer(
            model, args=arguments(plan), train_dataset=rows, eval_dataset=eval_rows, processing_class=tokenizer,
            data_collator=encode.Batches(tokenizer.pad_token_id or 0), **more,
        )
    if plan["lora_dropout"]:
        targets.add_dropout(trainer.model, float(plan["lora_dropout"]))
    return trainer


def _accuracy(predictions):
    """The share of a row's targets that are predicted, as a mean over rows."""
    found, labels = predictions.predictions[:, :-1], predictions.label_ids[:, 1:]
    counted = labels != encode.IGNORED
    rows = [(found[i][counted[i]] == labels[i][counted[i]]).mean() for i in range(len(labels)) if counted[i].any()]
    return {"accuracy": float(sum(rows) / max(len(rows), 1))}


def _tell_ready(plan, events, trainer, rows, eval_rows):
    parts = targets.trainable_by_part(trainer.model)
    planned = {name: part["trainable"] for name, part in plan.lora.get("parts", {}).items()}
    found = {name: count for name, count in parts.items() if name != "others"}
    if not plan.adapter and planned and planned != found:
        events.note(f"trained parameters are {found}, where the plan had {planned}")
    steps = trainer.args.max_steps
    if steps <= 0:
        per_epoch = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
        steps = math.ceil(per_epoch * trainer.args.num_train_epochs)
    events.send("ready", rows=rows, eval_rows=eval_rows, steps=steps, trainable=sum(parts.values()), parts=parts)


# --- the end ---


def _finish(plan, events, trainer, watcher, metrics):
    output = pathlib.Path(plan.output)
    folder = files.staged(output, "adapter", lambda at: _save(trainer, at))
    files.put_files(folder, output)
    files.write_results(output, "train", {key: value for key, value in metrics.items() if _is_number(value)})
    facts = {"train_loss": metrics.get("train_loss"), **watcher.meter.whole()}
    if trainer.eval_dataset is not None and (plan["do_eval"] or plan["eval_strategy"] != "no"):
        found = trainer.evaluate()
        files.write_results(output, "eval", {key: value for key, value in found.items() if _is_number(value)})
        facts["eval_loss"] = found.get("eval_loss")
    files.write_json(output / "trainer_state.json", _state(trainer.state))
    if plan["plot_loss"]:
        _draw(output, trainer.state.log_history)
    if watcher.skipped:
        events.note(f"{watcher.skipped} steps were left out: a loss or a gradient was not finite")
    events.send("done", output=str(output), step=trainer.state.global_step, **facts)


def _save(trainer, folder):
    trainer.save_model(str(folder))
    shutil.rmtree(folder / "ref", ignore_errors=True)  # TRL's copy of the adapter that training began with


def _is_number(value):
    return isinstance(value, int | float)


def _state(state):
    return json.loads(json.dumps(state.__dict__, default=lambda value: getattr(value, "__dict__", str(value))))


def _draw(output, history):
    for key, name in (("loss", "training_loss"), ("eval_loss", "training_eval_loss"),
                      ("rewards/accuracies", "training_rewards_accuracies")):
        points = [(log["step"], float(log[key])) for log in history if key in log and "step" in log]
        files.draw(output / f"{name}.svg", name.replace("_", " "), points)
