"""Experts on KT that take part in training: gradients go through them, to hidden states, routing weights and LoRA
factors.

The weights are frozen and stay where they are, in any format. LoRA belongs to PEFT, which finds two placeholders
here.
"""

from __future__ import annotations

import atexit
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kt_kernel.transformers.experts import KTExperts, Options, Shape

from . import activations, checkpointing
from .calls import Inputs, LayerCalls, Wanted, inputs
from .lora import Cache, Lora, checked, pack
from .placeholders import Placeholder

_NAMES = ("gate_up_proj", "down_proj")


class TrainableExperts(KTExperts):
    """KTExperts with gradients, and with placeholders `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]."""

    is_transposed = False  # PEFT asks which side of a weight is its output

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._calls: LayerCalls | None = None
        self._packed = Cache()

    def add_placeholders(self) -> None:
        """Once weights are loaded: before, a loader would look for them in the checkpoint."""
        s = self.shape
        self.gate_up_proj = Placeholder((s.experts, 2 * s.inter, s.hidden))
        self.down_proj = Placeholder((s.experts, s.hidden, s.inter))

    # --- what models do to their parameters ---

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TrainableExperts:
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        unexpected_keys += [prefix + name for name in _NAMES if prefix + name in state_dict]

    def place(self, mask: torch.Tensor, device: torch.device | str) -> NoReturn:
        raise ValueError(
            "experts on the device (gpu_experts, update_placement) do not train: keep all of them on the CPU"
        )

    # --- forward and backward ---

    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As KTExperts.forward, differentiable, with the factors of the adapter that PEFT has switched on."""
        if self.wrapper is None:
            raise RuntimeError(self.unusable or f"layer {self.shape.layer}: its experts have no weights yet")
        lora = self._lora()
        tensors = (hidden_states, top_k_weights, *lora.tensors())
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return self._differentiable(hidden_states, top_k_index, top_k_weights, lora)
        if lora == (None, None):
            return self._forward(hidden_states, top_k_index, top_k_weights)
        given = self._inputs(hidden_states, top_k_index, top_k_weights)
        with self._turns:
            packed = pack(lora.tensors(), lora.scales(), self._packed)
            output, _ = self._calls_of_layer().forward(given, packed, keep=False)
        return output.to(hidden_states.device)

    def _lora(self):
        """The factors of the active adapter. Reading a placeholder while PEFT has parametrised it asks PEFT for
        them."""
        s = self.shape
        sides = []
        for name, rows, columns in (("gate_up_proj", 2 * s.inter, s.hidden), ("down_proj", s.hidden, s.inter)):
            added = getattr(self, name).factors
            if len(added) > 1:
                raise ValueError(
                    f"layer {s.layer}: {len(added)} adapters are active on {name}; experts on KT take one at a time"
                )
            sides.append(checked(f"{name} of layer {s.layer}", added[0], s.experts, rows, columns) if added else None)
        return Lora(*sides)

    def _inputs(self, hidden, ids, weights, count=True):
        given = inputs(hidden, ids, weights)
        if self.recorder is not None and count:
            self.recorder.add(self.shape.layer, given.ids)
        return given

    def _calls_of_layer(self):
        if self._calls is None or self._calls.wrapper is not self.wrapper:
            self._calls = LayerCalls(self.wrapper)
        return self._calls

    def _differentiable(self, hidden, ids, weights, lora):
        run = checkpointing.current_run()
        kept = key = None
        if run is not None:
            key = run.next_key(self)
            kept = run.record.get(key) if run.again else None
        if kept is None and checkpointing.in_backward():
            checkpointing.tell_of_second_run()
        tensors = lora.tensors()
        self._packed.drop(tensors)
        call = _Call(self, lora.scales(), kept)
        output: torch.Tensor = _Experts.apply(call, hidden, ids, weights, *tensors)
        on_cpu, call.output = call.output, None
        if run is not None and key is not None and not run.again:
            # The CPU's copy: one of a GPU would take memory that checkpointing is there to save.
            run.record.put(key, output if on_cpu is None else on_cpu)
        return output


@dataclasses.dataclass(eq=False)
class _Call:
    """What a forward and its backward have in common, but for tensors with gradients."""

    module: Any  # TrainableExperts
    scales: tuple[float, float]
    kept: torch.Tensor | None  # the output, where this is the second run of a checkpointed block
    output: torch.Tensor | None = None  # on the CPU
    saved: list[Any] | None = None

    def __post_init__(self) -> None:
        _calls.add(self)

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, tensors: Any, keep: bool
    ) -> torch.Tensor:
        if self.kept is not None:
            return self.kept.clone() if hidden.is_cpu else self.kept.to(hidden.device)
        module = self.module
        given = module._inputs(hidden, ids, weights, count=not checkpointing.in_backward())
        with module._turns:
            calls, o = module._calls_of_layer(), module.options
            keep = keep and activations.keeps(o.cpu_activation, calls.saved_bytes(given, o.activations))
            output, self.saved = calls.forward(given, pack(tensors, self.scales), keep)
        if hidden.is_cpu:
            return output
        self.output = output
        return output.to(hidden.device)

    def backward(self, given: Inputs, tensors: Any, output_grad: torch.Tensor, wanted: Wanted) -> Any:
        module = self.module
        saved, self.saved = self.saved, None  # memory back now; a second backward computes it again
        with module._turns:
            packed = pack(tensors, self.scales)
            return module._calls_of_layer().backward(saved, given, packed, output_grad, wanted)


_calls: weakref.WeakSet[_Call] = weakref.WeakSet()


@atexit.register
def _let_go() -> None:
    """Graphs that somebody still has when the interpreter ends are never taken apart by torch: what they hold of the
    extension is given back before."""
    for call in list(_calls):
        call.module = call.saved = None


class _Experts(torch.autograd.Function):
    """Factors come as views of what PEFT owns and are packed in each direction: copies would be held from one to
    the other."""

    @staticmethod
    def forward(ctx, call, hidden, ids, weights, *tensors):
        ctx.call = call
        ctx.save_for_backward(hidden, ids, weights, *tensors)
        # In the second run of a checkpointed block this is the same graph's: its backward belongs to the first.
        output = call.forward(hidden, ids, weights, tensors, keep=any(ctx.needs_input_grad))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, output_grad):
        hidden, ids, weights, *tensors = ctx.saved_tensors
        _, x, _, w, a1, b1, a2, b2 = ctx.needs_input_grad
        given = inputs(hidden, ids, weights)
        grads = ctx.call.backward(given, tensors, output_grad, Wanted(x, w, a1, b1, a2, b2))
        out = [grads.hidden, None, grads.weights, *grads.lora]
        for at, source in enumerate((hidden, None, weights, *tensors)):
            if out[at] is not None and not ctx.needs_input_grad[at + 1]:
                out[at] = None
            if out[at] is not None:
                out[at] = out[at].to(dtype=source.dtype).to(source.device)
        return None, *out
