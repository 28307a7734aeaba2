"""Pairs of answers and judged answers: TRL's trainers, with our promises put before them."""

from __future__ import annotations

from typing import Any

from .events import TrainingError
from .plan import Plan
from .rows import Row
from .trainer import Guarded, arguments


def dataset(rows: list[Row], plan: Plan) -> Any:
    """As TRL takes conversations."""
    import datasets

    datasets.disable_progress_bars()
    thinking = plan["enable_thinking"]
    more = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    out = []
    for row in rows:
        item: dict[str, Any] = {"prompt": row.messages, **more}
        if row.tools:
            item["tools"] = row.tools
        if plan.stage == "kto":
            item.update(completion=row.answer, label=row.wanted)
        else:
            item.update(chosen=row.chosen, rejected=row.rejected)
        out.append(item)
    return datasets.Dataset.from_list(out)


def _parts(plan):
    """The trainer, its arguments' class, and what only this loss has."""
    s = plan.settings
    beta = float(s["pref_beta"])
    if plan.stage == "kto":
        from trl import KTOConfig, KTOTrainer

        weights = {"desirable_weight": float(s["kto_chosen_weight"]),
                   "undesirable_weight": float(s["kto_rejected_weight"])}
        return KTOTrainer, KTOConfig, dict(beta=beta, **weights)
    if s["pref_loss"] == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig, {"beta": beta}
    if s["pref_loss"] == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig, {"beta": beta, "loss_type": "simpo", "cpo_alpha": 0.0,
                                       "simpo_gamma": float(s["simpo_gamma"])}
    from trl import DPOConfig, DPOTrainer

    more: dict[str, Any] = {"beta": beta, "label_smoothing": float(s["dpo_label_smoothing"]), "loss_type": ["sigmoid"]}
    if s["pref_ftx"]:
        more.update(loss_type=["sigmoid", "sft"], loss_weights=[1.0, float(s["pref_ftx"])])
    return DPOTrainer, DPOConfig, more


def preference_trainer(model: Any, lora: Any, plan: Plan, tokenizer: Any, rows: Any, eval_rows: Any) -> Any:
    """lora: attached by TRL, whose reference is then the model without it; None for a model with an adapter of its own,
    which is copied for a reference."""
    stock, config, more = _parts(plan)
    kind = type(f"Guarded{stock.__name__}", (Guarded, stock), {})
    args = arguments(plan, config, max_length=plan["cutoff_len"], router_aux_loss_coef=0.0, **more)
    try:
        return kind(
            model, args=args, train_dataset=rows, eval_dataset=eval_rows, processing_class=tokenizer, peft_config=lora
        )
    except ValueError as error:
        raise TrainingError(f"TRL refuses: {' '.join(str(error).split())[:300]}") from error
