"""Where steps run, in the order they are submitted, while the host goes on: a CUDA stream, or a thread for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from sglang_jax.runner.plan import Int32

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Work on its way."""

    def wait(self) -> Result:
        """Blocks until the work is done. Raises what the work raised."""
        ...

    def submitted(self) -> Result:
        """What the work gave, for work that is submitted after it: on the device it may not be done. Raises what the
        work raised."""
        ...


class Stream(Protocol):
    """Runs work in order. Tensors reach the device, and come back, within the work that is submitted."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Starts `work` behind all that was submitted before."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """int32 `[size]` on the host, to be filled and handed to `to_device` once."""
        ...

    def to_device(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor on the device; it is copied into `into` where that is given."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, complete once the work that asked for it is waited for."""
        ...

    def settle(self) -> None:
        """Waits for what was done outside any stream, so that work that is submitted from now on finds it done."""
        ...

    def close(self) -> None:
        """Waits for what was submitted."""
        ...


class CpuThread:
    """A thread of its own: torch lets go of the interpreter's lock inside its operations."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forward")

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        def run() -> T:
            with torch.inference_mode():
                return work()

        return _OnThread(self._thread.submit(run))

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32)

    def to_device(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        return host if into is None else into.copy_(host)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def settle(self) -> None:
        """Outside this thread nothing is left undone."""

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class _OnThread(Generic[T]):
    future: Future[T]

    def wait(self) -> T:
        return self.future.result()

    def submitted(self) -> T:
        return self.future.result()  # work on the thread runs in order, so that this is there


class CudaStream:
    """A CUDA stream of its own. Host memory is pinned, so that copies do not wait for it; torch's pinned allocator
    hands a block out again only once the copies that use it are done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            found = work()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self.stream)
        return _OnStream(found, done)

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def to_device(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is None:
            return host.to(self.device, non_blocking=True)
        return into.copy_(host, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True, slots=True)
class _OnStream(Generic[T]):
    found: T
    done: torch.cuda.Event

    def wait(self) -> T:
        self.done.synchronize()
        return self.found

    def submitted(self) -> T:
        return self.found


def integers_to_device(stream: Stream, values: Int32) -> torch.Tensor:
    """An int32 array of any shape, on the device."""
    host = stream.host_buffer(values.size)
    np.copyto(host.numpy(), values.reshape(-1))
    return stream.to_device(host).view(values.shape)
