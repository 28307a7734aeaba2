"""inject(): placement rules on a model of transformers.

The tree of torch goes to the reader and the matcher of `kt`, which say what each module becomes; here that is built.
Everything is checked, made and loaded before the first module of the model is replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kt_kernel import kt_kernel_ext

from . import operators as own_operators
from .device_moves import Moves
from .linear import KTLinear
from .module_nodes import Node, nodes_of
from .operators import BaseInjectedModule, load_own
from .placement import Placement
from .tensor_sources import CheckpointTensors, ModelTensors

PathLike = str | os.PathLike[str]


def inject(
    model: torch.nn.Module,
    rules: PathLike | Sequence[str],
    operators: Iterable[type] = (),
    weights: PathLike | None = None,
    devices: Mapping[str, str] | str | None = None,
    *,
    threads: int | None = None,
    max_tokens: int = 4096,
    activations: str = "default",
) -> Placement:
    """Puts what `rules` say into a model of transformers, in place, and says what that is.

    rules: a YAML file, or a list of lines "REGEX=DEVICE[:FORMAT]". operators: classes that rules may name, beside those
    of @kt_kernel.operator and of modules that are imported already. weights: a checkpoint of any kind that KT reads,
    for operators, formats as stored and modules that are still on the meta device; None: the model's own tensors.
    devices: what rules mean by a device, {"cuda": "cpu"} or "cuda=cpu". threads, max_tokens, activations: as of
    enable().

    After an error the model is what it was. Other threads may run the model meanwhile: they see a module or what takes
    its place, both whole.
    """
    injection = Injection(model, rules, operators, weights, devices, threads=threads, max_tokens=max_tokens,
                          activations=activations)
    injection.decide()
    injection.make()
    return injection.finish()


def rules_of(rules: Any, devices: Any) -> Any:
    """kt_kernel_ext.Rules of what a caller gives."""
    if isinstance(devices, Mapping):
        devices = ",".join(f"{old}={new}" for old, new in devices.items())
    if isinstance(rules, (str, os.PathLike)):
        return kt_kernel_ext.Rules(os.fspath(rules), [], devices or "")
    return kt_kernel_ext.Rules("", list(rules), devices or "")


class Injection:
    """One inject(), step by step: decide() reads and checks, make() builds and loads, finish() puts in."""

    def __init__(self, model: Any, rules: Any, operators: Iterable[type], weights: PathLike | None, devices: Any, *,
                 threads: int | None = None, max_tokens: int = 4096, activations: str = "default") -> None:
        _check_model(model)
        self.model, self.weights = model, None if weights is None else os.fspath(weights)
        self.options: dict[str, Any] = dict(threads=threads or 0, max_tokens=max_tokens, activations=activations)
        self.rules = rules_of(rules, devices)
        self.classes = self._resolve(own_operators.named(operators))
        self.nodes: list[Node] = []
        self.fresh: list[tuple[Node, torch.nn.Module]] = []
        self._snapshots: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._source: Any = None

    # --- what is where ---

    def _resolve(self, given: dict[str, type]) -> dict[int, type]:
        """Of each rule whose operator is the caller's."""
        found = {}
        for index, (dotted, known) in enumerate(self.rules.operators()):
            cls = own_operators.find(dotted, given, known)
            if cls is not None:
                found[index] = cls
        self.rules.set_own(list(found))
        return found

    def decide(self) -> None:
        """Which rule takes which module. Errors are those of `kt`, in one line."""
        root, self.nodes = nodes_of(self.model)
        family = getattr(getattr(root, "config", None), "model_type", None) or type(root).__name__
        request = dict(family=family, modules=[node.request for node in self.nodes], weights=self.weights or "",
                       on_gpu=_is_on_gpu(self.model))
        try:
            answer = json.loads(self.rules.place(json.dumps(request)))
        except ValueError as error:
            if "no operator " not in str(error):
                raise
            raise ValueError(f"{error}; a class of yours has to be registered (kt_kernel.operator, "
                             "operators=[...]) or its module imported: a file causes no import") from None
        self.plan, self.text = answer["plan"], answer["text"]
        for node, decision in zip(self.nodes, answer["modules"]):
            node.decision = decision
            node.becomes = self._kind_of(node)
        self._check_shared()
        for node in self.nodes:
            self._check(node)

    def _kind_of(self, node: Node) -> str:
        """"own", "experts", "linear", or "" where the module stays."""
        rule = node.decision["rule"]
        if rule in self.classes:
            return "own" if node.name else ""  # the whole model is never replaced
        if node.is_experts:
            asks = (rule >= 0 and node.decision["what"] == "experts"
                    and node.decision["op"] not in ("None", "KExpertsTorch"))
            return "experts" if asks or any(node.decision["formats"]) else ""
        if node.is_linear:
            stored = rule >= 0 and node.decision["what"] == "linears" and node.decision["op"] == "KLinearCPUInfer"
            return "linear" if any(node.decision["formats"]) or (stored and not node.name.endswith("kv_b_proj")) else ""
        return ""

    def _check_shared(self) -> None:
        first: dict[int, Node] = {}
        for node in self.nodes:
            other = first.setdefault(id(node.module), node)
            if (other.becomes, other.decision["formats"]) != (node.becomes, node.decision["formats"]) or (
                    node.becomes == "own" and other.decision["rule"] != node.decision["rule"]):
                raise ValueError(f"{self._where(node)}: {node.name} and {other.name} are one module, and rules make "
                                 "two things of it")

    def _where(self, node: Node) -> str:
        rule = node.decision["rule"] if node.decision["rule"] >= 0 else node.decision["decided"]
        return self.rules.where(rule) if rule >= 0 else "rules"

    def _check(self, node: Node) -> None:
        device = node.decision["device"]
        if device.startswith("cuda") and node.decision["rule"] >= 0 and not torch.cuda.is_available():
            raise ValueError(f'{self._where(node)}: {node.name}: on {device}, and torch finds no GPU; '
                             f'devices={{"cuda": "cpu"}} '
                             "puts it on the CPU, and so does another rule")
        if not node.becomes or node.becomes == "own":
            return
        if device.startswith("cuda"):
            what = ("experts live" if node.becomes == "experts"
                    else f"linears in {node.decision['formats'][0] or 'stored formats'} run")
            raise NotImplementedError(f'{self._where(node)}: {node.name}: on {device}: {what} on the CPU alone so far '
                                      'from Python; devices={"cuda": "cpu"} puts them there, format: stored leaves a '
                                      'linear to torch')
        if self.weights is None:
            for tensor in node.tensors():
                if tensor.device.type == "meta":
                    raise ValueError(f"{self._where(node)}: {node.name}: on the meta device; weights= names a "
                                     "checkpoint to read")
                if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                    raise ValueError(f"{self._where(node)}: {node.name}: its weight is "
                                     f"{str(tensor.dtype).removeprefix('torch.')}: quantised by others; weights= names "
                                     "a checkpoint to read")

    # --- what takes its place ---

    @property
    def source(self) -> Any:
        """What operators know as gguf_loader."""
        if self._source is None:
            if self.weights is not None:
                self._source = CheckpointTensors(self.weights,
                                                 getattr(getattr(self.model, "config", None), "dtype", None))
            else:
                self._source = ModelTensors({f"{node.name}.{key}" if node.name else key: tensor for node in self.nodes
                                             for key, tensor in node.own_tensors()})
        return self._source

    def make(self) -> None:
        """Builds and loads all. After an error nothing is left of it."""
        try:
            self.construct()
            self.load()
        except BaseException:
            self.undo()
            raise

    def construct(self) -> None:
        made: dict[int, torch.nn.Module] = {}
        for node in self.nodes:
            if not node.becomes:
                continue
            if id(node.module) not in made:
                make = {"own": self._make_own, "experts": self._make_experts, "linear": self._make_linear}[node.becomes]
                made[id(node.module)] = make(node)
            self.fresh.append((node, made[id(node.module)]))

    def _make_own(self, node: Node) -> torch.nn.Module:
        rule, cls = node.decision["rule"], self.classes[node.decision["rule"]]
        kwargs = json.loads(self.rules.kwargs(rule))
        self._snapshots.append((node.module, _snapshot(node.module)))
        try:
            new = cls(key=node.name, gguf_loader=self.source, config=getattr(self.model, "config", None),
                      orig_module=node.module, **kwargs)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise TypeError(f"{self.rules.where(rule)}: {node.name}: {error}") from error
        if isinstance(new, BaseInjectedModule):
            device = node.decision["device"].replace("host", "cpu") or _device_of(node.module)
            new.__dict__.update(generate_device=device, device=device)
        return new

    def _make_experts(self, node: Node) -> torch.nn.Module:
        from .transformers import modules
        from .transformers.experts import Options
        from .transformers.formats import stored_method

        formats = set(node.decision["formats"])
        if len(formats) > 1:
            raise NotImplementedError(f"{self._where(node)}: {node.name}: gate, up and down in "
                                      f"{node.decision['formats']}: experts have one format from Python")
        wanted, = formats
        more: dict[str, Any]
        if wanted is None:
            method, more = (stored_method(self.weights) if self.weights else "BF16"), {}
        else:
            method, more = method_of_format(wanted, f"{self._where(node)}: {node.name}")
        return modules.make(modules.shape_of(self.model, node.name, node.module),
                            Options(method=method, **more, **self.options))

    def _make_linear(self, node: Node) -> torch.nn.Module:
        linear = node.module
        dtype = linear.weight.dtype if linear.weight.dtype.is_floating_point else None
        return KTLinear(linear.in_features, linear.out_features, linear.bias is not None,
                        format=node.decision["formats"][0] or "stored",
                        name=node.name, dtype=dtype, activations=self.options["activations"],
                        threads=self.options["threads"])

    def load(self) -> None:
        """As it always was: the head, then depth first. Stock modules that have no numbers yet are read too, where
        weights are given."""
        done: set[int] = set()
        for node, new in sorted(self.fresh, key=lambda each: each[0].name != "lm_head"):
            if id(new) in done:
                continue
            done.add(id(new))
            try:
                self._load_one(node, new)
            except ValueError as error:
                raise ValueError(f"{self._where(node)}: {node.name}: {error}") from error
        if self.weights is not None:
            for node in self.nodes:
                if not node.becomes:
                    self._snapshots.append((node.module, _snapshot(node.module)))
                    load_own(node.module, node.name, self.source,
                             node.decision["device"].replace("host", "cpu") or "cpu")

    def _load_one(self, node: Node, new: Any) -> None:
        if node.becomes == "own":
            if hasattr(new, "load"):
                new.load()
        elif node.becomes == "linear":
            if self.weights is not None:
                new.load_from(self.source, node.name)
            else:
                new.load(node.module.weight, node.module.bias)
        elif self.weights is not None:
            from .transformers.enable import _Source

            source = _Source(self.weights, new.options.method)
            new.options = source.options(dict(self.options, group_size=new.options.group_size))
            source.load(new)
        else:
            from .transformers.enable import _values_of

            new.load(_values_of(node.module, new.shape))

    def undo(self) -> None:
        for node, new in self.fresh:
            if node.becomes == "own":
                _unload(new)
        for module, before in reversed(self._snapshots):
            _restore(module, before)
        self.fresh, self._snapshots = [], []

    # --- putting in ---

    def finish(self) -> Placement:
        swaps = []
        for node, new in self.fresh:
            node.parent._modules[node.key] = new
            swaps.append((node.parent, node.key, node.module, new))
        moves = Moves(self.model,
                      {node.path: node.decision["device"] for node in self.nodes if node.decision["device"]})
        moves.apply()
        modules = {node.name: _described(node, self.rules) for node in self.nodes if node.decision["rule"] >= 0}
        notes = list(self.plan["notes"])
        if any(node.becomes == "experts" and self.weights is None
               and any(t.dtype != torch.bfloat16 for t in node.tensors())
               and not any(node.decision["formats"]) for node in self.nodes):
            notes.append("experts of a loaded model that are not bf16 are held as bf16")
        placement = Placement(dict(self.plan, notes=notes), modules, self.text)
        placement._attach(self.model, _Undo(swaps, self._snapshots, moves))
        self.model.__dict__["kt_placement"] = placement
        if any(node.becomes in ("experts", "linear") for node in self.nodes):
            from .transformers.enable import _forbid_saving

            _forbid_saving(self.model, _refuse_to_save)
        return placement


