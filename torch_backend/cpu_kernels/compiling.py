"""Compiles the kernels of this package, and those shared with the JAX backend."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.cpu_kernels.compiling import KernelCompiler


def caching_compiler(folder: Path) -> KernelCompiler:
    """A compiler that caches machine code in `folder`: see `KernelCompiler.keeping`."""
    return KernelCompiler.keeping(folder, Path(__file__).parent)
