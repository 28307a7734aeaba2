"""The module that stands where a model's experts stood: forward(hidden_states, top_k_index, top_k_weights)."""

import dataclasses

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
    numa_nodes: tuple | None = None
    max_tokens: int = 4096
    group_size: int = 128
    activations: str = "default"


class KTExperts(torch.nn.Module):
    """Routed experts of one layer on KT, some of them, if asked for, on the model's device.

    It has no parameters: state_dict() of a model does not hold its experts. Inference only.
    """

    def __init__(self, shape, options):
        super().__init__()
        self.shape, self.options = shape, options
        # Names that transformers' own experts modules have.
        self.num_experts, self.hidden_dim, self.intermediate_dim = shape.experts, shape.hidden, shape.inter
        self.wrapper = None
        self.recorder = None  # a kt_kernel.placement.ExpertRecorder while somebody counts
        self._write_back = None
        for name in ("gpu_slots", "gpu_w13", "gpu_w2"):
            self.register_buffer(name, None, persistent=False)

    def extra_repr(self):
        on_device = 0 if self.gpu_w13 is None else self.gpu_w13.shape[0]
        s = self.shape
        return (
            f"layer={s.layer}, experts={s.experts}, hidden={s.hidden}, inter={s.inter}, "
            f"method={self.options.method}, on_device={on_device}"
        )

    # --- weights ---

    def load(self, values=None):
        """From the path of the options, or from `values`: gate, up [E, I, H], down [E, H, I]."""
        from kt_kernel import KTMoEWrapper

        s, o = self.shape, self.options
        self.wrapper = KTMoEWrapper(
            layer_idx=s.layer,
            num_experts=s.experts,
            num_experts_per_tok=s.top_k,
            hidden_size=s.hidden,
            moe_intermediate_size=s.inter,
            gpu_experts_mask=torch.zeros(s.experts, dtype=torch.bool),
            cpuinfer_threads=o.threads,
            threadpool_count=o.pools,
            weight_path=o.weights,
            chunked_prefill_size=o.max_tokens,
            method=o.method,
            numa_nodes=None if o.numa_nodes is None else list(o.numa_nodes),
            group_size=o.group_size,
            activations=o.activations,
        )
        order = torch.arange(s.experts, dtype=torch.int64)
        if values is None:
            self.wrapper.load_weights(order)
        else:
            self.wrapper.load_weights_from_tensors(*values, order)

    # --- which experts are on the device ---

    @property
    def gpu_experts_mask(self):
        """bool [experts] on the CPU; change it by place()."""
        return self.wrapper.gpu_experts_mask

    def place(self, mask, device):
        """Experts whose mask is True live on `device` from now on; those that already did are not copied again."""
        mask = mask.to(device="cpu", dtype=torch.bool)
        if mask.shape != (self.shape.experts,):
            raise ValueError(
                f"layer {self.shape.layer}: expected a mask of {self.shape.experts} experts, got {list(mask.shape)}"
            )
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # work in flight reads the mask on the CPU, the slots on the device
        wanted = mask.nonzero().flatten().tolist()
        slots = self._slots(wanted, device)
        table = torch.full((self.shape.experts + 1,), -1, dtype=torch.int64)
        for slot, expert in enumerate(slots):
            table[expert] = slot
        if self.gpu_slots is None or self.gpu_slots.device != device:
            self.gpu_slots = table.to(device)
        else:
            self.gpu_slots.copy_(table)
        self.gpu_experts_mask.copy_(mask)
        if self.gpu_w13 is not None:
            resident.prepare((self.gpu_slots, self.gpu_w13, self.gpu_w2), self.shape.top_k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _slots(self, wanted, device):
        """Brings the wanted experts' weights to the device; the expert of each slot."""
        here = {}
        if self.gpu_w13 is not None and self.gpu_w13.device == device:
            here = {expert: slot for slot, expert in enumerate(self._expert_of_slot())}
        if not wanted:
            self.gpu_w13 = self.gpu_w2 = None
            return []
        if self.gpu_w13 is None or self.gpu_w13.device != device or self.gpu_w13.shape[0] != len(wanted):
            s = self.shape
            w13 = torch.empty((len(wanted), 2 * s.inter, s.hidden), dtype=torch.bfloat16, device=device)
            w2 = torch.empty((len(wanted), s.hidden, s.inter), dtype=torch.bfloat16, device=device)
            for slot, expert in enumerate(wanted):
                if expert in here:
                    w13[slot].copy_(self.gpu_w13[here[expert]])
                    w2[slot].copy_(self.gpu_w2[here[expert]])
                else:
                    self._fetch(expert, w13[slot], w2[slot])
            self.gpu_w13, self.gpu_w2 = w13, w2  # only now: an error before leaves the placement as it was
            return wanted
        expert_of = [expert if expert in wanted else None for expert in sorted(here, key=here.get)]
        missing = [expert for expert in wanted if expert not in here]
        # Experts that leave go back to the CPU first: should a fetch fail, nobody reads a slot half written.
        for expert in here:
            if expert not in wanted:
                self.gpu_slots[expert] = -1
                self.gpu_experts_mask[expert] = False
        for slot, expert in enumerate(expert_of):
            if expert is None:
                expert_of[slot] = missing.pop()
                self._fetch(expert_of[slot], self.gpu_w13[slot], self.gpu_w2[slot])
        return expert_of

    def _expert_of_slot(self):
        table = self.gpu_slots.tolist()[:-1]
        return sorted((expert for expert, slot in enumerate(table) if slot >= 0), key=lambda expert: table[expert])

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

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if self.wrapper is None:
            raise RuntimeError(f"layer {self.shape.layer}: its experts have no weights yet")
        if torch.is_grad_enabled():
            if self.training:
                raise RuntimeError(
                    "experts on KT are for inference: call model.eval(), or wrap the call in torch.no_grad()"
                )
            if hidden_states.requires_grad or top_k_weights.requires_grad:
                return _NoBackward.apply(self, hidden_states, top_k_index, top_k_weights)
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden, ids, scales):
        hidden, ids, scales = hidden.detach(), ids.detach().contiguous(), scales.detach().float().contiguous()
        if self.recorder is not None:
            self.recorder.add(self.shape.layer, ids)
        tokens, step = hidden.shape[0], self.options.max_tokens
        if tokens <= step:
            return self._chunk(hidden, ids, scales)
        out = torch.empty_like(hidden)
        for at in range(0, tokens, step):
            part = slice(at, min(at + step, tokens))
            out[part] = self._chunk(hidden[part], ids[part], scales[part])
        return out

    def _chunk(self, hidden, ids, scales):
        """The result is the caller's to keep."""
        if hidden.shape[0] == 0:
            return torch.zeros_like(hidden)
        stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
        self.wrapper.submit_forward(hidden, ids, scales, stream)
        there = None
        if self.gpu_w13 is not None:
            if self.gpu_w13.device != hidden.device:
                raise RuntimeError(
                    f"layer {self.shape.layer}: its experts on the device are on {self.gpu_w13.device}, "
                    f"the hidden states on {hidden.device}"
                )
            there = resident.run((self.gpu_slots, self.gpu_w13, self.gpu_w2), hidden, ids, scales)
        ours = self.wrapper.sync_forward(hidden, stream)
        if there is None:
            return ours.clone()  # the wrapper's buffer is used again by the next call
        return there.add_(ours).to(hidden.dtype)

    def __deepcopy__(self, memo):
        raise TypeError("experts on KT cannot be copied: call kt_kernel.transformers.enable again")

    def __reduce_ex__(self, protocol):
        raise TypeError("experts on KT cannot be pickled: they hold weights outside of torch")


class _NoBackward(torch.autograd.Function):
    """eval() without no_grad(): forward works, a backward pass says what is wrong instead of leaving experts out."""

    @staticmethod
    def forward(ctx, module, hidden, ids, scales):
        return module._forward(hidden, ids, scales)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("experts on KT have no backward pass: they are for inference")
