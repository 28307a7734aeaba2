"""Parameters that stand for weights outside of torch: a shape and a type, four bytes of memory.

PEFT attaches LoRA to a parameter by its shape, and adds `alpha * lhs @ rhs` to it with torch.baddbmm when a forward
pass reads it. A placeholder answers with another placeholder that remembers the factors; nobody ever sees the sum.
Whatever else would need numbers is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch


class Factors(NamedTuple):
    """What an adapter adds to a weight: scale * b @ a."""

    b: torch.Tensor  # [experts, out, rank], often a view with gaps
    a: torch.Tensor  # [experts, rank, in]
    scale: float


# Methods and functions that ask about a tensor and read none of its numbers.
_ABOUT = frozenset(
    "size stride dim ndimension numel nelement element_size storage_offset untyped_storage data_ptr is_contiguous "
    "is_floating_point is_complex is_signed is_shared is_pinned is_inference is_conj is_neg is_same_size get_device "
    "is_set_to __hash__ __len__ __get__ register_hook register_post_accumulate_grad_hook has_names is_coalesced "
    "_is_view is_distributed result_type".split()
)
# Where values would move or change their type, the placeholder stays.
_STAYS = frozenset(
    "to cpu cuda xpu npu float half double bfloat16 type contiguous detach detach_ pin_memory share_memory_ view_as "
    "requires_grad_ set_ clone __deepcopy__ __copy__ _to_copy".split()
)


class Placeholder(torch.Tensor):
    """A weight that is not in torch, of this shape, float32 on the CPU. `factors`: what adapters added to it."""

    WHAT = "weights of experts, which are"
    factors: tuple[Factors, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int] | torch.Tensor, requires_grad: bool = False) -> Placeholder:
        if isinstance(shape, Placeholder):  # type(parameter)(value), as accelerate writes it
            _refuse_training(requires_grad)
            return shape
        return cls._made(shape, ())

    @classmethod
    def _made(cls, shape, factors, dtype=torch.float32):
        with torch.inference_mode(False):
            # Not a number: should anything read it after all, nobody takes the result for a weight.
            base = torch.full((1,), float("nan"), dtype=dtype, device="cpu").expand(tuple(shape))
        out = torch.Tensor._make_subclass(cls, base, False)
        out.factors = tuple(factors)
        out._is_param = True  # an nn.Parameter to isinstance()
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        added = f", {len(self.factors)} adapter(s)" if self.factors else ""
        return f"Placeholder({list(self.shape)}{added})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("weights on KT cannot be pickled: they are not in torch")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func is torch.baddbmm or name == "baddbmm":
            return _added(*args, **kwargs)
        if name == "__set__":
            return _set(func, *args)
        if func == _data_of or name in _STAYS:
            if name == "requires_grad_":
                _refuse_training(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
            if isinstance(args[0], Placeholder):
                return args[0]
        elif name in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        raise NotImplementedError(
            f"{name} asks for {cls.WHAT} on KT and not in torch. LoRA trains beside them, with one "
            "active adapter; an adapter is merged by: kt sft export ADAPTER -o OUT --layout merged"
        )


_data_of = torch.Tensor.data.__get__
_requires_grad = torch.Tensor.requires_grad.__set__


def _added(weight, lhs, rhs, *, beta=1, alpha=1, **other):
    if not isinstance(weight, Placeholder) or beta != 1 or other:
        raise NotImplementedError("baddbmm of weights that are on KT: expected (weight, lhs, rhs, alpha=...)")
    return Placeholder._made(weight.shape, (*weight.factors, Factors(lhs, rhs, float(alpha))))


def _set(func, target, value):
    """An attribute is written."""
    if func == _requires_grad:
        _refuse_training(value)
        return None
    if isinstance(target, Placeholder) and isinstance(value, Placeholder) and target.shape == value.shape:
        return None  # p.data = p.data.to(...)
    if value is None:
        return None  # p.grad = None
    raise NotImplementedError("weights of experts are on KT and not in torch; they cannot be assigned")


def _refuse_training(wanted):
    if wanted:
        raise ValueError(
            "weights of experts on KT are frozen: full fine-tuning of them is not supported, LoRA is "
            '(peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))'
        )
