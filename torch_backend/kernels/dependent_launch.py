"""Programmatic dependent launch: the programs of a kernel start while those of the kernel before it still end.

A kernel launched this way must call `after_previous` before it writes, and before it reads anything except weights,
which no kernel writes. Then only its start overlaps: waiting for a kernel means waiting for all before it, because that
kernel itself waited before it ended. Kernels launched the plain way, like cuBLAS's, wait for the whole previous one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(DEPENDENT: tl.constexpr):
    """If `DEPENDENT`: starts the next kernel's programs, and waits for the end and the writes of those before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