class _Undo:
    """What brings a model back."""

    def __init__(self, swaps: Any, snapshots: Any, moves: Moves) -> None:
        self.swaps, self.snapshots, self.moves = swaps, snapshots, moves

    def run(self, model: torch.nn.Module) -> None:
        self.moves.undo()
        for parent, key, old, new in reversed(self.swaps):
            parent._modules[key] = old
            if not isinstance(new, KTLinear):
                _unload(new)
        for module, before in reversed(self.snapshots):
            _restore(module, before)
        for name in ("save_pretrained", "push_to_hub", "kt_placement"):
            model.__dict__.pop(name, None)


def _refuse_to_save(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("save_pretrained: modules of this model are on KT and not in torch; remove() the placement first, "
                     "or save the original")


def _unload(module: Any) -> None:
    """Best effort: an operator that cannot let go must not keep the model from coming back."""
    try:
        if isinstance(module, BaseInjectedModule) or hasattr(module, "unload"):
            module.unload()
    except Exception as error:
        import logging

        logging.getLogger("kt_kernel").warning("%s: unload failed: %s", type(module).__name__, error)


_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _snapshot(module: torch.nn.Module) -> dict[str, Any]:
    """A module's attributes; of its tables of tensors and children what is in them."""
    return {key: (value, value.copy() if key in _TABLES else None) for key, value in module.__dict__.items()}


def _restore(module: torch.nn.Module, before: dict[str, Any]) -> None:
    own = module.__dict__
    for key in set(own) - set(before):
        del own[key]
    for key, (value, content) in before.items():
        own[key] = value
        if key in _TABLES:
            value.clear()
            value.update(content)


_METHODS = {"int8": "AMXINT8", "int4": "AMXINT4", "bf16": "BF16", "fp8": "FP8", "fp8_row": "FP8_PERCHANNEL",
            "mxfp4": "MXFP4",
            "mxfp8": "MXFP8"}


def method_of_format(format: str, where: str) -> tuple[str, dict[str, Any]]:
    """The method of experts that holds a format, and its options."""
    if format in _METHODS:
        return _METHODS[format], {}
    if format.startswith("int4_g") and format[6:].isdigit():
        return "RAWINT4", dict(group_size=int(format[6:]))
    known = ", ".join(_METHODS)
    raise NotImplementedError(f"{where}: experts in {format} are not there from Python; there are {known} and int4_g32 "
                              "to int4_g256")


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if "_orig_mod" in model._modules:
        raise ValueError("the model is compiled: apply rules to the model itself, then torch.compile it")
    if "kt_placement" in model.__dict__:
        raise ValueError("the model has a placement already; placement.remove() brings it back first")


def _is_on_gpu(model: torch.nn.Module) -> bool:
    first = next(model.parameters(), None)
    return first is not None and first.is_cuda


def _device_of(module: torch.nn.Module) -> str:
    for tensor in module.parameters():
        if tensor.device.type != "meta":
            return str(tensor.device)
    return "cpu"


def _described(node: Node, rules: Any) -> dict[str, Any]:
    decision = node.decision
    formats = [rounded or stored for rounded, stored in zip(decision["formats"], decision["stored"] or [None] * 3)]
    return dict(rule=decision["rule"] + 1, where=rules.where(decision["rule"]), operator=decision["operator"],
                device=decision["device"] or "cpu", formats=[each for each in formats if each],
                becomes={"own": decision["operator"], "experts": "KTExperts",
                         "linear": "KTLinear"}.get(node.becomes, "default"))
