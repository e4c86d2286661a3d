"""Decode steps captured once per number of rows and replayed: one launch instead of hundreds.

A captured step reads and writes fixed memory. Its inputs lie in one static buffer for each bucket, which a replay's
plan is copied into; everything that differs between steps (lengths, pages, rows) is data in there, and nothing is a
number known to the host. What is captured ends with the hidden states: logits and sampling, whose work depends on what
the step's rows ask for, are launched one by one while the graph still runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from sglang_jax.runner.plan import Int32, PageDeltas, StepPlan
from torch_backend.packing import StepInputs, StepLayout
from torch_backend.streams import Stream

logger = logging.getLogger(__name__)

Forward = Callable[[StepInputs], torch.Tensor]
"""A step's inputs on the device to hidden states `[T, hidden]`."""


class Capture(Protocol):
    """Records what a function does with tensors, to do it again."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        """Runs `function`, maybe more than once. It reads and writes the same memory each time."""
        ...

    def memory(self) -> int:
        """Bytes that captures hold so far."""
        ...


class Replay(Protocol):
    """What was recorded."""

    def __call__(self) -> torch.Tensor:
        """Does it again; the result lies in the same memory each time."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: of two replays the second may overwrite the first one's result.

    **Arguments:** `stream`: where replays will run; capturing happens there as well.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._memory = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        before = torch.cuda.memory_reserved(self._stream.device)
        # Kernels are compiled, and libraries allocate their workspaces, at the first run: not while capturing.
        function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        self._memory += torch.cuda.memory_reserved(self._stream.device) - before
        return CudaReplay(graph, result)

    def memory(self) -> int:
        return self._memory


@dataclass(frozen=True, slots=True)
class CudaReplay:
    """A CUDA graph and where its result lies."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: torch.Tensor
    replay: Replay


class DecodeGraphs:
    """The captured decode steps of a runner.

    **Arguments:** `buckets`: numbers of rows, ascending; `forward`: what a captured step does, from the inputs on;
    `table`: of the cache groups, in each of which a row may take a page; `drafts`: of a runner that drafts.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        capture: Capture,
        forward: Forward,
        stream: Stream,
        dump_row: int,
        device: torch.device,
        table: TableLayout = ONE_GROUP,
        drafts: bool = False,
    ) -> None:
        self.layouts = {
            rows: StepLayout.decode(rows, deltas=table.pools * rows, drafts=drafts, states=table.states)
            for rows in buckets
        }
        self._capture = capture
        self._forward = forward
        self._stream = stream
        self._dump_row = dump_row
        self._device = device
        self._captured: dict[int, _Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def bucket(self, plan: StepPlan) -> int | None:
        """The smallest bucket for a plan; None for one that is not captured (prefill chunks, too many rows)."""
        rows = len(plan.rows)
        if plan.num_decode < rows or not plan.samples.all():
            return None
        return next((bucket for bucket in self.layouts if bucket >= rows), None)

    def capture_all(self, progress: Callable[[int, str], None]) -> None:
        """Captures what is not captured yet, the largest first, so that the others find room in its memory;
        `progress(done, what)` is called after each."""
        start = time.perf_counter()
        for done, rows in enumerate(sorted(self.layouts, reverse=True), 1):
            self._get(rows)
            progress(done, f"decode {rows}")
        logger.info(
            "Captured %d decode graphs of up to %d rows in %.1f s, %.0f MiB",
            len(self.layouts),
            max(self.layouts),
            time.perf_counter() - start,
            self._capture.memory() / 2**20,
        )

    def run(
        self,
        bucket: int,
        plan: StepPlan,
        deltas: PageDeltas,
        guesses: Int32 | None = None,
        settle: Callable[[StepInputs], None] | None = None,
    ) -> tuple[StepInputs, torch.Tensor]:
        """Replays a bucket on a plan: its inputs, and hidden states `[bucket, hidden]` that the next replay overwrites.

        `deltas` are at most as many as the bucket's layout has; `guesses` as `Unfolded` has them; `settle` changes the
        inputs before the replay.
        """
        captured, layout = self._get(bucket), self.layouts[bucket]
        host = self._stream.host_buffer(layout.size)
        layout.pack(plan, deltas, self._dump_row, host.numpy(), guesses)
        self._stream.to_device(host, into=captured.inputs)
        inputs = layout.unpack(captured.inputs)
        if settle is not None:
            settle(inputs)
        return inputs, captured.replay()

    def _get(self, rows: int) -> _Captured:
        found = self._captured.get(rows)
        if found is None:
            found = self._captured[rows] = self._build(self.layouts[rows])
        return found

    def _build(self, layout: StepLayout) -> _Captured:
        host = self._stream.host_buffer(layout.size)
        layout.pack(_padding_alone(), _no_deltas(), self._dump_row, host.numpy())
        inputs = self._stream.to_device(host).clone()
        unpacked = layout.unpack(inputs)
        return _Captured(inputs, self._capture.capture(lambda: self._forward(unpacked)))


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts to capture: close together where a padded row is a large share of the step's work."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


def _no_deltas() -> PageDeltas:
    return PageDeltas(*(np.zeros(0, np.int32) for _ in range(3)))


def _padding_alone() -> StepPlan:
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        rows=nothing,
        num_decode=0,
        query_lens=nothing,
        kv_lens=nothing,
        tokens=nothing,
        samples=np.zeros(0, np.bool_),
        page_deltas=(_no_deltas(),),
    )
