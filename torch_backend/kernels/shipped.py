"""Every kernel that ships, in every configuration it is meant for: what is compiled ahead of time and checked.

Attention's are listed by `attention_kernels` in `shipped_attention.py`.
"""

from __future__ import annotations

from torch_backend.kernels.configuration import ShippedKernel


def shipped_kernels() -> list[ShippedKernel]:
    """All of them, each with a name of its own."""
    return []
