"""AMXSFTMoEWrapper: one layer's experts for training, as engines that own LoRA themselves ask for them.

KTMoEWrapper(mode="sft") makes one too. No arithmetic here.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections import deque
from typing import Any

import torch

from kt_kernel import _checks, kt_kernel_ext
from kt_kernel.moe_wrapper import KTMoEWrapper

from .activations import training_activations
from .calls import Gradients, Inputs, LayerCalls, Wanted, inputs
from .lora import Packed

_METHODS = {"AMXBF16": "BF16", "AMXFP8": "FP8", "AMXINT4_KGROUP": "RAWINT4"}
_NAMES = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")


@functools.cache
def _worker():
    """Runs what was submitted, in order, beside the caller."""
    return concurrent.futures.ThreadPoolExecutor(1, "kt-sft")


def _method(name):
    """(method of KTMoEWrapper, whether LoRA is left out) of a name such as AMXINT8_SFT or AMXBF16_SFT_SkipLoRA."""
    base = _checks.text("method", name).upper()
    skips = base.endswith("_SKIPLORA")
    base = base.removesuffix("_SKIPLORA").removesuffix("_SFT")
    return kt_kernel_ext.method_named(_METHODS.get(base, base)), skips


class AMXSFTMoEWrapper:
    """Frozen experts of one layer, in any format, with LoRA whose weights and gradients are the caller's tensors.

    forward(..., save_for_backward=True) is remembered; backward() is of the last one that is, at most
    max_cache_depth of them: older ones are forgotten. backward() adds to the LoRA gradients. Tensors may be on the
    CPU or a GPU; LoRA may be f32 or bf16, and is computed with in f32.
    """

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        num_gpu_experts: int = 0,
        cpuinfer_threads: int = 0,
        threadpool_count: int = 0,
        weight_path: Any = None,
        chunked_prefill_size: int | None = 512,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        method: str = "AMXBF16_SFT",
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        *,
        activations: str = "default",
        **more: Any,
    ) -> None:
        """more: other arguments of KTMoEWrapper."""
        plain, self._skips_lora = _method(method)
        self.lora_rank = _checks.whole("lora_rank", lora_rank, 0 if self._skips_lora else 1)
        self.lora_alpha = float(lora_alpha)
        if lora_dropout:
            raise ValueError(f"lora_dropout is {lora_dropout}: LoRA of experts has no dropout; expected 0")
        if full_weight_grad:
            raise ValueError("full_weight_grad: full fine-tuning of experts is not supported, LoRA is")
        self.max_cache_depth = _checks.whole("max_cache_depth", max_cache_depth, 1)
        self._wrapper = KTMoEWrapper(
            layer_idx,
            num_experts,
            num_experts_per_tok,
            hidden_size,
            moe_intermediate_size,
            num_gpu_experts=num_gpu_experts,
            cpuinfer_threads=cpuinfer_threads,
            threadpool_count=threadpool_count,
            weight_path=weight_path,
            chunked_prefill_size=chunked_prefill_size,
            method=plain,
            group_size=group_size,
            zero_point=zero_point,
            activations=training_activations(activations),
            **more,
        )
        self.method = method
        self._calls = LayerCalls(self._wrapper)
        self._loaded = False
        self._lora: tuple[torch.Tensor, ...] | None = None  # the caller's
        self._gradients: tuple[torch.Tensor, ...] | None = None
        self._packed: Packed | None = None
        self._cache: deque[tuple[list[Any] | None, Inputs, Packed | None, torch.device]] = deque(
            maxlen=self.max_cache_depth
        )
        self._forward: Any = None  # futures
        self._backward: Any = None

    def __getattr__(self, name: str) -> Any:
        """Sizes and paths are KTMoEWrapper's."""
        if name in (
            "layer_idx",
            "num_experts",
            "num_experts_per_tok",
            "hidden_size",
            "moe_intermediate_size",
            "num_gpu_experts",
            "weight_path",
            "chunked_prefill_size",
            "cpu_infer",
            "gpu_experts_mask",
        ):
            return getattr(self._wrapper, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- weights

    def load_weights(self, physical_to_logical_map: Any = None, *, physical_to_logical_map_cpu: Any = None) -> None:
        """As KTMoEWrapper.load_weights."""
        self._wrapper.load_weights(physical_to_logical_map, physical_to_logical_map_cpu=physical_to_logical_map_cpu)
        self._loaded = True

    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map: Any = None,
        *,
        physical_to_logical_map_cpu: Any = None,
    ) -> None:
        """As KTMoEWrapper.load_weights_from_tensors."""
        self._wrapper.load_weights_from_tensors(
            gate_proj,
            up_proj,
            down_proj,
            physical_to_logical_map,
            physical_to_logical_map_cpu=physical_to_logical_map_cpu,
        )
        self._loaded = True

    # -- LoRA

    def init_lora_weights(
        self,
        gate_lora_a: torch.Tensor,
        gate_lora_b: torch.Tensor,
        up_lora_a: torch.Tensor,
        up_lora_b: torch.Tensor,
        down_lora_a: torch.Tensor,
        down_lora_b: torch.Tensor,
        grad_gate_lora_a: torch.Tensor,
        grad_gate_lora_b: torch.Tensor,
        grad_up_lora_a: torch.Tensor,
        grad_up_lora_b: torch.Tensor,
        grad_down_lora_a: torch.Tensor,
        grad_down_lora_b: torch.Tensor,
    ) -> None:
        """A [E, rank, in], B [E, out, rank], and tensors of the same shapes that backward() adds gradients to."""
        lora = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        gradients = (
            grad_gate_lora_a,
            grad_gate_lora_b,
            grad_up_lora_a,
            grad_up_lora_b,
            grad_down_lora_a,
            grad_down_lora_b,
        )
        experts, rank, hidden, inter = self.num_experts, self.lora_rank, self.hidden_size, self.moe_intermediate_size
        shapes = [(experts, rank, hidden), (experts, inter, rank)] * 2 + [
            (experts, rank, inter),
            (experts, hidden, rank),
        ]
        for prefix, tensors in (("", lora), ("grad_", gradients)):
            for name, tensor, shape in zip(_NAMES, tensors, shapes):
                if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                    what = _checks.shown(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                    raise TypeError(f"{prefix}{name}: expected a tensor of floats, got {what}")
                if tuple(tensor.shape) != shape:
                    raise ValueError(f"{prefix}{name}: expected {list(shape)}, got {_checks.shown(tensor)}")
        self._lora, self._gradients = lora, gradients
        self.update_lora_weights()

    def update_lora_weights(self) -> None:
        """Takes over what the tensors of init_lora_weights hold now; forwards use that until the next call."""
        if self._skips_lora:
            return
        if self._lora is None:
            raise RuntimeError("update_lora_weights: init_lora_weights was not called")
        gate_a, gate_b, up_a, up_b, down_a, down_b = (
            t.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous() for t in self._lora
        )
        rank, inter = self.lora_rank, self.moe_intermediate_size
        a = torch.cat([gate_a, up_a], dim=1)  # gate and up as one product of twice the rank
        b = torch.zeros((self.num_experts, 2 * inter, 2 * rank), device="cpu")
        b[:, :inter, :rank], b[:, inter:, rank:] = gate_b, up_b
        scale = self.lora_alpha / rank
        self._packed = Packed(a, b, down_a, down_b, (scale, scale))

    def _add_gradients(self, gradients: Gradients) -> None:
        if self._gradients is None or gradients.lora[0] is None:
            return
        a1, b1, a2, b2 = gradients.lora
        assert a1 is not None and b1 is not None
        rank, inter = self.lora_rank, self.moe_intermediate_size
        parts = (a1[:, :rank], b1[:, :inter, :rank], a1[:, rank:], b1[:, inter:, rank:], a2, b2)
        with torch.no_grad():
            for target, part in zip(self._gradients, parts):
                target.add_(part.to(target.device, target.dtype))

    # -- forward and backward

    def _checked(self, hidden, ids, weights):
        if not self._loaded:
            raise RuntimeError("the weights are not loaded: load_weights() or load_weights_from_tensors()")
        if self._packed is None and not self._skips_lora:
            raise RuntimeError("LoRA has no weights: init_lora_weights(), or a method that ends with _SkipLoRA")
        experts: Any = self._wrapper  # whose stub has public names alone
        _, hidden, ids, weights = experts._checked(hidden, ids, weights)
        return inputs(hidden, ids, weights)

    def submit_forward(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
    ) -> None:
        """Starts a forward, on copies of what is on a GPU; CPU tensors must stay as they are until sync_forward()."""
        given, packed = self._checked(hidden_states, expert_ids, weights), None if self._skips_lora else self._packed
        device = hidden_states.device
        self._forward = _worker().submit(self._calls.forward, given, packed, save_for_backward), given, packed, device

    def sync_forward(self, output_device: Any = None) -> torch.Tensor:
        """The output [tokens, hidden], of the input's type, on output_device or where the input was."""
        if self._forward is None:
            raise RuntimeError("sync_forward: nothing was submitted by submit_forward, or it was synced before")
        (future, given, packed, device), self._forward = self._forward, None
        output, saved = future.result()
        if saved is not None:
            # The caller may write to its input before the backward pass.
            held = Inputs(given.hidden.clone(), given.ids.clone(), given.weights.clone())
            self._cache.append((saved, held, packed, device))
        return output.to(device if output_device is None else output_device)

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
        output_device: Any = None,
    ) -> torch.Tensor:
        """submit_forward and sync_forward. ids and weights [tokens, num_experts_per_tok]."""
        self.submit_forward(hidden_states, expert_ids, weights, save_for_backward)
        return self.sync_forward(output_device)

    def submit_backward(self, grad_output: torch.Tensor, output_device: Any = None) -> None:
        """Starts the backward pass of the last forward that was saved and has had none."""
        if not self._cache:
            raise RuntimeError("backward: no forward is saved: forward(..., save_for_backward=True) comes first")
        given = self._cache[-1][1]
        if not isinstance(grad_output, torch.Tensor) or grad_output.shape != given.hidden.shape:
            what = _checks.shown(grad_output) if isinstance(grad_output, torch.Tensor) else type(grad_output).__name__
            raise ValueError(f"grad_output: expected {list(given.hidden.shape)} as the forward's input, got {what}")
        saved, given, packed, device = self._cache.pop()
        grad = grad_output.detach().cpu()
        future = _worker().submit(self._calls.backward, saved, given, packed, grad, Wanted())
        self._backward = future, device if output_device is None else output_device, given.hidden.dtype

    submit_backward_async = submit_backward

    def sync_backward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient of hidden_states, in their type, gradient of weights, f32); those of LoRA are added by then."""
        if self._backward is None:
            raise RuntimeError("sync_backward: nothing was submitted by submit_backward, or it was synced before")
        (future, device, dtype), self._backward = self._backward, None
        gradients = future.result()
        self._add_gradients(gradients)
        return gradients.hidden.to(device, dtype), gradients.weights.to(device)

    def backward(self, grad_output: torch.Tensor, output_device: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """submit_backward and sync_backward."""
        self.submit_backward(grad_output, output_device)
        return self.sync_backward()


def for_training(given: dict[str, Any]) -> AMXSFTMoEWrapper:
    """From the arguments of KTMoEWrapper(mode="sft")."""
    given = dict(given)
    for name in ("self", "mode"):
        given.pop(name, None)
    if given.get("max_deferred_experts_per_token"):
        raise ValueError("max_deferred_experts_per_token: experts that train are not deferred; expected 0")
    return AMXSFTMoEWrapper(**given)
