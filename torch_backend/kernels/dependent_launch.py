"""Programmatic dependent launch: the programs of a kernel start while those of the kernel before it still end.

A kernel that is launched so must call `after_previous` before it writes anything, and before it reads anything but
weights, which no kernel writes. Then nothing but its start overlaps: whoever waits for a kernel waits for all that came
before it, since that kernel ended after waiting itself. Kernels launched in the plain way, cuBLAS's for example, wait
for the whole kernel before them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(DEPENDENT: tl.constexpr):
    """Lets the next kernel's programs start, and waits for the end of the kernels before this one and for what they
    wrote. Nothing unless the launch is `DEPENDENT`."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
