"""Captured decode steps: which are replayed, what a replay reads, and that a value baked into a capture is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.fake_capture import FakeCapture
from helpers.plan_driver import DECODE, PlanDriver
from helpers.samplers import decode_plan
from helpers.stand_in_model import VOCAB, dense_logits, random_weights
from helpers.stand_in_torch import CPU, StandIn, stand_in_runner
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures import CacheKind, ModelConfig
from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.config import AttentionBackend, EngineConfig, ModelImpl, SpeculativeAlgorithm
from sglang_jax.runner.plan import LAST_TOKEN, PageDeltas, PoolSpec, RunnerSpec, StepPlan
from sglang_jax.runner.sizing import Sizes
from torch_backend import loading
from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, StepAttention
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.batch import ForwardBatch
from torch_backend.compilation.building import build_traced
from torch_backend.compilation.traced_model import TracedTransformer
from torch_backend.graphs import Bucket, CudaCapture, Replay, StepGraphs, mixed_buckets, row_buckets
from torch_backend.kernel_choice import Kernels
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.experts import Experts
from torch_backend.loading import PagedTransformer
from torch_backend.models import Transformer, build_model
from torch_backend.native_operations import NativeOperations
from torch_backend.native_sampler import NativeSampler
from torch_backend.packing import StepInputs, StepLayout
from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.triton import TritonStates
from torch_backend.runner import TorchRunner
from torch_backend.sampler import SamplerInputs
from torch_backend.step import RowTensors, build_batch
from torch_backend.streams import CpuThread
from torch_backend.weights import load_weights

WEIGHTS = random_weights()
PROMPTS = [np.random.default_rng(3).integers(0, VOCAB, length).tolist() for length in (9, 2, 21, 5)]
BUCKETS = (1, 3)
NO_DELTAS = PageDeltas(*(np.zeros(0, np.int32) for _ in range(3)))


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(WEIGHTS, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class Recorder(FakeCapture):
    """Records the number of tokens of each capture, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[int] = []

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        shapes = []

        def noting() -> torch.Tensor:
            result = function()
            shapes.append(len(result))
            return result

        replay = super().capture(noting)
        self.captured.append(shapes[0])
        return replay


@pytest.fixture
def capture() -> Recorder:
    return Recorder()


@pytest.fixture
def runner(capture: Recorder) -> Iterator[TorchRunner]:
    runner = stand_in_runner(WEIGHTS, capture=capture, graph_buckets=BUCKETS)
    yield runner
    runner.close()


def test_decode_steps_within_the_buckets_are_replayed_and_no_others(runner: TorchRunner, capture: Recorder) -> None:
    driver = PlanDriver(runner)
    requests = [driver.admit(prompt) for prompt in PROMPTS]
    replays = []
    for parts in (
        [(requests[0], 9)],
        [(requests[0], DECODE)],
        [(requests[0], DECODE), (requests[1], 2)],
        [(requests[0], DECODE), (requests[1], DECODE)],
        [(requests[1], DECODE), (requests[2], 20)],
        [(requests[1], DECODE), (requests[2], 1), (requests[3], 5)],
        [(requests[1], DECODE), (requests[2], DECODE), (requests[3], DECODE)],
        [(request, DECODE) for request in requests],
    ):
        result = driver.step(parts)
        assert result.replayed == (capture.replays > sum(replays[-1:])), "what the log calls a CUDA graph"
        replays.append(capture.replays)
    assert replays == [0, 1, 1, 2, 2, 2, 3, 3]
    for request in requests:
        assert request.output == greedy(request.prompt, len(request.output))


def test_a_bucket_is_captured_at_its_first_use_unless_warm_up_did(runner: TorchRunner, capture: Recorder) -> None:
    driver = PlanDriver(runner)
    request = driver.admit(PROMPTS[0])
    driver.generate(request, 4)
    assert capture.captured == [1]
    assert (runner.report().compiled_programs, runner.report().compiles_after_warm_up) == (1, 1)
    runner.warm_up(lambda done, total, what: None)
    assert capture.captured == [1, 3]
    driver.generate(request, 8)
    assert (runner.report().compiled_programs, runner.report().compiles_after_warm_up) == (2, 0)
    assert request.output == greedy(request.prompt, 8)


