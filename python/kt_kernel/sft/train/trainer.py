"""transformers' trainer with three promises more: checkpoints are whole, steps that are not finite are not taken, and
somebody is told. The same for TRL's trainers."""

from __future__ import annotations

import dataclasses
import datetime
import math
import pathlib
import time
from typing import Any

import torch
import transformers

from . import files, targets
from .events import Events, TrainingError
from .plan import Plan
from .watch import Meter, resident_bytes


class Stop:
    """Set by a signal: training ends after the step that runs, and a checkpoint is written."""

    def __init__(self) -> None:
        self.asked = False


class Guarded:
    """Before a Trainer among the bases. `watched` is to be set before train()."""

    watched: Watcher

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.watched.meter.add(inputs)
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.watched.check_loss(loss)
        if self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self.watched.check_gradients(model)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the trainer does it, in a folder beside, which gets its name when all of it is on disk."""
        args, state = self.args, self.state  # type: ignore[attr-defined]
        output, name = pathlib.Path(args.output_dir), f"checkpoint-{state.global_step}"
        limit, args.save_total_limit = args.save_total_limit, None  # of those in the other folder

        def write(folder: pathlib.Path) -> None:
            args.output_dir = str(folder)
            super(Guarded, self)._save_checkpoint(model, trial)  # type: ignore[misc]

        try:
            folder = files.staged(output, "run", write)
            files.put_folder(folder / name, output / name)
        finally:
            args.output_dir, args.save_total_limit = str(output), limit
        files.keep_last(output, limit)
        self.watched.saved(output / name)


class Watcher(transformers.TrainerCallback):
    """What a run says and notices."""

    def __init__(self, plan: Plan, events: Events, stop: Stop, model: torch.nn.Module) -> None:
        self.plan, self.events, self.stop = plan, events, stop
        self.meter = Meter()
        self.model = model
        self.log: files.TrainerLog | None = None
        self.step = 0
        self.skipped = 0
        self.last_saved: pathlib.Path | None = None
        self._bad: str | None = None
        self._begin, self._first_step = time.perf_counter(), 0

    # --- what the trainer tells ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meter = Meter()
        self._begin, self._first_step = time.perf_counter(), state.global_step
        self.step = state.global_step
        output = pathlib.Path(args.output_dir)
        self.log = files.TrainerLog(output, state.global_step)
        earlier = [path for _, path in files.checkpoints(output)]
        if earlier and not self.plan.resume:  # overwrite_output_dir: nobody is to go on from them by mistake
            files.remove_checkpoints(earlier)
            self.events.note(f"checkpoints of an earlier run were removed: {', '.join(path.name for path in earlier)}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.step = state.global_step
        if self.stop.asked:
            control.should_save = control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            accuracy = logs.get("eval_accuracy")
            self.events.send("evaluation", step=state.global_step, eval_loss=float(logs["eval_loss"]),
                             eval_accuracy=accuracy)
            self._add(args, state, eval_loss=float(logs["eval_loss"]), eval_accuracy=accuracy)
        if "loss" not in logs:
            return
        facts = {
            "loss": float(logs["loss"]),
            "learning_rate": _number(logs.get("learning_rate")),
            "grad_norm": _number(logs.get("grad_norm")),
            "margin": _number(logs.get("rewards/margins")),
            "accuracy": _number(logs.get("rewards/accuracies")),
            **self.meter.read(),
        }
        self.events.send(
            "step", step=state.global_step, steps=state.max_steps, epoch=_number(logs.get("epoch")),
            left_s=self._left(state), memory_bytes=resident_bytes(), **facts,
        )
        facts["lr"] = facts.pop("learning_rate")
        self._add(args, state, **facts)

    def _left(self, state):
        done = state.global_step - self._first_step
        return (time.perf_counter() - self._begin) / max(done, 1) * (state.max_steps - state.global_step)

    def _add(self, args, state, **facts):
        if self.log is None:
            return
        elapsed = time.perf_counter() - self._begin
        self.log.add(
            current_steps=state.global_step, total_steps=state.max_steps, **facts, epoch=_number(state.epoch),
            percentage=round(100 * state.global_step / max(state.max_steps, 1), 2), elapsed_time=_clock(elapsed),
            remaining_time=_clock(self._left(state)),
        )

    def saved(self, path: pathlib.Path) -> None:
        self.last_saved = path
        self.events.send("saved", path=str(path), step=self.step)

    # --- steps that are not finite ---

    def check_loss(self, loss: torch.Tensor) -> None:
        if not bool(torch.isfinite(loss)):
            self._bad = f"the loss is {float(loss)}"

    def check_gradients(self, model: torch.nn.Module) -> None:
        """Before they are clipped, which would spread what is not finite over all of them."""
        bad, self._bad = self._bad, None
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]
        norms = torch._foreach_norm([p.grad for _, p in trained]) if trained else []
        if norms and not math.isfinite(float(sum(norm.double().cpu() for norm in norms))):
            bad = (bad + "; " if bad else "") + self._first_bad(model, trained, norms)
        if bad is None:
            return
        step = self.step + 1
        if self.plan["on_nan"] == "stop":
            raise TrainingError(
                f"step {step}: {bad}; nothing of it was applied. A smaller learning_rate, or rows that are not what "
                "they seem; on_nan=skip leaves such steps out"
            )
        self.skipped += 1
        self.events.note(f"step {step} is left out: {bad}")
        model.zero_grad(set_to_none=True)

    def _first_bad(self, model, trained, norms):
        for (name, parameter), norm in zip(trained, norms, strict=True):
            if math.isfinite(float(norm)):
                continue
            finite = torch.isfinite(parameter.grad)
            at = tuple(int(i) for i in (~finite).nonzero()[0]) if not bool(finite.all()) else (0,) * parameter.dim()
            value = float(parameter.grad[at])
            return (f"a gradient is {value if not math.isfinite(value) else 'too large'} "
                    f"({targets.where(model, name, at)})")
        return "the gradients are too large"


def _number(value):
    return None if value is None else float(value)


def _steps(value):
    """A number of steps, or a share of all."""
    return int(value) if value >= 1 else value


def _clock(seconds):
    return str(datetime.timedelta(seconds=int(seconds)))


class GuardedTrainer(Guarded, transformers.Trainer):
    pass


def checkpoint_contexts() -> Any:
    """Two contexts that share what experts gave in a block's first run. A function of a module, so that arguments can
    be saved."""
    from kt_kernel.sft.checkpointing import get_activation_checkpoint_context_fn

    return get_activation_checkpoint_context_fn()()


def arguments(plan: Plan, kind: type = transformers.TrainingArguments, **more: Any) -> Any:
    """The recipe's values under transformers' names, and those of `more` that this kind knows."""
    s = plan.settings
    recompute = not s["disable_gradient_checkpointing"] and s["kt_config.kt_activation_policy.gpu"] != "retain"
    evaluates = s["eval_strategy"] if plan.data["eval"] or s["val_size"] else "no"
    values = dict(
        output_dir=plan.output,
        per_device_train_batch_size=plan.rows_of_batch,
        per_device_eval_batch_size=s["per_device_eval_batch_size"] or plan.rows_of_batch,
        gradient_accumulation_steps=s["gradient_accumulation_steps"],
        learning_rate=float(s["learning_rate"]),
        num_train_epochs=float(s["num_train_epochs"]),
        max_steps=s["max_steps"] or -1,
        lr_scheduler_type=s["lr_scheduler_type"],
        warmup_steps=_steps(s["warmup_steps"]) or float(s["warmup_ratio"]),
        max_grad_norm=float(s["max_grad_norm"]),
        weight_decay=float(s["weight_decay"]),
        adam_beta1=float(s["adam_beta1"]),
        adam_beta2=float(s["adam_beta2"]),
        adam_epsilon=float(s["adam_epsilon"]),
        optim=s["optim"],
        seed=s["seed"],
        bf16=plan.bf16,
        use_cpu=plan.on_cpu,
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
                                      if recompute else None,
        logging_steps=_steps(s["logging_steps"] or 1),
        logging_first_step=s["logging_first_step"],
        save_strategy=s["save_strategy"],
        save_steps=_steps(s["save_steps"] or 1),
        save_total_limit=s["save_total_limit"],
        save_only_model=s["save_only_model"],
        eval_strategy=evaluates,
        eval_steps=_steps(s["eval_steps"] or s["logging_steps"] or 1),
        report_to=s["report_to"] or ["none"],
        run_name=s["run_name"],
        dataloader_num_workers=s["dataloader_num_workers"],
        dataloader_pin_memory=not plan.on_cpu,
        remove_unused_columns=False,
        disable_tqdm=True,
        **more,
    )
    known = {field.name for field in dataclasses.fields(kind)}
    if "activation_checkpointing" in known:  # its newer name
        for end in ("", "_kwargs"):
            values[f"activation_checkpointing{end}"] = values.pop(f"gradient_checkpointing{end}")
    try:
        return kind(**{key: value for key, value in values.items() if key in known})
    except (ValueError, ImportError) as error:
        raise TrainingError("transformers refuses the recipe's values: "
                            f"{' '.join(str(error).split())[:300]}") from error
