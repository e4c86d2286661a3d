"""Captured steps of a model with states: with Triton's kernels, steps with prompts are captured too."""

from __future__ import annotations

from collections.abc import Sequence

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.fake_capture import FakeCapture
from helpers.plan_driver import DECODE, PlanDriver
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from torch_backend.attention.native import NativeAttention
from torch_backend.graphs import Bucket
from torch_backend.kv_pages import LayerMemory, StateDtypes
from torch_backend.loading import PagedTransformer
from torch_backend.models import build_model
from torch_backend.native_operations import NativeOperations
from torch_backend.recurrent.interface import StateImplementation
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs
from torch_backend.recurrent.triton import TritonStates
from torch_backend.runner import TorchRunner
from torch_backend.weights import load_weights

assert helpers.triton_interpreter

CPU = torch.device("cpu")
CONTEXT = 48
MIXED = (Bucket(0, 8), Bucket(2, 8), Bucket(3, 24))
PROMPTS = [np.random.default_rng(3).integers(0, 384, length).tolist() for length in (9, 2, 21, 5)]


def _rows(
    begin: torch.Tensor,
    fresh: torch.Tensor,
    own: torch.Tensor,
    sequences: torch.Tensor,
    offsets: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
) -> StateRows:
    return StateRows(begin, fresh, own, sequences, offsets, query_starts, num_decode)


@torch.library.custom_op("sglang_jax_tests::convolve_states", mutates_args=("pool",))
def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    begin: torch.Tensor,
    fresh: torch.Tensor,
    own: torch.Tensor,
    sequences: torch.Tensor,
    offsets: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
) -> torch.Tensor:
    rows = _rows(begin, fresh, own, sequences, offsets, query_starts, num_decode)
    return TritonStates().prepare(rows).convolve(x, weight, bias, pool)


@torch.library.custom_op("sglang_jax_tests::scan_states", mutates_args=("pool",))
def _scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decays: torch.Tensor,
    pool: torch.Tensor,
    begin: torch.Tensor,
    fresh: torch.Tensor,
    own: torch.Tensor,
    sequences: torch.Tensor,
    offsets: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
) -> torch.Tensor:
    rows = _rows(begin, fresh, own, sequences, offsets, query_starts, num_decode)
    return TritonStates().prepare(rows).scan(ScanInputs(queries, keys, values, decays, None), pool)


class TracedStates:
    """Triton's kernels as operations in a trace, with the host arguments of a launch baked in."""

    reads_lengths = False

    def prepare(self, rows: StateRows) -> TracedStates:
        self._rows = rows
        return self

    def _of_step(self) -> tuple[torch.Tensor | int, ...]:
        rows = self._rows
        return rows.begin, rows.fresh, rows.own, rows.sequences, rows.offsets, rows.query_starts, rows.num_decode

    def convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: torch.Tensor
    ) -> torch.Tensor:
        return _convolve(x, weight, bias, pool, *self._of_step())

    def scan(self, inputs: ScanInputs, pool: torch.Tensor) -> torch.Tensor:
        return _scan(inputs.queries, inputs.keys, inputs.values, inputs.decays, pool, *self._of_step())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny_checkpoint(tmp_path_factory.mktemp("mamba2"), "mamba2")))


def runner_of(
    checkpoint: Checkpoint,
    states: StateImplementation,
    capture: FakeCapture | None,
    mixed: Sequence[Bucket] = MIXED,
) -> TorchRunner:
    """A row's only page is its slot."""
    assert checkpoint.reader is not None
    model = build_model(
        checkpoint.config,
        dtype=torch.float32,
        device=CPU,
        operations=NativeOperations(),
        attention=NativeAttention(),
        states=states,
    )
    load_weights(model, checkpoint.reader, checkpoint.config, pack=False)
    memory = []
    for layer in checkpoint.config.layers:
        assert layer.recurrent is not None
        pools = StateDtypes(torch.float32, torch.float32).allocate(9, layer.recurrent.state, CPU)
        memory.append(LayerMemory(None, tuple(pool.fill_(torch.nan) for pool in pools)))
    spec = RunnerSpec((PoolSpec("mamba", CacheKind.STATE, 9, 64),), 4, 32, CONTEXT, checkpoint.config.vocab_size)
    return TorchRunner(
        PagedTransformer(model, memory),
        spec,
        device=CPU,
        capture=capture,
        graph_buckets=(1, 3) if capture else (),
        mixed_buckets=mixed if capture else (),
    )


def outputs_of(runner: TorchRunner) -> list[list[int]]:
    driver = PlanDriver(runner)
    requests = [driver.admit(prompt) for prompt in PROMPTS]
    for parts in (
        [(requests[0], 5)],
        [(requests[0], 4), (requests[1], 2)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[2], 6)],
        [(requests[1], DECODE), (requests[2], 3), (requests[3], 5)],
        [(requests[0], DECODE), (requests[1], DECODE), (requests[3], DECODE), (requests[2], 12)],
        *[[(request, DECODE) for request in requests[1:]]] * 3,
        [(requests[2], DECODE)],
    ):
        driver.step(parts)
    driver.release(requests[0])
    other = driver.admit(PROMPTS[2])
    driver.step([(requests[1], DECODE), (other, 21)])
    driver.step([(requests[1], DECODE), (other, DECODE)])
    return [request.output for request in (*requests, other)]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[list[int]]:
    eager = runner_of(checkpoint, NativeStates(), None)
    found = outputs_of(eager)
    eager.close()
    assert len({token for output in found for token in output}) > 5
    return found


def test_steps_of_a_model_with_states_are_replayed(checkpoint: Checkpoint, expected: list[list[int]]) -> None:
    """Chunks together with decode rows, padded each time: slots and lengths are data, and slots are reused by other
    requests."""
    capture = FakeCapture()
    runner = runner_of(checkpoint, TracedStates(), capture)
    runner.warm_up(lambda done, total, what: None)
    assert outputs_of(runner) == expected
    assert capture.replays == 11
    assert runner.report().compiles_after_warm_up == 0
    runner.close()


def test_decode_steps_that_take_one_token_after_the_other_are_replayed(
    checkpoint: Checkpoint, expected: list[list[int]]
) -> None:
    """States with the same bits in every step. No capture reads a length on the host."""
    capture = FakeCapture()
    runner = runner_of(checkpoint, NativeStates(fixed=True), capture, mixed=())
    assert outputs_of(runner) == expected
    assert capture.replays == 5
    runner.close()


def test_lengths_read_on_the_host_are_baked_in_and_noticed(checkpoint: Checkpoint, expected: list[list[int]]) -> None:
    """A trace keeps their values at capture; a GPU's capture would fail."""
    runner = runner_of(checkpoint, NativeStates(), FakeCapture())
    assert outputs_of(runner) != expected
    runner.close()
