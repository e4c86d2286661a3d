"""States by Triton kernels in the interpreter, against token-by-token computation: NaN in every free slot."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.triton_interpreter import shuffled_programs
from triton.runtime.errors import InterpreterError

from torch_backend.kernels import short_convolution, state_chunks, state_rows
from torch_backend.recurrent import triton as recurrent_triton
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs, reference_scan
from torch_backend.recurrent.triton import TritonStates

assert helpers.triton_interpreter  # imported for its side effects

BLOCK = 32
SLOTS = 24
HEADS, GROUPS, KEY_DIM, VALUE_DIM = 2, 1, 20, 20
CHANNELS, WIDTH = 300, 4


def rows_of(lengths: list[int], num_decode: int, padding: int = 0, fresh: tuple[int, ...] = ()) -> StateRows:
    """Sequences of a step, every other one of which starts from another slot than its own; the last of `num_decode`
    are padding, and so is one after all others. Slots are in no order."""
    real = [index for index in range(len(lengths)) if not num_decode - padding <= index < num_decode]
    slots = np.random.default_rng(2).permutation(np.arange(1, SLOTS))
    own, begin = np.zeros((2, len(lengths)), np.int64)
    own[real] = slots[: len(real)]
    begin[real] = np.where(np.array(real) % 2, slots[: len(real)], slots[len(slots) - len(real) :])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    return StateRows(
        begin=torch.from_numpy(begin),
        fresh=torch.tensor([index in fresh or index not in real for index in range(len(lengths))]),
        own=torch.from_numpy(own),
        sequences=torch.from_numpy(sequences),
        offsets=torch.from_numpy(np.arange(starts[-1]) - starts[sequences]),
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        num_decode=num_decode,
    )


STEPS = {
    "edges of blocks": rows_of([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1], 0, fresh=(1, 4)),
    "decode rows": rows_of([1] * 5, 5, padding=1, fresh=(2,)),
    "decode rows and chunks": rows_of([1, 1, 1, 1, 3, BLOCK + 5, 2], 4, padding=1, fresh=(0, 5)),
    "padding alone": rows_of([1, 1], 2, padding=2),
    "all rows": rows_of([1] * 20 + [2] * 3, 20, fresh=(3,)),
}


def scan_inputs(tokens: int, delta: bool, value_dim: int = VALUE_DIM) -> ScanInputs:
    """Keys are close to each other, as for repeated words; rates and decays of all sizes."""
    rng = np.random.default_rng(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal((tokens, *shape), np.float32))

    keys = 0.3 * numbers(GROUPS, KEY_DIM) + torch.ones(KEY_DIM)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    decays = -torch.exp(2 * numbers(HEADS) - 2)
    # values are a slice of the output of one convolution
    values = numbers(HEADS * value_dim + 7)[:, 7:].unflatten(1, (HEADS, value_dim))
    return ScanInputs(numbers(GROUPS, KEY_DIM), keys, values, decays, numbers(HEADS).sigmoid() if delta else None)


def pool_of(rows: StateRows, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States in the slots that sequences start from; NaN in all others."""
    pool = torch.full((SLOTS, *shape), torch.nan, dtype=dtype)
    begun = rows.begin[~rows.fresh]
    rng = np.random.default_rng(4)
    pool[begun] = torch.from_numpy(rng.standard_normal((len(begun), *shape), np.float32)).to(dtype)
    return pool


