"""A kernel as it ships: what it is called, and a launch of it that needs no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_backend.kernels.chip import Chip


@dataclass(frozen=True, slots=True)
class ShippedKernel:
    """One launcher with one combination of what kernels are compiled for: types, widths, head sizes, page sizes.

    - `operation`: the launcher's name, as in `rms_norm`.
    - `configuration`: the combination in words, as in `bfloat16 hidden 4096`; with `operation` it is unique.
    - `launch`: calls the launcher as the model would on that chip, with tensors without memory (device `meta`).
    """

    operation: str
    configuration: str
    launch: Callable[[Chip], object]