def test_warm_up_captures_the_largest_first_and_logs_its_progress(capture: Recorder) -> None:
    runner = stand_in_runner(WEIGHTS, max_rows=8, capture=capture, graph_buckets=(1, 2, 4, 8))
    seen: list[tuple[int, int, str]] = []
    runner.warm_up(lambda done, total, what: seen.append((done, total, what)))
    assert capture.captured == [8, 4, 2, 1]
    assert [done for done, _, _ in seen] == list(range(1, 7))
    assert {total for _, total, _ in seen} == {6}
    assert [what for _, _, what in seen][-4:] == ["decode 8", "decode 4", "decode 2", "decode 1"]
    assert capture.replays == 0
    assert runner.report().compiled_programs == 4
    runner.close()


def test_warm_up_without_captures_ends() -> None:
    runner = stand_in_runner(WEIGHTS)
    seen: list[tuple[int, int]] = []
    runner.warm_up(lambda done, total, what: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert runner.report().compiled_programs == 0
    driver = PlanDriver(runner)
    assert driver.generate(driver.admit(PROMPTS[2]), 5) == greedy(PROMPTS[2], 5)
    runner.close()


class ListedSampler(NativeSampler):
    """Records the `cut` argument of each call, None for greedy calls."""

    def __init__(self) -> None:
        self.asked: set[bool | None] = set()

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        self.asked.add(None)
        return super().greedy(logits)

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        self.asked.add(parameters.cut)
        return super().sample(logits, parameters)


def test_warm_up_covers_every_kind_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled at their first launch."""
    sampler = ListedSampler()
    monkeypatch.setattr("torch_backend.runner.NativeSampler", lambda: sampler)
    runner = stand_in_runner(WEIGHTS)
    runner.warm_up(lambda done, total, what: None)
    assert sampler.asked == {None, False, True}
    runner.close()


def test_lengths_pages_and_rows_differ_from_replay_to_replay(runner: TorchRunner, capture: Recorder) -> None:
    """A row grows over page boundaries, others join and leave, and a row is reused by another request."""
    runner.warm_up(lambda done, total, what: None)
    driver = PlanDriver(runner)
    long, short = driver.admit(PROMPTS[2]), driver.admit(PROMPTS[1])
    driver.step([(long, 21), (short, 2)])
    for _ in range(9):
        driver.step([(long, DECODE), (short, DECODE)])
    driver.release(short)
    for _ in range(9):
        driver.step([(long, DECODE)])
    other = driver.admit(PROMPTS[3])
    assert other.row == 1
    driver.step([(long, DECODE), (other, 5)])
    for _ in range(9):
        driver.step([(other, DECODE), (long, DECODE)])
    assert capture.replays == 27
    for request in (long, short, other):
        assert request.output == greedy(request.prompt, len(request.output))
    assert len(long.output) == 29


def test_two_replays_in_flight_do_not_overwrite_each_other(runner: TorchRunner, capture: Recorder) -> None:
    driver = PlanDriver(runner)
    first, second = driver.admit(PROMPTS[0]), driver.admit(PROMPTS[3])
    driver.step([(first, 9), (second, 5)])
    flying = [driver.launch([(first, DECODE), (second, DECODE)], top_logprobs=5)]
    for _ in range(10):
        flying.append(driver.launch([(second, DECODE), (first, DECODE)], top_logprobs=5))
        flying.pop(0).finish()
    flying.pop().finish()
    assert capture.replays == 11
    for request in (first, second):
        assert request.output == greedy(request.prompt, 12)
        logits = dense_logits(WEIGHTS, request.tokens)[len(request.prompt) : -1]
        for found, expected in zip(request.logprobs, logits, strict=True):
            assert found.top_ids[0].tolist() == np.argsort(-expected)[:5].tolist()


def test_more_page_table_entries_than_a_bucket_holds_are_applied(runner: TorchRunner, capture: Recorder) -> None:
    """A row is switched to another's copy of its pages, and its own pages are overwritten."""
    driver = PlanDriver(runner)
    request, twin = driver.admit(PROMPTS[2]), driver.admit(PROMPTS[2])
    driver.step([(request, 20)])
    driver.step([(twin, 20)])
    driver.step([(request, 1)])
    own = request.pages[:5]
    request.pages[:5], request.pages_on_device = twin.pages[:5], 0
    # the row's own pages are the first to be reused
    driver.free_pages.extend(own)
    replays = capture.replays
    driver.step([(request, DECODE)])
    assert capture.replays == replays + 1
    thief = driver.admit(PROMPTS[0] * 2)
    driver.step([(thief, 18)])
    assert set(thief.pages) == set(own)
    driver.generate(request, 6)
    assert request.output == greedy(PROMPTS[2], 6)


class ReadsOnHost(StandIn):
    """Reads only as many pages as the longest row has, whose length it reads from the device."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(self._cut(batch, int(batch.kv_lens.max())))

    def _cut(self, batch: ForwardBatch, longest: int) -> ForwardBatch:
        return replace(batch, page_table=batch.page_table[:, : max(1, -(-longest // 4))])


class BakesIn(ReadsOnHost):
    """The same, but with a length that was read before the capture."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return StandIn.forward(self, self._cut(batch, int(batch.kv_lens.numpy().max())))


def test_a_length_that_is_baked_into_a_capture_changes_what_is_sampled(capture: Recorder) -> None:
    """The failure that these tests would see."""
    eager = stand_in_runner(WEIGHTS, BakesIn)
    driver = PlanDriver(eager)
    assert driver.generate(driver.admit(PROMPTS[2]), 12) == greedy(PROMPTS[2], 12)
    eager.close()
    captured = stand_in_runner(WEIGHTS, BakesIn, capture=capture, graph_buckets=BUCKETS)
    driver = PlanDriver(captured)
    assert driver.generate(driver.admit(PROMPTS[2]), 12) != greedy(PROMPTS[2], 12)
    assert capture.replays == 11
    captured.close()


def test_reading_a_device_value_while_capturing_is_an_error(capture: Recorder) -> None:
    runner = stand_in_runner(WEIGHTS, ReadsOnHost, capture=capture, graph_buckets=BUCKETS)
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        runner.warm_up(lambda done, total, what: None)
    runner.close()


class CapturableAttention:
    """The reference for prefill chunks; for decode rows the same without reading lengths on the host."""

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        if not batch.decode_only:
            return ReferenceAttention().prepare(batch)

        def attend(queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
            rows, heads, head_dim = queries.shape
            keys, values = (
                stored[batch.page_table.long()].transpose(1, 2).reshape(rows, -1, table_slots, head_dim)
                for stored in (kv.keys, kv.values)
            )
            visible = torch.arange(table_slots) < batch.kv_lens[:, None, None, None]
            grouped = queries.view(rows, keys.shape[1], -1, head_dim)
            scores = torch.einsum("rkgd,rksd->rkgs", grouped, keys) * options.scale
            weights = torch.softmax(torch.where(visible, scores, -torch.inf), dim=-1).where(visible, 0.0)
            seen = values.where(visible.transpose(2, 3), 0.0)
            return torch.einsum("rkgs,rksd->rkgd", weights, seen).reshape(rows, heads, head_dim)

        table_slots = batch.page_table.shape[1] * 4
        return attend


def load_ours(checkpoint: Checkpoint, attention: AttentionImplementation) -> Transformer:
    assert checkpoint.reader is not None
    model = build_model(
        checkpoint.config, dtype=torch.float32, device=CPU, operations=NativeOperations(), attention=attention
    )
    load_weights(model, checkpoint.reader, checkpoint.config, pack=False)
    return model


def load_traced(checkpoint: Checkpoint, attention: AttentionImplementation) -> TracedTransformer:
    model, read = build_traced(
        EngineConfig(),
        checkpoint,
        dtype=torch.float32,
        device=CPU,
        operations=NativeOperations(),
        attention=attention,
    )
    model.load(read, pack=False)
    return model


@pytest.mark.parametrize(
    ("family", "impl", "load"),
    [("qwen3", ModelImpl.NATIVE, load_ours), ("stablelm", ModelImpl.TRANSFORMERS, load_traced)],
    ids=["ours", "traced"],
)
def test_a_real_model_can_be_captured(
    family: str, impl: ModelImpl, load: Callable[..., Any], tmp_path: Path, capture: Recorder
) -> None:
    """Everything except attention, whose captured kind is Triton's."""
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, family)), model_impl=impl)
    spec = RunnerSpec((PoolSpec("full", CacheKind.FULL, 40, 4),), 4, 32, 48, checkpoint.config.vocab_size)
    outputs = []
    for attention, recorder in ((NativeAttention(), None), (CapturableAttention(), capture)):
        model = load(checkpoint, attention)
        mixer = checkpoint.config.layers[0].mixer
        shape = (40, mixer.num_kv_heads, 4, mixer.head_dim)
        kv = [LayerMemory(KVPages.allocate(*shape, torch.float32, CPU)) for _ in checkpoint.config.layers]
        runner = TorchRunner(
            PagedTransformer(model, kv), spec, device=CPU, capture=recorder, graph_buckets=BUCKETS if recorder else ()
        )
        runner.warm_up(lambda done, total, what: None)
        driver = PlanDriver(runner)
        requests = [driver.admit(prompt) for prompt in PROMPTS[:2]]
        driver.step([(requests[0], 9), (requests[1], 2)])
        for _ in range(12):
            driver.step([(request, DECODE) for request in requests])
        driver.generate(requests[1], 20)
        outputs.append([request.output for request in requests])
        runner.close()
    assert capture.replays == 12 + 7
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0][1])) > 5


