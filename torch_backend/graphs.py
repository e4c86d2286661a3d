"""Captured steps, one per bucket of decode rows and prompt tokens: a replay is one launch instead of hundreds.

A captured step reads and writes fixed memory. A replay copies its plan into the bucket's static input buffer. All that
differs between steps (lengths, pages, rows) is data in this buffer; the host reads none of it. The graph ends with the
hidden states: logits and sampling depend on the rows' needs, and are launched one by one while the graph runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from sglang_jax.runner.page_tables import ONE_GROUP, TableLayout
from sglang_jax.runner.plan import Int32, PageDeltas, StepPlan
from torch_backend.packing import StepInputs, StepLayout
from torch_backend.streams import Stream

logger = logging.getLogger(__name__)

_CHUNKS = 32
"""Sequences with prompts in a captured step, including the one for padding. More of them would add blocks to each
layer's attention that start only to find no work."""

_FREE_TOKENS = 256
"""In a step of at most this many tokens, products take no longer than reading the weights: a GPU computes some 300
multiplications in the time it takes to read one byte, so padding up to this size costs little (an estimate)."""

_MAX_PADDED = 1.25
"""Maximum size of a larger step with padding, as a multiple of its own tokens."""

_MAX_KEYS = 4096
"""Maximum keys of a sequence with a prompt. Longer ones are split over the chip (`plan_extend`) for as many blocks as a
captured step may have, even if it has fewer, and attention to them takes longer than the launches that a graph
saves."""

Forward = Callable[[StepInputs], torch.Tensor]
"""Maps a step's inputs on the device to hidden states `[T, hidden]`."""


class Capture(Protocol):
    """Records the tensor operations of a function for replay."""

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        """Runs `function`, possibly more than once, and returns its recording. Both use the same memory."""
        ...

    def memory(self) -> int:
        """Bytes that captures hold so far."""
        ...


class Replay(Protocol):
    """A recording."""

    def __call__(self) -> torch.Tensor:
        """Runs the recording; the result is always in the same memory."""
        ...


class CudaCapture:
    """CUDA graphs that share one memory pool: a replay may overwrite the result of the one before. `stream`: where
    capturing and replays run."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._memory = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        # The first run compiles kernels and allocates libraries' workspaces, which a capture must not do.
        function()
        self._stream.synchronize()
        # Return unused memory of eager steps to the driver first, so that it does not count as the graph's. The
        # driver's own memory for a graph does count, and the allocator does not know it.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        self._memory += free - torch.cuda.mem_get_info(self._stream.device)[0]
        return CudaReplay(graph, result)

    def memory(self) -> int:
        return self._memory


@dataclass(frozen=True, slots=True)
class CudaReplay:
    """A CUDA graph and the tensor that holds its result."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: torch.Tensor
    replay: Replay


class Bucket(NamedTuple):
    """The size of a captured step: `decode` rows, and `prompt` tokens of other sequences."""

    decode: int
    prompt: int = 0

    def __str__(self) -> str:
        return f"decode {self.decode}" if not self.prompt else f"decode {self.decode}, {self.prompt} prompt tokens"


