"""A model of a path by placement rules: what they replace is never in torch."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from typing import Any

from kt_kernel.injection import Injection

from .experts import Options
from .modules import ignore_keys


def load(folder: str, rules: Any, operators: Any, weights: Any, devices: Any, options: dict[str, Any],
         from_pretrained: dict[str, Any]) -> Any:
    """The model, with its Placement as `kt_placement`."""
    import transformers

    from .enable import _refuse_missing, _take_quantization
    from .quantizer import KTQuantizationConfig

    config = from_pretrained.pop("config", None)
    if config is None:
        trust = {key: from_pretrained[key] for key in ("trust_remote_code",) if key in from_pretrained}
        config = transformers.AutoConfig.from_pretrained(folder, **trust)
    config = copy.deepcopy(config)
    inner = _take_quantization(config)
    if inner is not None:
        raise NotImplementedError(f"{folder}: quantised as {inner.get('quant_method')}: rules need a checkpoint of "
                                  "floats here so far; weights= may be of any kind")
    path = os.fspath(weights) if weights is not None else folder
    found: list[tuple[Injection, list[Any]]] = []

    def swap(model: Any) -> None:  # before a weight is read
        injection = Injection(model, rules, operators, path, devices, **options)
        injection.decide()
        ignored: list[str] = []
        hidden: list[Any] = []
        for node in injection.nodes:
            if node.becomes and not _is_tied(model, node):
                hidden.extend(_hidden(node))
                ignored.append(r"\.experts\." if node.is_experts else "^" + re.escape(node.name) + r"\.")
        ignore_keys(model, ignored)
        found.append((injection, hidden))

    model: Any
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, quantization_config=KTQuantizationConfig(Options(method="BF16"), None, None, swap),
        output_loading_info=True, **from_pretrained,
    )
    _refuse_missing(folder, info)
    (injection, hidden), = found
    for kept, key, tensor in hidden:
        kept[key] = tensor
    injection.make()
    placement = injection.finish()
    placement._keep_none(model, "the model was loaded from a path, and what is replaced was never in torch")
    return model.eval()


def _is_tied(model, node):
    """Its numbers are there anyway, as others'."""
    config = model.config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False)) and (
        node.module is model.get_output_embeddings() or node.module is model.get_input_embeddings())


def _hidden(node: Any) -> Iterator[tuple[Any, str, Any]]:
    """Takes a module's own tensors away, for as long as others are read: (where, name, the tensor without numbers)."""
    module = node.module
    module._is_hf_initialized = True  # transformers would draw numbers for it
    for kept in (module._parameters, module._buffers):
        for key, tensor in list(kept.items()):
            if tensor is not None and key not in module._non_persistent_buffers_set:
                kept[key] = None
                yield kept, key, tensor
