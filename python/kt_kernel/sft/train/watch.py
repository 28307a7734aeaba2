"""How long experts compute, how many tokens pass, how much memory is held: what progress lines say beside the loss."""

from __future__ import annotations

import functools
import os
import resource
import time
from typing import Any


class ExpertClock:
    """Time and work of the calls that train experts, from the first install() on. One for the process."""

    def __init__(self) -> None:
        self.seconds = {"forward": 0.0, "backward": 0.0}
        self.operations = {"forward": 0.0, "backward": 0.0}
        self._installed = False

    def install(self) -> None:
        from kt_kernel.sft.calls import LayerCalls

        if not self._installed:
            self._installed = True
            for name in ("forward", "backward"):
                setattr(LayerCalls, name, self._timed(name, getattr(LayerCalls, name)))

    def _timed(self, name, call):
        @functools.wraps(call)
        def timed(calls: Any, *args: Any, **kwargs: Any) -> Any:
            given = next(a for a in (*args, *kwargs.values()) if hasattr(a, "ids") and hasattr(a, "hidden"))
            begin = time.perf_counter()
            try:
                return call(calls, *args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin
                # Six products of hidden x inter for each pair, forward as well as backward: gate, up, down.
                width = given.hidden.shape[1] * calls.wrapper.moe_intermediate_size
                self.operations[name] += 6.0 * width * given.ids.numel()

        return timed

    def now(self) -> tuple[float, float, float, float]:
        return (self.seconds["forward"], self.seconds["backward"], self.operations["forward"],
                self.operations["backward"])


CLOCK = ExpertClock()


class Meter:
    """Between two lines of the log."""

    def __init__(self) -> None:
        self.tokens = self.all_tokens = 0
        self.begin = self._from = time.perf_counter()
        self._clock = CLOCK.now()

    def add(self, inputs: Any) -> None:
        seen = inputs.get("attention_mask")
        ids = inputs.get("input_ids")
        if seen is not None:
            count = int(seen.sum())
        elif ids is not None:
            count = ids.numel()
        else:  # a preference trainer's names
            count = sum(int(v.sum()) for k, v in inputs.items() if k.endswith("attention_mask"))
        self.tokens += count
        self.all_tokens += count

    def read(self) -> dict[str, float]:
        """Since the last reading."""
        now, clock = time.perf_counter(), CLOCK.now()
        wall = max(now - self._from, 1e-9)
        forward, backward, forward_work, backward_work = (a - b for a, b in zip(clock, self._clock, strict=True))
        out = {"tokens_per_s": self.tokens / wall}
        if forward + backward > 0:
            out["expert_duty"] = min(1.0, (forward + backward) / wall)
            out["forward_tflops"] = forward_work / max(forward, 1e-9) * 1e-12
            out["backward_tflops"] = backward_work / max(backward, 1e-9) * 1e-12
        self.tokens, self._from, self._clock = 0, now, clock
        return out

    def whole(self) -> dict[str, float]:
        """Since the beginning."""
        wall = max(time.perf_counter() - self.begin, 1e-9)
        forward, backward, *_ = CLOCK.now()
        out = {"seconds": wall, "tokens_per_s": self.all_tokens / wall, "peak_bytes": peak_bytes()}
        if forward + backward > 0:
            out["expert_duty"] = min(1.0, (forward + backward) / wall)
        return out


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
