"""The GPU for which kernels are configured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

_DEPENDENT_FROM_CAPABILITY, _DEPENDENT_FROM_TRITON = 90, (3, 7)


@dataclass(frozen=True, slots=True)
class Chip:
    """Properties of a GPU that launchers use; tests without a GPU pass their own: CUDA's compute capability (90 for
    9.0), the streaming multiprocessors over which a launch spreads its programs, and whether small kernels start while
    the one before them ends (`kernels.dependent_launch`)."""

    capability: int
    processors: int
    dependent_launches: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        properties = torch.cuda.get_device_properties(device)
        capability = 10 * properties.major + properties.minor
        return cls(capability, properties.multi_processor_count, can_launch_dependents(capability))


def can_launch_dependents(capability: int) -> bool:
    """Whether a chip of that capability and the installed Triton support programmatic dependent launches."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return capability >= _DEPENDENT_FROM_CAPABILITY and version >= _DEPENDENT_FROM_TRITON
