"""The GPU that kernels are shaped for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chip:
    """What launchers need to know of a GPU, and what stands for it where there is none.

    - `capability`: CUDA's compute capability, 90 for 9.0.
    - `processors`: streaming multiprocessors, over which a launch spreads its programs.
    """

    capability: int
    processors: int

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """The chip of a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(10 * properties.major + properties.minor, properties.multi_processor_count)