def test_captured_steps_count_expert_tokens_like_others(
    tmp_path: Path, capture: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows in a step of three: the third is padding."""
    # tiles read on the host how many rows each expert has
    monkeypatch.setattr(Experts, "_sorted", lambda layer, x, choice, multiply: layer._by_all(x, choice))
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "qwen3_moe", head_dim=32)))
    spec = RunnerSpec((PoolSpec("full", CacheKind.FULL, 40, 4),), 4, 32, 48, checkpoint.config.vocab_size)
    found = []
    for recorder in (None, capture):
        model = load_ours(checkpoint, CapturableAttention())
        counted = {number: torch.zeros(6, dtype=torch.int64) for number in range(2)}
        pages = [KVPages.allocate(40, 2, 4, 32, torch.float32, CPU) for _ in counted]
        kv = [LayerMemory(own, expert_tokens=counted[number]) for number, own in enumerate(pages)]
        runner = TorchRunner(
            PagedTransformer(model, kv),
            spec,
            device=CPU,
            capture=recorder,
            graph_buckets=BUCKETS if recorder else (),
            counted=counted,
        )
        runner.warm_up(lambda done, total, what: None)
        driver = PlanDriver(runner)
        requests = [driver.admit(prompt) for prompt in PROMPTS[:2]]
        driver.step([(requests[0], 9), (requests[1], 2)])
        for _ in range(5):
            driver.step([(request, DECODE) for request in requests])
        found.append([one.tokens.tolist() for one in runner.expert_load()])
        runner.close()
    assert capture.replays == 5
    assert found[0] == found[1]
    assert [sum(layer) for layer in found[0]] == [3 * (9 + 2 + 5 * 2)] * 2


def graphs_of(
    buckets: Sequence[int],
    forward: Callable[[StepInputs], torch.Tensor],
    dump_row: int,
    mixed: Sequence[Bucket] = (),
) -> StepGraphs:
    return StepGraphs(buckets, FakeCapture(), forward, CpuThread(), dump_row, CPU, mixed=mixed)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6), (7, None)])
def test_the_smallest_bucket_that_has_room_is_taken(rows: int, bucket: int | None) -> None:
    graphs = graphs_of((1, 2, 4, 6), lambda inputs: inputs.rows, dump_row=9)
    plan = decode_plan(np.arange(rows, dtype=np.int32), np.full(rows, 5, np.int32))
    assert graphs.bucket(plan) == (None if bucket is None else Bucket(bucket))
    # a chunk of one token has its token in the plan, and is not a decode row
    chunk = replace(plan, num_decode=rows - 1, tokens=np.array([LAST_TOKEN] * (rows - 1) + [3], np.int32))
    assert graphs.bucket(chunk) is None


def test_a_step_with_a_long_prefix_is_not_replayed() -> None:
    """Run eagerly, its keys are split by the actual number of blocks."""
    graphs = graphs_of((1, 2), lambda inputs: inputs.rows, dump_row=99, mixed=[Bucket(8, 16)])
    plan = mixed_plan(1, 10, 3)
    for longest, bucket in ((4096, Bucket(8, 16)), (4097, None)):
        assert graphs.bucket(replace(plan, kv_lens=np.array([9000, 10, longest], np.int32))) == bucket


def mixed_plan(decode: int, *chunks: int) -> StepPlan:
    """Decode rows with 40 keys, and whole prompts."""
    rows = decode + len(chunks)
    plan = decode_plan(np.arange(rows, dtype=np.int32), np.array([40] * decode + list(chunks), np.int32))
    tokens = np.array([LAST_TOKEN] * decode + list(range(1, 1 + sum(chunks))), np.int32)
    return replace(plan, num_decode=decode, query_lens=np.array([1] * decode + list(chunks), np.int32), tokens=tokens)


@pytest.mark.parametrize(
    ("decode", "chunks", "bucket"),
    [
        (0, (10,), (0, 16)),
        (0, (10, 7), (0, 64)),
        (1, (1,), (8, 16)),
        (9, (64,), (40, 64)),
        (9, (65,), None),  # 296 tokens would exceed the free padding and a quarter on top
        (0, (250, 200), (0, 512)),
        (0, (300,), None),
        (41, (5,), None),
        (0, (513,), None),
        (0, (1,) * 30, (0, 64)),
        (0, (1,) * 31, (0, 64)),
        (0, (1,) * 32, None),
    ],
)
def test_steps_with_prompts_are_padded_where_that_costs_little(
    decode: int, chunks: tuple[int, ...], bucket: tuple[int, int] | None
) -> None:
    mixed = [Bucket(decode, prompt) for decode in (0, 8, 40) for prompt in (16, 64, 256, 512)]
    graphs = graphs_of((1, 2), lambda inputs: inputs.rows, dump_row=99, mixed=mixed)
    expected = None if bucket is None else Bucket(*bucket)
    assert graphs.bucket(mixed_plan(decode, *chunks)) == expected


def test_a_replay_sees_the_plan_and_padding() -> None:
    """Every field of the inputs, from a captured function that returns them."""

    def forward(inputs: StepInputs) -> torch.Tensor:
        fields = (inputs.rows, inputs.kv_lens, inputs.query_starts[1:], inputs.sampled)
        deltas = (inputs.delta_rows, inputs.delta_columns, inputs.delta_pages)
        return torch.stack([*fields, *deltas], dim=1)

    graphs = graphs_of((2, 4), forward, dump_row=9)
    deltas = PageDeltas(*np.array([[7], [3], [55]], np.int32))
    inputs, found = graphs.run(Bucket(4), decode_plan(np.array([7, 2, 5]), np.array([13, 1, 40])), deltas)
    assert inputs.num_decode == 4
    assert found.tolist() == [
        [7, 13, 1, 0, 7, 3, 55],
        [2, 1, 2, 1, 9, 0, 0],
        [5, 40, 3, 2, 9, 0, 0],
        [9, 0, 4, 3, 9, 0, 0],
    ]
    _, found = graphs.run(Bucket(4), decode_plan(np.array([1]), np.array([6])), NO_DELTAS)
    assert found[:, :2].tolist() == [[1, 6], [9, 0], [9, 0], [9, 0]]
    assert found[:, 4:].tolist() == [[9, 0, 0]] * 4
    assert len(graphs) == 1


MIXED = (Bucket(0, 8), Bucket(2, 8), Bucket(4, 32))


def test_steps_with_prompts_are_replayed(capture: Recorder) -> None:
    """Chunks of several requests together with decode rows, padded each time: rows, lengths and pages are data."""
    runner = stand_in_runner(WEIGHTS, max_rows=4, capture=capture, graph_buckets=BUCKETS, mixed_buckets=MIXED)
    runner.warm_up(lambda done, total, what: None)
    assert sorted(capture.captured) == [1, 3, 8, 10, 36]
    driver = PlanDriver(runner)
    requests = [driver.admit(prompt) for prompt in PROMPTS]
    replays = []
    for parts in (
        [(requests[0], 5)],
        [(requests[0], 4), (requests[1], 2)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[2], 6)],
        [(requests[1], DECODE), (requests[2], 3), (requests[3], 5)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[3], DECODE), (requests[2], 12)],
        [(request, DECODE) for request in (requests[2], requests[0], requests[1])],
    ):
        driver.step(parts)
        replays.append(capture.replays)
    assert replays == [1, 2, 3, 4, 5, 6]
    assert runner.report().compiles_after_warm_up == 0
    for request in requests:
        assert request.output == greedy(request.prompt, len(request.output))
    assert [len(request.output) for request in requests] == [4, 5, 2, 2]
    runner.close()


def test_padding_stands_at_position_0_of_page_0() -> None:
    """For any number of padding tokens: no sequence is as long."""
    layout = StepLayout.mixed(2, 3, 40, 0)
    packed = np.zeros(layout.size, np.int32)
    layout.pack(replace(mixed_plan(1, 5), kv_lens=np.array([16, 5], np.int32)), NO_DELTAS, 9, packed)
    rows = RowTensors.zeros(10, 4, CPU)
    rows.page_table[:9] = 7
    batch = build_batch(layout.unpack(torch.from_numpy(packed)), rows, 4)
    assert batch.positions.tolist() == [15, 0, 0, 1, 2, 3, 4, *[0] * 35]
    assert batch.write_slots.tolist() == [31, 0, 28, 29, 30, 31, 28, *[0] * 35]


class DropsPadding(StandIn):
    """Computes no more tokens than the captured step has."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return super().forward(batch) * (torch.arange(len(batch.tokens)) < int(batch.query_starts.numpy()[-2]))[:, None]


def test_a_number_of_tokens_that_is_baked_into_a_capture_changes_what_is_sampled(capture: Recorder) -> None:
    runner = stand_in_runner(WEIGHTS, DropsPadding, capture=capture, mixed_buckets=MIXED, graph_buckets=BUCKETS)
    driver = PlanDriver(runner)
    request = driver.admit(PROMPTS[0])
    driver.step([(request, 3)])
    driver.step([(request, 6)])
    assert capture.replays == 2
    assert request.output != greedy(PROMPTS[0], 1)
    runner.close()


def test_steps_with_prompts_that_read_lengths_on_the_host_are_not_captured() -> None:
    with pytest.raises(ValueError, match="not captured where there are drafts"):
        StepGraphs((1,), FakeCapture(), lambda inputs: inputs.rows, CpuThread(), 9, CPU, drafts=True, mixed=MIXED)


@pytest.mark.parametrize(
    ("keeps_states", "states", "algorithm", "reason"),
    [
        (False, NativeStates(), SpeculativeAlgorithm.NONE, None),
        (False, NativeStates(), SpeculativeAlgorithm.NGRAM, "not supported with speculative_algorithm ngram"),
        (True, TritonStates(), SpeculativeAlgorithm.NONE, None),
        (
            True,
            NativeStates(),
            SpeculativeAlgorithm.NONE,
            "layers with a recurrent state read lengths on the host",
        ),
    ],
)
def test_the_log_says_why_steps_with_prompts_are_not_captured(
    keeps_states: bool,
    states: StateImplementation,
    algorithm: SpeculativeAlgorithm,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = cast(ModelConfig, SimpleNamespace(keeps_states=keeps_states))
    kernels = Kernels(NativeAttention(), AttentionBackend.TRITON, NativeOperations(), NativeSampler(), states=states)
    sizes = Sizes((9,), max_rows=32, token_budget=64, max_context=64, prompt_tokens=64)
    with caplog.at_level(logging.INFO):
        buckets = loading._mixed_buckets(EngineConfig(speculative_algorithm=algorithm), model, kernels, 32, sizes)
    assert buckets == (mixed_buckets(32, 64) if reason is None else ())
    assert caplog.messages == ([] if reason is None else [f"Steps with prompts are not captured: {reason}"])


def test_steps_with_drafts_that_are_read_on_the_host_are_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """By states with the same bits in every step, next to attention that reads nothing there."""
    model = cast(ModelConfig, SimpleNamespace(keeps_states=True))
    states = NativeStates(fixed=True)
    kernels = Kernels(NativeAttention(), AttentionBackend.TRITON, NativeOperations(), NativeSampler(), states=states)
    config = EngineConfig(speculative_algorithm=SpeculativeAlgorithm.NGRAM)
    with caplog.at_level(logging.INFO):
        assert loading._capture(CpuThread(), config, model, torch.device("cuda"), kernels) is None
    assert caplog.messages == [
        "Steps are not captured: layers with a recurrent state read the drafts of a row on the host"
    ]


def test_memory_of_captures_is_measured_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the memory that earlier eager steps, such as a prompt at warm-up, left in the allocator."""
    free, cached = 10_000, 4_000

    def empty_cache() -> None:
        nonlocal free, cached
        free, cached = free + cached, 0

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        nonlocal free
        empty_cache()
        yield
        free -= 300

    for name, stub in {
        "graph_pool_handle": lambda: 1,
        "empty_cache": empty_cache,
        "mem_get_info": lambda _: (free, 20_000),
        "memory_reserved": lambda _: 20_000 - free,
        "CUDAGraph": SimpleNamespace,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    stream = SimpleNamespace(device=CPU, synchronize=lambda: None)
    capture = CudaCapture(cast("torch.cuda.Stream", stream))
    for _ in range(2):
        capture.capture(lambda: torch.zeros(1))
        cached, free = 500, free - 500
    assert capture.memory() == 600


def test_buckets_of_steps_with_prompts() -> None:
    """Few enough for a quick start: at 382 launches of about 12 us, twice each, the host takes a quarter of a second
    (an estimate), and a GPU that many steps of at most 768 tokens. The driver's time to make graphs of them is
    unknown until measured on a GPU."""
    assert len(mixed_buckets(256, 8192)) == 30
    assert max(map(sum, mixed_buckets(256, 8192))) == 768
    assert {bucket.decode for bucket in mixed_buckets(20, 8192)} == {0, 8, 20}
    assert {bucket.decode for bucket in mixed_buckets(8, 8192)} == {0, 8}
    # no bucket that no step could fill
    for most, prompts in {16: {16}, 17: {16, 64}, 128: {16, 64, 128}, 8192: {16, 64, 128, 256, 512}}.items():
        assert {bucket.prompt for bucket in mixed_buckets(8, most)} == prompts


def test_buckets_of_rows() -> None:
    assert row_buckets(1) == (1,)
    assert row_buckets(2) == (1, 2)
    assert row_buckets(5) == (1, 2, 4, 5)
    assert row_buckets(32) == (1, 2, 4, 8, 16, 24, 32)
    for most in range(1, 600):
        buckets = row_buckets(most)
        assert list(buckets) == sorted(set(buckets))
        assert buckets[-1] == most
        # no captured step has more than twice its rows, or, from 16 rows on, more than half as many again
        for rows in range(1, most + 1):
            bucket = next(bucket for bucket in buckets if bucket >= rows)
            assert bucket <= 2 * rows
            assert rows < 16 or bucket <= 1.5 * rows