class StepGraphs:
    """The captured steps of a runner. Raises `ValueError` for `mixed` buckets with drafts: such a runner's steps with
    prompts read lengths on the host.

    `buckets`: row counts of decode steps; `mixed`: sizes of steps with prompts; `forward`: what a captured step runs on
    its inputs; `table`: the cache groups: in each, a decode row may get one page per step and a prompt one for each
    `page_size` tokens; `drafts`: whether the runner drafts.
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
        mixed: Sequence[Bucket] = (),
        page_size: int = 1,
    ) -> None:
        if mixed and drafts:
            raise ValueError("steps with prompts are not captured where there are drafts")
        self.layouts = {
            Bucket(rows): StepLayout.decode(rows, deltas=len(table.starts) * rows, drafts=drafts, states=table.states)
            for rows in buckets
        }
        self._chunks = min(_CHUNKS, dump_row + 1)
        for bucket in mixed:
            pages = bucket.decode + self._chunks + bucket.prompt // page_size
            self.layouts[bucket] = StepLayout.mixed(
                bucket.decode, self._chunks, bucket.prompt, len(table.starts) * pages, states=table.states
            )
        self._capture = capture
        self._forward = forward
        self._stream = stream
        self._dump_row = dump_row
        self._device = device
        self._captured: dict[Bucket, _Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def bucket(self, plan: StepPlan) -> Bucket | None:
        """The smallest bucket for a plan; None if the plan is too large, or padding would cost more than launches."""
        rows, prompt = len(plan.rows), plan.num_tokens - plan.num_decode
        if plan.num_decode == rows:
            fitting = [found for found in self.layouts if not found.prompt and found.decode >= rows]
            return min(fitting, default=None) if plan.samples.all() else None
        if rows - plan.num_decode >= self._chunks or plan.kv_lens[plan.num_decode :].max() > _MAX_KEYS:
            return None
        fitting = [found for found in self.layouts if found.decode >= plan.num_decode and found.prompt >= prompt]
        best = min(fitting, key=sum, default=None)
        worth = best is not None and sum(best) <= max(_FREE_TOKENS, _MAX_PADDED * plan.num_tokens)
        return best if worth else None

    def capture_all(self, progress: Callable[[int, str], None]) -> None:
        """Captures all buckets, the largest first so that others fit into its memory; calls `progress(done, what)`."""
        start = time.perf_counter()
        for done, bucket in enumerate(sorted(self.layouts, key=lambda bucket: (sum(bucket), bucket), reverse=True), 1):
            self._get(bucket)
            progress(done, str(bucket))
        decode, mixed = (
            [bucket for bucket in self.layouts if bool(bucket.prompt) == with_prompts] for with_prompts in (False, True)
        )
        logger.info(
            "Captured %d decode steps of up to %d rows, %d steps with prompts of up to %d tokens in %.1f s, %.0f MiB",
            len(decode),
            max((bucket.decode for bucket in decode), default=0),
            len(mixed),
            max((sum(bucket) for bucket in mixed), default=0),
            time.perf_counter() - start,
            self._capture.memory() / 2**20,
        )

    def run(
        self,
        bucket: Bucket,
        plan: StepPlan,
        deltas: PageDeltas,
        draft_numbers: Int32 | None = None,
        settle: Callable[[StepInputs], None] | None = None,
    ) -> tuple[StepInputs, torch.Tensor]:
        """Replays a bucket on a plan. Returns its inputs and hidden states `[tokens, hidden]`, valid until the next
        replay. `deltas`: at most the layout's number; `draft_numbers`: as in `FlatPlan`; `settle` changes the inputs
        first."""
        captured, layout = self._get(bucket), self.layouts[bucket]
        host = self._stream.host_buffer(layout.size)
        layout.pack(plan, deltas, self._dump_row, host.numpy(), draft_numbers)
        self._stream.to_device(host, into=captured.inputs)
        inputs = layout.unpack(captured.inputs)
        if settle is not None:
            settle(inputs)
        return inputs, captured.replay()

    def _get(self, bucket: Bucket) -> _Captured:
        found = self._captured.get(bucket)
        if found is None:
            found = self._captured[bucket] = self._build(self.layouts[bucket])
        return found

    def _build(self, layout: StepLayout) -> _Captured:
        host = self._stream.host_buffer(layout.size)
        layout.pack(_padding_plan(), _no_deltas(), self._dump_row, host.numpy())
        inputs = self._stream.to_device(host).clone()
        unpacked = layout.unpack(inputs)
        return _Captured(inputs, self._capture.capture(lambda: self._forward(unpacked)))


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts to capture: close together where a padded row is a large share of the step's work."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 512, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


def mixed_buckets(max_rows: int, prompt_tokens: int) -> tuple[Bucket, ...]:
    """Sizes of the steps with prompts to capture, for steps of at most `max_rows` decode rows and `prompt_tokens`
    tokens of prompts. Only small ones: the host takes some milliseconds to launch a step, in which a GPU computes
    hundreds of tokens."""
    rows = (0, *(count for count in (8, 32, 64, 128) if count < max_rows), max_rows)
    prompts = [most for less, most in pairwise((0, 16, 64, 128, 256, 512)) if less < prompt_tokens]
    return tuple(Bucket(decode, prompt) for decode in rows for prompt in prompts)


def _no_deltas() -> PageDeltas:
    return PageDeltas(*(np.zeros(0, np.int32) for _ in range(3)))


def _padding_plan() -> StepPlan:
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
