"""The module that stands where a model's experts stood: forward(hidden_states, top_k_index, top_k_weights)."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from . import resident


@dataclasses.dataclass(frozen=True)
class Shape:
    layer: int
    experts: int
    top_k: int
    hidden: int
    inter: int


@dataclasses.dataclass(frozen=True)
class Options:
    """What the layers of a model share."""

    method: str
    weights: str = ""  # path that KT reads; "" where values are given to it
    threads: int = 0
    pools: int = 0
    numa_nodes: tuple[int, ...] | None = None
    max_tokens: int = 4096
    group_size: int = 128
    activations: str = "default"
    cpu_activation: str | None = None  # "retain" or "recompute": experts that train; None: inference only


# What KT and torch put into a CUDA stream for one layer stays together, up to the copy of the result: KT's buffers are
# the stream's, and threads share streams. bf16 models wait for no device inside.
_enqueuing = threading.Lock()


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made inside outlive the call: none of inference mode, and on the CPU where no device is named, whatever
    the caller's mode and default device."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield


class _Turns:
    """Many forwards at a time (`with turns:`), or one change (`with turns.change():`). A change lets nobody else in,
    waits for those inside, and is alone then. Neither nests in the other."""

    def __init__(self) -> None:
        self._free = threading.Condition(threading.Lock())
        self._inside = self._changes = 0

    def __enter__(self) -> None:
        with self._free:
            while self._changes:
                self._free.wait()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._free:
            self._inside -= 1
            if self._changes and not self._inside:
                self._free.notify_all()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        with self._free:
            while self._changes:
                self._free.wait()
            self._changes = 1
            try:
                while self._inside:
                    self._free.wait()
            except BaseException:  # an interrupt
                self._changes = 0
                self._free.notify_all()
                raise
        try:
            yield
        finally:
            with self._free:
                self._changes = 0
                self._free.notify_all()


class KTExperts(torch.nn.Module):
    """Routed experts of one layer on KT, some of them, if asked for, on the model's device.

    It has no parameters: state_dict() of a model does not hold its experts. Inference only. Any thread may call
    forward() and place() at any time.
    """

    gpu_slots: torch.Tensor | None  # slot of each expert on the device, or -1
    gpu_w13: torch.Tensor | None
    gpu_w2: torch.Tensor | None

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__()
        self.shape, self.options = shape, options
        # Names that transformers' own experts modules have.
        self.num_experts, self.hidden_dim, self.intermediate_dim = shape.experts, shape.hidden, shape.inter
        self.wrapper: Any = None  # a KTMoEWrapper, when loaded
        self.recorder: Any = None  # a kt_kernel.placement.ExpertRecorder while somebody counts
        self.unusable: str | None = None  # why, if it is
        self._write_back: resident.WriteBack | None = None
        self._turns = _Turns()  # slots, weights and mask change together
        for name in ("gpu_slots", "gpu_w13", "gpu_w2"):
            self.register_buffer(name, None, persistent=False)

    def extra_repr(self) -> str:
        on_device = 0 if self.gpu_w13 is None else self.gpu_w13.shape[0]
        s = self.shape
        return (
            f"layer={s.layer}, experts={s.experts}, hidden={s.hidden}, inter={s.inter}, "
            f"method={self.options.method}, on_device={on_device}"
        )

    # --- weights ---

    def load(self, values: Sequence[torch.Tensor] | None = None) -> None:
        """From the path of the options, or from `values`: gate, up [E, I, H], down [E, H, I]."""
        from kt_kernel import KTMoEWrapper

        s, o = self.shape, self.options
        with plain_tensors():
            wrapper = KTMoEWrapper(
                layer_idx=s.layer,
                num_experts=s.experts,
                num_experts_per_tok=s.top_k,
                hidden_size=s.hidden,
                moe_intermediate_size=s.inter,
                gpu_experts_mask=torch.zeros(s.experts, dtype=torch.bool, device="cpu"),
                cpuinfer_threads=o.threads,
                threadpool_count=o.pools,
                weight_path=o.weights,
                chunked_prefill_size=o.max_tokens,
                method=o.method,
                numa_nodes=None if o.numa_nodes is None else list(o.numa_nodes),
                group_size=o.group_size,
                activations=o.activations,
            )
            order = torch.arange(s.experts, dtype=torch.int64, device="cpu")
            if values is None:
                wrapper.load_weights(order)
            else:
                gate, up, down = values
                wrapper.load_weights_from_tensors(gate, up, down, order)
        self.wrapper = wrapper

    def spoil(self, reason: str) -> None:
        """Gives the weights back; forward() and state_dict(), of models around this too, raise `reason` from now on."""
        self.unusable = reason
        self.register_state_dict_pre_hook(_refuse_state)
        with self._turns.change():
            self.wrapper = self._write_back = None
            self.gpu_slots = self.gpu_w13 = self.gpu_w2 = None

    # --- which experts are on the device ---

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """bool [experts] on the CPU; change it by place()."""
        mask: torch.Tensor = self.wrapper.gpu_experts_mask
        return mask

    def place(self, mask: torch.Tensor, device: torch.device | str) -> None:
        """Experts whose mask is True live on `device` from now on; those that already did are not copied again.
        Forwards of other threads wait meanwhile, and what they put into streams is done before anything changes."""
        if mask.dtype != torch.bool or mask.shape != (self.shape.experts,):
            raise ValueError(
                f"layer {self.shape.layer}: expected a bool mask of {self.shape.experts} experts, "
                f"got {list(mask.shape)} {mask.dtype}"
            )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with self._turns.change(), plain_tensors():
            self._finish_work(device)
            self._place(mask.cpu(), device)
            self._finish_work(device)

    def _finish_work(self, device: torch.device) -> None:
        """Work in flight reads the mask on the CPU, slots and weights on the device."""
        old = device if self.gpu_w13 is None else self.gpu_w13.device
        for used in {device, old}:
            if used.type == "cuda":
                torch.cuda.synchronize(used)

    def _place(self, mask, device):
        wanted = mask.nonzero().flatten().tolist()
        slots = self._slots(wanted, device)
        table = torch.full((self.shape.experts + 1,), -1, dtype=torch.int64, device="cpu")
        for slot, expert in enumerate(slots):
            table[expert] = slot
        if self.gpu_slots is None or self.gpu_slots.device != device:
            self.gpu_slots = table.to(device)
        else:
            self.gpu_slots.copy_(table)
        self.gpu_experts_mask.copy_(mask)
        if self.gpu_w13 is not None:
            resident.prepare((self.gpu_slots, self.gpu_w13, self.gpu_w2), self.shape.top_k)

    def _slots(self, wanted, device):
        """Brings the wanted experts' weights to the device; the expert of each slot."""
        here: dict[int, int] = {}
        if self.gpu_slots is not None and self.gpu_w13 is not None and self.gpu_w13.device == device:
            here = {expert: slot for expert, slot in enumerate(self.gpu_slots.tolist()[:-1]) if slot >= 0}
        if not wanted:
            self.gpu_w13 = self.gpu_w2 = None
            return []
        if self.gpu_w13 is None or self.gpu_w13.device != device or self.gpu_w13.shape[0] != len(wanted):
            s = self.shape
            w13 = torch.empty((len(wanted), 2 * s.inter, s.hidden), dtype=torch.bfloat16, device=device)
            w2 = torch.empty((len(wanted), s.hidden, s.inter), dtype=torch.bfloat16, device=device)
            for slot, expert in enumerate(wanted):
                if expert in here:
                    assert self.gpu_w13 is not None and self.gpu_w2 is not None
                    w13[slot].copy_(self.gpu_w13[here[expert]])
                    w2[slot].copy_(self.gpu_w2[here[expert]])
                else:
                    self._fetch(expert, w13[slot], w2[slot])
            self.gpu_w13, self.gpu_w2 = w13, w2  # only now: an error before leaves the placement as it was
            return wanted
        expert_of: list[int | None] = [None] * len(wanted)
        for expert, slot in here.items():
            expert_of[slot] = expert if expert in wanted else None
        missing = [expert for expert in wanted if expert not in here]
        # Experts that leave go back to the CPU first: should a fetch fail, nobody reads a slot half written.
        for expert in here:
            if expert not in wanted:
                assert self.gpu_slots is not None
                self.gpu_slots[expert] = -1
                self.gpu_experts_mask[expert] = False
        assert self.gpu_w2 is not None  # it comes and goes with gpu_w13
        for slot, expert in enumerate(expert_of):
            if expert is None:
                expert_of[slot] = missing.pop()
                self._fetch(expert_of[slot], self.gpu_w13[slot], self.gpu_w2[slot])
        return expert_of

    def _fetch(self, expert, w13, w2):
        if self._write_back is None:
            s = self.shape
            self._write_back = resident.WriteBack(
                self.wrapper, self.options.method, s.inter, s.hidden, self.options.group_size, w13.is_cuda
            )
        gate_up, down = self._write_back.read(expert)
        w13.copy_(gate_up)
        w2.copy_(down)

    # --- forward ---

    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts' weighted sum for each token, [tokens, hidden] like hidden_states, a tensor of the caller's own.

        top_k_index, top_k_weights [tokens, top_k]: chosen experts (numbers outside of 0 ... experts - 1 are left out)
        and their shares. torch.compile leaves this call as it is and compiles what is around it.
        """
        if self.wrapper is None:
            raise RuntimeError(self.unusable or f"layer {self.shape.layer}: its experts have no weights yet")
        if torch.is_grad_enabled():
            if self.training:
                raise RuntimeError(
                    "experts on KT are for inference: call model.eval(), or wrap the call in torch.no_grad()"
                )
            if hidden_states.requires_grad or top_k_weights.requires_grad:
                out: torch.Tensor = _NoBackward.apply(self, hidden_states, top_k_index, top_k_weights)
                return out
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        hidden, ids, scales = hidden.detach(), ids.detach().contiguous(), scales.detach().float().contiguous()
        recorder = self.recorder
        if recorder is not None:
            recorder.add(self.shape.layer, ids)
        tokens, step = hidden.shape[0], self.options.max_tokens
        if tokens <= step:
            return self._chunk(hidden, ids, scales)
        out = torch.empty_like(hidden)
        for at in range(0, tokens, step):
            part = slice(at, min(at + step, tokens))
            out[part] = self._chunk(hidden[part], ids[part], scales[part])
        return out

    def _chunk(self, hidden: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The result is the caller's to keep."""
        if hidden.shape[0] == 0:
            return torch.zeros_like(hidden)
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        together = _enqueuing if hidden.is_cuda else contextlib.nullcontext()
        with self._turns, together:  # KT reads the mask, the device slots and weights: of one placement
            if self.wrapper is None:
                raise RuntimeError(self.unusable)
            if self.gpu_w13 is not None and self.gpu_w13.device != hidden.device:
                raise RuntimeError(
                    f"layer {self.shape.layer}: its experts on the device are on {self.gpu_w13.device}, "
                    f"the hidden states on {hidden.device}"
                )
            self.wrapper.submit_forward(hidden, ids, scales, stream)
            there = None
            if self.gpu_w13 is not None:
                there = resident.run((self.gpu_slots, self.gpu_w13, self.gpu_w2), hidden, ids, scales)
            ours: torch.Tensor = self.wrapper.sync_forward(hidden, stream)
            if there is None:
                return ours.clone()  # the wrapper's buffer is used again by the next call
            return there.add_(ours).to(hidden.dtype)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("experts on KT cannot be copied: call kt_kernel.transformers.enable again")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("experts on KT cannot be pickled: they hold weights outside of torch")


def _refuse_state(module: KTExperts, prefix: str, keep_vars: bool) -> NoReturn:
    raise RuntimeError(module.unusable)


class _NoBackward(torch.autograd.Function):
    """eval() without no_grad(): forward works, a backward pass says what is wrong instead of leaving experts out."""

    @staticmethod
    def forward(ctx, module, hidden, ids, scales):
        return module._forward(hidden, ids, scales)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("experts on KT have no backward pass: they are for inference")