def expected_scan(rows: StateRows, inputs: ScanInputs, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token in float64: outputs, and the pool afterwards."""
    before, after = rows.read(pool).double(), pool.clone()
    outputs = torch.zeros(inputs.values.shape, dtype=torch.float64)
    for sequence, (first, last) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        if rows.own[sequence] == 0 or first == last:
            continue
        part = inputs.part(first, last)
        fields = (part.queries, part.keys, part.values, part.decays, part.rates)
        part = ScanInputs(*(None if field is None else field.double() for field in fields))
        outputs[first:last], state = reference_scan(part, before[sequence])
        after[rows.own[sequence]] = state.to(pool.dtype)
    return outputs, after


def real_tokens(rows: StateRows) -> torch.Tensor:
    return (rows.own > 0).repeat_interleave(rows.query_starts.diff().long())


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-4) -> None:
    """Asserts that free slots are still NaN."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def check_scan(rows: StateRows, delta: bool, dtype: torch.dtype = torch.float32, value_dim: int = VALUE_DIM) -> None:
    inputs = scan_inputs(int(rows.query_starts[-1]), delta, value_dim)
    pool = pool_of(rows, HEADS, KEY_DIM, value_dim, dtype=dtype)
    expected, after = expected_scan(rows, inputs, pool)
    found = TritonStates().prepare(rows).scan(inputs, pool)
    assert found.dtype == torch.float32
    assert not found.isnan().any()
    real = real_tokens(rows)
    assert_near(found[real], expected[real])
    assert_near(pool[1:], after[1:], 2e-4 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_scans_equal_token_by_token_computation(rows: StateRows, delta: bool) -> None:
    check_scan(rows, delta)


def test_columns_are_split_among_programs() -> None:
    check_scan(STEPS["decode rows and chunks"], True, value_dim=36)


def test_states_in_bfloat16_are_rounded_once_a_step() -> None:
    check_scan(STEPS["decode rows and chunks"], True, torch.bfloat16)


def check_convolution(rows: StateRows, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> None:
    rng = np.random.default_rng(6)
    tokens = int(rows.query_starts[-1])
    # inputs that are slices of larger arrays, and of a type that is rounded before the computation
    x = torch.from_numpy(rng.standard_normal((tokens, CHANNELS + 9), np.float32))[:, 9:]
    weight = torch.from_numpy(rng.standard_normal((CHANNELS, width), np.float32)).to(dtype)
    bias = torch.from_numpy(rng.standard_normal(CHANNELS, np.float32)).to(dtype)
    pool = pool_of(rows, width - 1, CHANNELS, dtype=dtype)
    expected_pool = pool.clone()
    expected = NativeStates().prepare(rows).convolve(x, weight, bias, expected_pool)
    found = TritonStates().prepare(rows).convolve(x, weight, bias, pool)
    real = real_tokens(rows)
    assert_near(found[real], expected[real], 1e-5)
    assert torch.equal(pool[1:].nan_to_num(9.0), expected_pool[1:].nan_to_num(9.0))


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_convolutions_equal_torchs(rows: StateRows) -> None:
    check_convolution(rows)


def test_convolutions_of_other_widths_and_types() -> None:
    check_convolution(STEPS["decode rows and chunks"], torch.bfloat16, width=3)
    check_convolution(STEPS["decode rows and chunks"], torch.float16, width=2)


def alone(rows: StateRows, sequence: int) -> tuple[StateRows, slice]:
    """One sequence of a step as the only one, and its tokens."""
    first, last = rows.starts[sequence], rows.starts[sequence + 1]
    decode = sequence < rows.num_decode
    return StateRows(
        begin=rows.begin[sequence : sequence + 1],
        fresh=rows.fresh[sequence : sequence + 1],
        own=rows.own[sequence : sequence + 1],
        sequences=torch.zeros(last - first, dtype=torch.int64),
        offsets=torch.arange(last - first),
        query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        num_decode=int(decode),
    ), slice(first, last)


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
def test_a_sequence_is_batch_invariant(delta: bool) -> None:
    """The same bits as the only sequence and with others, and with programs in any order."""
    rows = STEPS["decode rows and chunks"]
    inputs = scan_inputs(int(rows.query_starts[-1]), delta)
    pool = pool_of(rows, HEADS, KEY_DIM, VALUE_DIM)
    tails = pool_of(rows, WIDTH - 1, CHANNELS)
    x = torch.from_numpy(np.random.default_rng(7).standard_normal((len(inputs.values), CHANNELS), np.float32))
    weight = torch.ones(CHANNELS, WIDTH)

    def compute(of: StateRows, tokens: slice) -> tuple[torch.Tensor, ...]:
        fields = (inputs.queries, inputs.keys, inputs.values, inputs.decays, inputs.rates)
        part = ScanInputs(*(None if field is None else field[tokens] for field in fields))
        own, own_tails = pool.clone(), tails.clone()
        step = TritonStates().prepare(of)
        return step.scan(part, own), own, step.convolve(x[tokens], weight, None, own_tails), own_tails

    together = compute(rows, slice(None))
    for sequence in (0, 2, 4, 5):
        one, tokens = alone(rows, sequence)
        outputs, own, convolved, own_tails = compute(one, tokens)
        slot = int(rows.own[sequence])
        assert torch.equal(outputs, together[0][tokens])
        assert torch.equal(own[slot], together[1][slot])
        assert torch.equal(convolved, together[2][tokens])
        assert torch.equal(own_tails[slot], together[3][slot])
    with shuffled_programs(1):
        shuffled = compute(rows, slice(None))
    for one_of, other in zip(together, shuffled, strict=True):
        assert torch.equal(one_of[1:].nan_to_num(9.0), other[1:].nan_to_num(9.0))


def test_layers_of_one_step_share_plans_where_possible() -> None:
    """Layers with a delta rule alternate with layers without one, of other sizes: they share no buffer content."""
    rows = STEPS["decode rows and chunks"]
    step = TritonStates().prepare(rows)
    tokens = int(rows.query_starts[-1])
    for delta in (True, False, True):
        inputs = scan_inputs(tokens, delta)
        pool = pool_of(rows, HEADS, KEY_DIM, VALUE_DIM)
        expected, _ = expected_scan(rows, inputs, pool)
        assert_near(step.scan(inputs, pool), expected)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "falcon_h1"])
def test_a_model_gives_the_same_logits(architecture: str, tmp_path: Path) -> None:
    """Strides, groups and gates of real layers; a chunk of more than a block, one together with a decode row, decode
    rows."""
    folder = make_tiny_checkpoint(tmp_path, architecture)
    prompts = [np.random.default_rng(8).integers(0, 300, length).astype(np.int32) for length in (40, 9)]
    steps: list[dict[int, int]] = [{0: 37}, {0: 1, 1: 6}, {0: 1, 1: 1}, {1: 2, 0: 1}]
    native, triton = (
        TorchPagedModel(folder, states=states).run(prompts, steps) for states in (NativeStates(), TritonStates())
    )
    for found, expected in zip(triton, native, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_unsupported_options_are_errors() -> None:
    rows = STEPS["decode rows"]
    inputs, pool = scan_inputs(5, True), pool_of(rows, HEADS, KEY_DIM, VALUE_DIM)
    step = TritonStates().prepare(rows)
    with pytest.raises(ValueError, match="those of a token side by side"):
        step.scan(replace(inputs, values=inputs.values.transpose(1, 2).contiguous().transpose(1, 2)), pool)
    with pytest.raises(ValueError, match=r"keys are torch\.float64"):
        step.scan(replace(inputs, keys=inputs.keys.double()), pool)
    with pytest.raises(ValueError, match=r"rates are \[5, 3\]"):
        step.scan(replace(inputs, rates=torch.ones(5, 3)), pool)
    with pytest.raises(ValueError, match="the pool is"):
        step.convolve(torch.ones(5, CHANNELS), torch.ones(CHANNELS, WIDTH), None, torch.ones(SLOTS, WIDTH, CHANNELS))


# -- Planted faults: a changed kernel must fail the check
# --------------------------------------------------------------

MIXED = STEPS["decode rows and chunks"]
IN_SCANS, IN_CONVOLUTIONS = partial(check_scan, MIXED, True), partial(check_convolution, MIXED)
IGNORED_FRESH = "tl.load(fresh + row) == 0", "tl.load(fresh + row) >= 0"

FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "decode: gate after the update": (
        state_rows,
        "state += key[:, None] * value[None, :]",
        "state += key[:, None] * value[None, :] * tl.exp(tl.load(decays + row * HEADS + head))",
    ),
    "decode: output before the update": (
        state_rows,
        "tl.sum(query[:, None] * state, 0)",
        "tl.sum(query[:, None] * (state - key[:, None] * value[None, :]), 0)",
    ),
    "decode: written where it was read": (
        state_rows,
        "pool + tl.load(own + place) * size",
        "pool + tl.load(begin + place) * size",
    ),
    "decode: read where it is written": (
        state_rows,
        "pool + tl.load(begin + row) * size",
        "pool + tl.load(own + row) * size",
    ),
    "decode: a new sequence begins with a slot": (state_rows, *IGNORED_FRESH),
    "decode: another head's keys": (state_rows, "head // TIMES", "head % TIMES"),
    "decode: rates left out": (state_rows, "if rates is not None", "if False"),
    "chunks: the last token left out": (
        state_chunks,
        "last = tl.load(query_starts + row + 1)",
        "last = tl.load(query_starts + row + 1) - 1",
    ),
    "chunks: decays without a mask at the tail": (
        state_chunks,
        "mask=inside, other=0.0)\n        decay, passed",
        "mask=inside, other=-1.0)\n        decay, passed",
    ),
    "chunks: the state after a block is a decay off": (
        state_chunks,
        "tl.exp(passed - decay)",
        "tl.exp(passed - decay + logs)",
    ),
    "chunks: a token depends on those behind it": (
        state_chunks,
        "places[:, None] >= places[None, :]",
        "places[:, None] >= 0 * places[None, :]",
    ),
    "chunks: a system without rates": (state_chunks, "rate[:, None] * between * of_keys", "between * of_keys"),
    "chunks: corrected by a state without decay": (state_chunks, "since * there", "there"),
    "chunks: written where it was read": (
        state_chunks,
        "slot = tl.load(own + row)",
        "slot = tl.load(begin + row)",
    ),
    "chunks: a new sequence begins with a slot": (state_chunks, *IGNORED_FRESH),
    "chunks: another head's keys": (state_chunks, "(head // TIMES)", "(head % TIMES)"),
    "chunks: the first numbers of keys for all": (state_chunks, "+ part * PART, mask=has_key", ", mask=has_key"),
    "inverse: a level too few": (state_chunks, "range(1, LEVELS)", "range(1, LEVELS - 1)"),
    "inverse: in the wrong order": (state_chunks, "tl.dot(left, inverse", "tl.dot(inverse, left"),
    "blocks of the sequence before": (
        state_chunks,
        "tl.load(query_starts + num_decode + row) + (item",
        "tl.load(query_starts + num_decode + tl.maximum(row - 1, 0)) + (item",
    ),
    "convolution of a row: a tap off": (short_convolution, "WIDTH + place, mask", "WIDTH + (place + 1) % kept, mask"),
    "convolution of a row: inputs are not moved": (short_convolution, "(place - 1) * channels", "place * channels"),
    "convolution of a row: begins with a slot": (short_convolution, *IGNORED_FRESH),
    "convolution: a chunk's first token": (short_convolution, "offset >= back", "offset > back"),
    "convolution: a chunk begins with a slot": (short_convolution, "other=1) == 0", "other=1) >= 0"),
    "convolution: kept a token too early": (short_convolution, "+ place - kept", "+ place - kept - 1"),
    "convolution: older inputs of another place": (short_convolution, "(place + length)", "place"),
}


@pytest.mark.soak
@pytest.mark.parametrize(("module", "right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: ModuleType, right: str, wrong: str
) -> None:
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert right in text
    path = tmp_path / "faulty.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty", path)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty", faulty)
    spec.loader.exec_module(faulty)
    launchers = {
        state_rows: ("scan_rows",),
        state_chunks: ("scan_chunks",),
        short_convolution: ("convolve_rows", "convolve_chunks"),
    }[module]
    for name in launchers:
        monkeypatch.setattr(recurrent_triton, name, getattr(faulty, name))
    with pytest.raises((AssertionError, InterpreterError)):
        (IN_CONVOLUTIONS if module is short_convolution else IN_SCANS)()
