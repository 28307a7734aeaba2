"""Which instruction set the kernels use, under the names that engines know."""
import os
import sys

from kt_kernel import kt_kernel_ext

# Ours that are spelt differently. AVX-VNNI has no name of its own there: it is AVX2 with faster products.
_SPELT = {"avx512": "avx512_base", "avx_vnni": "avx2"}


def cpu_variant():
    """The instruction set in use: amx, avx512_bf16, avx512_vnni, avx512_base or avx2 on x86, its own name elsewhere;
    and avx512_vbmi where KT_KERNEL_CPU_VARIANT asks for that. ValueError for an unknown KT_KERNEL_CPU_VARIANT (or
    KT_ISA), NotImplementedError for one this CPU lacks."""
    isa = kt_kernel_ext.isa()
    if not os.environ.get("KT_ISA") and os.environ.get("KT_KERNEL_CPU_VARIANT") == "avx512_vbmi":
        return "avx512_vbmi"  # no kernels of its own: AVX-512 VNNI's
    return _SPELT.get(isa, isa)


def explain(to=None):
    """Writes what KT_KERNEL_DEBUG=1 promises: what was chosen and why. Never raises for a bad choice."""
    to = to or sys.stderr
    for name, missing in kt_kernel_ext.isas():
        print(f"kt_kernel: {name}: {'lacks ' + missing if missing else 'runs here'}", file=to)
    asked = next((v for v in ("KT_ISA", "KT_KERNEL_CPU_VARIANT") if os.environ.get(v)), None)
    why = f"{asked}={os.environ[asked]}" if asked else "the best that runs here"
    try:
        print(f"kt_kernel: {cpu_variant()} is used ({kt_kernel_ext.isa()}): {why}", file=to)
    except (ValueError, NotImplementedError) as error:
        print(f"kt_kernel: {why}: {error}", file=to)
