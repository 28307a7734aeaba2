"""Names of weight formats: what users call them, and what a path holds. The extension knows both."""

from __future__ import annotations

import os

from kt_kernel import kt_kernel_ext


def method_of(format: str) -> str:
    """The method's name of a format: "int4" is AMXINT4, "fp8" is FP8. ValueError lists what is known."""
    return kt_kernel_ext.method_named(str(format))


def stored_method(path: str | os.PathLike[str]) -> str:
    """The method that reads the experts under `path` as they are stored."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"weights {path}: no such file or folder")
    return kt_kernel_ext.stored_method(path)
