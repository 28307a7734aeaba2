"""How experts that train hold activations, and whether a forward pass keeps gate and up for its backward pass."""

from __future__ import annotations

import logging
import pathlib

from kt_kernel import kt_kernel_ext

POLICIES = ("retain", "recompute")
_RESERVE = 1 << 30  # bytes that nobody takes for this
_CGROUP = pathlib.Path("/sys/fs/cgroup")
# Instruction sets that multiply bf16 numbers.
_BF16_ISAS = ("avx512_bf16", "amx", "neon_i8mm")


def training_activations(activations: str) -> str:
    """How experts that train hold activations: as asked, or bf16 where the CPU multiplies that, else f32."""
    if activations == "int8":
        raise ValueError("activations: experts train with bf16 or f32, not int8")
    if activations == "default":
        return "bf16" if kt_kernel_ext.isa() in _BF16_ISAS else "f32"
    return activations


def keeps(policy: str | None, nbytes: int) -> bool:
    """ "retain" keeps what fits into the memory that is left."""
    if policy != "retain":
        return False
    left = available_bytes()
    if left is None or left - nbytes >= _RESERVE:
        return True
    if not _Told.once:
        _Told.once = True
        logging.getLogger("kt_kernel").warning(
            "%.1f GiB of memory are left: gate and up of experts are computed again in backward passes where they do "
            "not fit (cpu_activation='recompute' does so always)",
            left / 2**30,
        )
    return False


class _Told:
    once = False


def available_bytes() -> int | None:
    """Memory that can still be taken on this machine, or in this container; None where nobody says."""
    found = [value for value in (_of_machine(), _of_container()) if value is not None]
    return min(found) if found else None


def _of_machine():
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _of_container():
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        files = 0  # of the page cache: given back when asked for
        for line in (_CGROUP / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "active_file ")):
                files += int(line.split()[1])
        return int(limit) - used + files
    except (OSError, ValueError, IndexError):
        return None
