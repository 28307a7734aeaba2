"""Which modules get LoRA: the words of lora_target on the model that transformers made, as PEFT wants them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from .events import TrainingError

_SAME = {
    "block_sparse_moe": "mlp", "feed_forward": "mlp", "shared_expert": "shared_experts", "shared_mlp": "shared_experts",
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
}
_LAYER = re.compile(r"^(.*\blayers\.\d+)\.(.+)$")
PARTS = ("attention", "routed experts", "shared expert", "dense MLP")


class Matrix:
    """One that may have LoRA. `name` is a module's, or of fused experts and MLPs a parameter's."""

    def __init__(self, name: str, part: str, other: tuple[str, ...] = ()) -> None:
        self.name, self.part, self.other = name, part, other

    @property
    def short(self) -> str:
        """Behind the layer's number."""
        return _LAYER.match(self.name)[2]  # type: ignore[index]

    def is_named(self, word: str) -> bool:
        if word == "all" or (word == "all_attention" and self.part == "attention"):
            return True
        wanted = _components(word)
        return any(_contains(_components(name), wanted) for name in (self.name, *self.other))


def _components(name):
    return [_SAME.get(part, part) for part in name.removesuffix(".weight").split(".")]


def _contains(whole, part):
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def matrices(model: torch.nn.Module) -> list[Matrix]:
    out = []
    for name, module in model.named_modules():
        if not _LAYER.match(name):
            continue
        inner = _LAYER.match(name)[2]  # type: ignore[index]
        fused = [p for p in ("gate_up_proj", "down_proj") if p in module._parameters
                 and module._parameters[p].dim() == 3]
        for parameter in fused:
            other = (f"{name}.gate_proj", f"{name}.up_proj") if parameter == "gate_up_proj" else ()
            out.append(Matrix(f"{name}.{parameter}", "routed experts", other))
        if not isinstance(module, torch.nn.Linear):
            continue
        leaf = inner.rsplit(".", 1)[-1]
        shared = "shared_experts" in _components(inner)
        if _SAME.get(leaf, leaf) in ("gate_proj", "up_proj", "down_proj", "gate_up_proj"):
            out.append(Matrix(f"{name}.weight", "shared expert" if shared else "dense MLP"))
        elif not (module.out_features == 1 or leaf in ("gate", "router") or "mlp" in _components(inner)):
            out.append(Matrix(name, "attention"))
    return out


def lora_config(model: torch.nn.Module, plan: Any) -> Any:
    """A LoraConfig. Attention goes by modules; routed experts, shared experts and dense MLPs by parameters, because
    PEFT takes modules called gate_proj, up_proj and down_proj for routed experts."""
    import peft

    every = matrices(model)
    words = plan.lora["targets"]
    chosen = [m for m in every if any(m.is_named(word) for word in words)]
    if not chosen:
        raise TrainingError(f"lora_target: no module of {type(model).__name__} is called {', '.join(words)}")
    settings = plan.settings
    return peft.LoraConfig(
        r=plan.lora["rank"],
        lora_alpha=plan.lora["alpha"],
        use_rslora=settings["use_rslora"],
        target_modules=_short_names(every, [m for m in chosen if m.part == "attention"]),
        target_parameters=_short_names(every, [m for m in chosen if m.part != "attention"]) or None,
        modules_to_save=settings["additional_target"] or None,
        task_type="CAUSAL_LM",
    )


def _short_names(every, chosen):
    """Ends of names that mean the chosen ones and no others; whole names where there are none such."""
    names = {m.name for m in chosen}
    out = set()
    for matrix in chosen:
        parts = matrix.short.split(".")
        # An expert's parameter keeps its module's name, so that people can read it.
        least = 1 if matrix.part == "attention" else min(3, len(parts))
        for length in range(least, len(parts) + 1):
            end = ".".join(parts[-length:])
            if {m.name for m in every if m.name == end or m.name.endswith(f".{end}")} <= names:
                out.add(end)
                break
        else:
            out.add(matrix.name)
    return sorted(out)


def add_dropout(model: torch.nn.Module, share: float) -> None:
    """PEFT refuses dropout beside LoRA on parameters, so it is put into attention's LoRA afterwards."""
    from peft.tuners.lora import Linear

    for module in model.modules():
        if isinstance(module, Linear):
            for name in module.lora_dropout:
                module.lora_dropout[name] = torch.nn.Dropout(share)


def trainable_by_part(model: torch.nn.Module) -> dict[str, int]:
    """Parameters with gradients: of the parts' LoRA, and "others" that are trained whole."""
    out: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            out[_part_of(name)] += parameter.numel()
    return dict(out)


def _part_of(name):
    if ".lora_" not in name:
        return "others"
    inner = _components(name.split(".lora_")[0])
    if "experts" in inner:
        return "routed experts"
    if "shared_experts" in inner:
        return "shared expert"
    return "dense MLP" if "mlp" in inner else "attention"


def where(model: torch.nn.Module, name: str, index: tuple[int, ...]) -> str:
    """A value of a parameter for people: "layer 3, experts' gate_up_proj, B, expert 5"."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    out = [f"layer {layer[1]}"] if layer else []
    factor = re.search(r"\.lora_([AB])\b", name)
    if not factor:
        return ", ".join([*out, name])
    inner = name.split(".lora_")[0]
    wrapper = model.get_submodule(inner)
    experts = getattr(wrapper, "num_experts", 1)
    tail = inner.split(".layers.")[-1].split(".", 1)[-1].replace(".base_layer", "")
    if experts == 1:
        return ", ".join([*out, tail, factor[1]])
    # Rows of A are rank after rank of an expert, columns of B expert after expert of a rank.
    rank = wrapper.lora_A[next(iter(wrapper.lora_A))].weight.shape[0] // experts
    expert = index[0] // rank if factor[1] == "A" else index[1] % experts
    return ", ".join([*out, f"experts' {wrapper.parameter_name}", factor[1], f"expert {expert}"])
