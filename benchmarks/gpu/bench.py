"""Shared by the sections: the device, its kernels, how long work takes on it, and its peak rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torch_backend.attention.interface import AttentionImplementation
from torch_backend.operations import Operations
from torch_backend.sampler import TokenSampler

if TYPE_CHECKING:
    from torch_backend.kernels.chip import Chip

Row = dict[str, Any]
"""One line of a table: column to number, text or truth value."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Table:
    """Lines under a title; the columns are the union of the lines' columns."""

    title: str
    rows: list[Row]


class Stopwatch(Protocol):
    """Times work with cold caches."""

    def seconds(self, work: Work, repeats: int = 20) -> float:
        """Median over `repeats` runs, after warm-up."""
        ...


class CudaStopwatch:
    """Times work between CUDA events.

    Before each run the L2 cache is overwritten, often enough to keep the GPU busy until the host has launched all of
    the work: this times the device, not the launches.
    """

    _COLD_BYTES = 256 * 2**20
    _MAX_FLUSHES = 100

    def __init__(self, device: torch.device) -> None:
        self._cold = torch.empty(self._COLD_BYTES, dtype=torch.uint8, device=device)
        self._flush_seconds = self._measure(self._cold.zero_, 5, flushes=1)

    def seconds(self, work: Work, repeats: int = 20) -> float:
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        launched = time.perf_counter() - start
        flushes = 1 + int(2 * launched / self._flush_seconds)
        return self._measure(work, repeats, min(flushes, self._MAX_FLUSHES))

    def _measure(self, work: Work, repeats: int, flushes: int) -> float:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in marks:
            for _ in range(flushes):
                self._cold.zero_()
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


class HostStopwatch:
    """Times work on the CPU, for dry runs, with caches as they are."""

    def seconds(self, work: Work, repeats: int = 20) -> float:
        times = []
        for _ in range(min(repeats, 3)):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Implementations under test."""

    name: str
    attention: AttentionImplementation
    operations: Operations
    sampler: TokenSampler


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates of the device. Bytes are the sum of those read and written, as in a copy."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float


class Bench:
    """A device and its measurements.

    **Arguments:** `small`: tiny shapes, for a dry run; `kernels_name`: triton or native. Triton on a CPU needs its
    interpreter, which is switched on before Triton is imported.
    """

    def __init__(self, device: torch.device, *, small: bool, kernels_name: str) -> None:
        self.device = device
        self.small = small
        self.on_gpu = device.type == "cuda"
        self.kernels = _kernels(kernels_name, device)
        self.generator = torch.Generator(device).manual_seed(0)

    @cached_property
    def stopwatch(self) -> Stopwatch:
        return CudaStopwatch(self.device) if self.on_gpu else HostStopwatch()

    @cached_property
    def chip(self) -> Chip:
        """The chip that Triton's kernels are configured for; it needs Triton."""
        return _chip(self.device)

    @cached_property
    def rates(self) -> Rates:
        """A large copy and a large bfloat16 product of random matrices, measured once."""
        return Rates(self._copy_rate(), self._matmul_rate())

    def measure_rates(self) -> None:
        """Measures them unless that was done, and frees the memory."""
        _ = self.rates
        self.free_bytes()

    def _copy_rate(self) -> float:
        values = 2**16 if self.small else 2**29
        source = torch.randint(2**31 - 1, (values,), dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.stopwatch.seconds(lambda: target.copy_(source))

    def _matmul_rate(self) -> float:
        size = 64 if self.small else 8192
        left, right = (self.normal(size, size) for _ in range(2))
        return 2 * size**3 / self.stopwatch.seconds(lambda: left @ right)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Types of weights and activations to check. Triton's interpreter is wrong in bfloat16."""
        if self.kernels.name == "triton" and not self.on_gpu:
            return (torch.float16, torch.float32)
        return (torch.bfloat16, torch.float16, torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The measured dtype."""
        return self.dtypes[0]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return values.normal_(generator=self.generator)

    def free_bytes(self) -> int:
        """Device memory that can still be allocated; a dry run never runs out."""
        if not self.on_gpu:
            return 2**40
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def _kernels(name: str, device: torch.device) -> Kernels:
    if name == "native":
        from torch_backend.attention.native import NativeAttention
        from torch_backend.native_operations import NativeOperations
        from torch_backend.native_sampler import NativeSampler

        return Kernels(name, NativeAttention(), NativeOperations(), NativeSampler())
    from torch_backend.attention.triton import TritonAttention
    from torch_backend.kernels.operations import TritonOperations
    from torch_backend.kernels.sample import TritonSampler

    chip = _chip(device)
    return Kernels(name, TritonAttention(chip), TritonOperations(chip.dependent_launches), TritonSampler())


def _chip(device: torch.device) -> Chip:
    from torch_backend.kernels.chip import Chip

    return Chip.of(device) if device.type == "cuda" else Chip(capability=90, processors=2)


def describe_device(device: torch.device) -> Row:
    """The GPU and the software that drives it."""
    found: Row = {"torch": torch.__version__, "device": device.type}
    try:
        import triton
    except ImportError:
        found["triton"] = "not installed"
    else:
        found["triton"] = triton.__version__
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return found


def share(reached: float, possible: float) -> float:
    """A number from 0 on, to three digits."""
    return round(reached / possible, 3)


def judged(row: Row, column: str, target: float, *, at_least: bool) -> Row:
    """`row` with the target of one column, and whether it was met."""
    met = row[column] >= target if at_least else row[column] <= target
    return row | {"target": f"{'>=' if at_least else '<='} {target:g}", "met": bool(met)}
