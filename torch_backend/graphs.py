"""Steps captured once per number of rows and prompt tokens and replayed: one launch instead of hundreds.

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
"""Sequences with prompts of a captured step, the one that takes the padding included. More cost blocks of attention
that are looked at and left in each layer."""

_FREE_TOKENS = 256
"""A step of so many tokens computes its products in the time in which it reads the weights: on a GPU that multiplies
some 300 times in the time of reading a byte, padding up to there costs little (an estimate)."""

_MOST_PADDED = 1.25
"""Of its own tokens, that a larger step is padded to."""

_MOST_KEYS = 4096
"""Of a sequence with a prompt. More are shared out over the chip (`plan_extend`), by as many blocks as a captured step
may have and this one has not; and to attend to them takes longer than the launches that a graph would save."""

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
        # Kernels are compiled, and libraries allocate their workspaces, at the first run: not while capturing.
        function()
        self._stream.synchronize()
        # Capturing begins by giving back what eager steps have left in the allocator: that is no part of what it takes.
        # What the driver keeps of a graph is, and the allocator knows nothing of it.
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


class Bucket(NamedTuple):
    """The size of a captured step: `decode` rows, and `prompt` tokens of other sequences."""

    decode: int
    prompt: int = 0

    def __str__(self) -> str:
        return f"decode {self.decode}" if not self.prompt else f"decode {self.decode}, {self.prompt} prompt tokens"


class StepGraphs:
    """The captured steps of a runner.

    **Arguments:** `buckets`: of steps of decode rows alone, numbers of rows; `mixed`: of steps with prompts; `forward`:
    what a captured step does, from the inputs on; `table`: of the cache groups, in each of which a row may take a page
    a step, and a prompt one for each `page_size` tokens; `drafts`: of a runner that drafts.

    **Raises:** `ValueError` for `mixed` buckets of a runner that drafts, whose steps with prompts read lengths on the
    host.
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
        """The smallest bucket for a plan; None for one that is not captured: it is too large, or to be in one would
        cost it more than launches do."""
        rows, prompt = len(plan.rows), plan.num_tokens - plan.num_decode
        if plan.num_decode == rows:
            fitting = [found for found in self.layouts if not found.prompt and found.decode >= rows]
            return min(fitting, default=None) if plan.samples.all() else None
        if rows - plan.num_decode >= self._chunks or plan.kv_lens[plan.num_decode :].max() > _MOST_KEYS:
            return None
        fitting = [found for found in self.layouts if found.decode >= plan.num_decode and found.prompt >= prompt]
        best = min(fitting, key=sum, default=None)
        worth = best is not None and sum(best) <= max(_FREE_TOKENS, _MOST_PADDED * plan.num_tokens)
        return best if worth else None

    def capture_all(self, progress: Callable[[int, str], None]) -> None:
        """Captures what is not captured yet, the largest first, so that the others find room in its memory;
        `progress(done, what)` is called after each."""
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
        guesses: Int32 | None = None,
        settle: Callable[[StepInputs], None] | None = None,
    ) -> tuple[StepInputs, torch.Tensor]:
        """Replays a bucket on a plan: its inputs, and hidden states `[tokens, hidden]`, padding included, that the next
        replay overwrites.

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

    def _get(self, bucket: Bucket) -> _Captured:
        found = self._captured.get(bucket)
        if found is None:
            found = self._captured[bucket] = self._build(self.layouts[bucket])
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


def mixed_buckets(max_rows: int, prompt_tokens: int) -> tuple[Bucket, ...]:
    """Steps with prompts to capture, with at most `max_rows` decode rows, of a runner whose steps have at most
    `prompt_tokens` of prompts.

    Small ones: the host launches a step in some milliseconds, and for as long a GPU computes hundreds of tokens.
    """
    rows = (0, *(count for count in (8, 32, 64, 128) if count < max_rows), max_rows)
    prompts = [most for less, most in pairwise((0, 16, 64, 128, 256, 512)) if less < prompt_tokens]
    return tuple(Bucket(decode, prompt) for decode in rows for prompt in prompts)


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
