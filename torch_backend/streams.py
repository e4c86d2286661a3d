"""Runs steps in the order of submission while the host continues: on a CUDA stream, or on a thread for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from sglang_jax.runner.plan import Int32

T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    def wait(self) -> Result:
        """Blocks until the work is done. Raises the work's error."""
        ...

    def submitted(self) -> Result:
        """Returns the work's result for later work, maybe before the device has computed it. Raises the work's
        error."""
        ...


class Stream(Protocol):
    """Runs work in order. Tensors are copied to the device, and back, within the submitted work."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Starts `work` after all that was submitted before."""
        ...

    def host_buffer(self, size: int) -> torch.Tensor:
        """Returns int32 `[size]` in host memory, to be filled and passed to `to_device` once."""
        ...

    def to_device(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor: ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in host memory, complete once the work that asked for it is done."""
        ...

    def settle(self) -> None:
        """Waits for work outside of streams, so that work submitted from now on sees its results."""
        ...

    def close(self) -> None: ...


class CpuThread:
    """A thread for the CPU's work: torch releases the interpreter's lock inside its operations."""

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
        pass  # no work outside of this thread

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class _OnThread(Generic[T]):
    future: Future[T]

    def wait(self) -> T:
        return self.future.result()

    def submitted(self) -> T:
        return self.future.result()  # no wait in practice: work on the thread runs in order


@contextmanager
def others_keep_threads() -> Iterator[None]:
    """For work on a stream's thread that changes torch's number of threads: only that thread keeps the change, so that
    a later engine divides all cores again."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CudaStream:
    """A separate CUDA stream. Host memory is pinned, so that copies do not block; torch's pinned allocator reuses a
    block only after the copies from it are done."""

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
    """Copies an int32 array of any shape to the device."""
    host = stream.host_buffer(values.size)
    np.copyto(host.numpy(), values.reshape(-1))
    return stream.to_device(host).view(values.shape)
