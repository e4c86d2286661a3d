"""Compiles the kernels of this package, and those that it has in common with the JAX backend."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.cpu_kernels.compiling import KernelCompiler


def compiler_keeping(folder: Path) -> KernelCompiler:
    """One that keeps machine code below `folder`: see `KernelCompiler.keeping`."""
    return KernelCompiler.keeping(folder, Path(__file__).parent)
