"""The TPU kernels of states in the interpreter, against token-by-token computation: NaN wherever the kernels must
not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pallas_state_rows import faulty_module, pallas_rows
from helpers.state_steps import random_scan
from helpers.tpu_interpreter import CopyMode, Interpreted
from jax.typing import DTypeLike

from sglang_jax.kernels import state_scan_pallas
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_scan import BLOCK, ScanInputs, reference_scan
from sglang_jax.kernels.state_scan_pallas import scan_in_place
from sglang_jax.kernels.states import scan_states

ROWS, SLOTS, TOKENS = 8, 20, 5 * BLOCK
STEPS = {
    "edges of blocks": ([1, BLOCK - 1, BLOCK, BLOCK + 1], 0),
    "decode rows and chunks": ([1, 1, 1, 3, BLOCK + 9, 2], 3),
    "chunks and no decode rows": ([2 * BLOCK + 1], 0),
    "decode rows alone": ([1] * ROWS, ROWS),
    "nothing": ([], 0),
}
DECODES = {"all rows": [1] * ROWS, "some": [1] * 3, "none": list[int]()}


def arrays_of(tokens: int, used: int, delta: bool, sizes: tuple[int, int]) -> list[np.ndarray | None]:
    """`random_scan` with other sizes of keys and values, repeated; NaN after the step's tokens."""
    queries, keys, values, decays, rates = random_scan(delta)
    rng = np.random.default_rng(2)
    if sizes != (8, 16):
        queries, keys = (rng.standard_normal((len(decays), 2, sizes[0]), np.float32) for _ in range(2))
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        values = rng.standard_normal((len(decays), 4, sizes[1]), np.float32)
    found = []
    for array in (queries, keys, values, decays, rates):
        if array is not None:
            array = np.tile(array, (2, *[1] * (array.ndim - 1)))[:tokens].copy()
            array[used:] = np.nan
        found.append(array)
    return found


Scan = Callable[..., tuple[Any, bool]]


def check(
    run: Scan,
    mode: CopyMode,
    counts: list[int],
    num_decode: int,
    *,
    decode_only: bool,
    delta: bool,
    sizes: tuple[int, int],
    states: DTypeLike = jnp.float32,
) -> None:
    rows = pallas_rows(ROWS, SLOTS, counts, num_decode, decode_only=decode_only)
    arrays = arrays_of(ROWS if decode_only else TOKENS, sum(counts), delta, sizes)
    inputs = ScanInputs(*(None if array is None else jnp.asarray(array) for array in arrays))
    before = np.full((SLOTS, 4, *sizes), np.nan, np.float32)
    begun = np.asarray(rows.begin)[~np.asarray(rows.fresh)]
    before[begun] = np.random.default_rng(3).standard_normal((len(begun), 4, *sizes), np.float32)
    kept = jnp.asarray(before, states)
    before = np.asarray(kept, np.float32)
    (outputs, pool), races = run(mode, inputs, kept, rows)
    assert not races
    after, first = before.copy(), 0
    for sequence, count in enumerate(counts):
        part = jax.tree.map(lambda x: x[first : first + count], inputs)  # noqa: B023
        state = np.zeros_like(before[0]) if rows.fresh[sequence] else before[rows.begin[sequence]]
        expected, after[rows.own[sequence]] = reference_scan(part, jnp.asarray(state))
        np.testing.assert_allclose(outputs[first : first + count], expected, rtol=2e-4, atol=2e-5)
        first += count
    np.testing.assert_array_equal(outputs[first:], 0)
    assert pool.dtype == states
    rounded = 2.0**-8 if states == jnp.bfloat16 else 2e-4
    np.testing.assert_allclose(np.asarray(pool[1:], np.float32), after[1:], rtol=rounded, atol=2e-5)


@pytest.fixture(scope="module")
def compiled() -> Interpreted:
    return Interpreted(scan_in_place)


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
@pytest.mark.parametrize("counts", DECODES.values(), ids=DECODES)
def test_decode_steps(compiled: Interpreted, counts: list[int], delta: bool) -> None:
    check(compiled.run, CopyMode.EAGER, counts, len(counts), decode_only=True, delta=delta, sizes=(8, 16))


@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "mamba"])
@pytest.mark.parametrize(("counts", "num_decode"), STEPS.values(), ids=STEPS)
def test_steps_with_chunks(compiled: Interpreted, counts: list[int], num_decode: int, delta: bool) -> None:
    check(compiled.run, CopyMode.EAGER, counts, num_decode, decode_only=False, delta=delta, sizes=(8, 16))


def test_copies_that_arrive_as_late_as_they_may(compiled: Interpreted) -> None:
    """The pipeline makes all copies: one step shows as much as all."""
    counts, num_decode = STEPS["decode rows and chunks"]
    check(compiled.run, CopyMode.ON_WAIT, counts, num_decode, decode_only=False, delta=True, sizes=(8, 16))


@pytest.mark.parametrize(("decode_only", "sizes"), [(True, (128, 16)), (False, (256, 192))])
def test_matrices_of_other_layouts(compiled: Interpreted, decode_only: bool, sizes: tuple[int, int]) -> None:
    """Values that do not fill the lanes are laid out along the lines; keys and values wider than a tile are split."""
    counts, num_decode = ([1] * 3, 3) if decode_only else STEPS["decode rows and chunks"]
    check(compiled.run, CopyMode.EAGER, counts, num_decode, decode_only=decode_only, delta=True, sizes=sizes)


def test_states_of_bfloat16_are_rounded_once_a_step(compiled: Interpreted) -> None:
    counts, num_decode = STEPS["decode rows and chunks"]
    options = {"decode_only": False, "delta": True, "sizes": (8, 16)}
    check(compiled.run, CopyMode.EAGER, counts, num_decode, **options, states=jnp.bfloat16)


def test_a_sequence_is_batch_invariant(compiled: Interpreted) -> None:
    """The same bits as the only sequence and after others: blocks start with the sequence's own tokens."""
    arrays = arrays_of(TOKENS, TOKENS, True, (8, 16))
    pool = jnp.zeros((SLOTS, 4, 8, 16))

    def run(counts: list[int], num_decode: int, first: int) -> tuple[np.ndarray, np.ndarray]:
        rows = pallas_rows(ROWS, SLOTS, counts, num_decode, decode_only=False)
        moved = [None if x is None else jnp.asarray(np.roll(x, first, axis=0)) for x in arrays]
        (outputs, after), _ = compiled.run(CopyMode.EAGER, ScanInputs(*moved), pool, rows)
        length, slot = counts[-1], int(rows.own[len(counts) - 1])
        return np.asarray(outputs[first : first + length]), np.asarray(after[slot])

    alone, beside = run([BLOCK + 9], 0, 0), run([1, 13, BLOCK + 9], 1, 14)
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fixed_states_are_the_same_bits_in_any_chunk() -> None:
    """In a chunk of six tokens, in chunks of two and four, and as decode rows; next to another sequence."""
    arrays = arrays_of(TOKENS, TOKENS, True, (8, 16))
    run = Interpreted(partial(scan_states, AttentionImplementation.PALLAS_FIXED)).run
    options = {"delta": True, "sizes": (8, 16)}
    check(run, CopyMode.EAGER, [1, 1, 5, 2], 2, decode_only=False, **options)

    def outputs(steps: Sequence[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
        """Of the last sequence of each step, which have consecutive tokens; and its last state."""
        found, done, pool = list[np.ndarray](), 0, jnp.zeros((SLOTS, 4, 8, 16))
        for counts, num_decode in steps:
            decode_only, first = num_decode == len(counts), sum(counts[:-1])
            rows = pallas_rows(ROWS, SLOTS, counts, num_decode, decode_only=decode_only)
            last = len(counts) - 1
            own = rows.own.at[last].set(SLOTS - 1)
            rows = replace(
                rows, own=own, begin=rows.begin.at[last].set(SLOTS - 1), fresh=rows.fresh.at[last].set(done == 0)
            )
            size = ROWS if decode_only else TOKENS
            moved = [None if x is None else jnp.asarray(np.roll(x, first - done, axis=0)[:size]) for x in arrays]
            (of_step, pool), races = run(CopyMode.EAGER, ScanInputs(*moved), pool, rows)
            assert not races
            found.append(np.asarray(of_step[first : first + counts[-1]]))
            done += counts[-1]
        return np.concatenate(found), np.asarray(pool[SLOTS - 1])

    whole = outputs([([6], 0)])
    for steps in ([([3, 2], 0), ([1, 4], 1)], [([1], 1)] * 6, [([1, 1], 2), ([5], 0)]):
        for one, other in zip(whole, outputs(steps), strict=True):
            np.testing.assert_array_equal(one, other)


FAULTS = {
    "gate after the update": (
        "state = state + key * value\n",
        "state = state + key * value * factors[0, 0, 0, head]\n",
    ),
    "output before the update": ("jnp.sum(query * state", "jnp.sum(query * (state - key * value)"),
    "decode begins with a free slot": ("is_new = fresh[pl.program_id(1)] != 0", "is_new = fresh[pl.program_id(1)] > 1"),
    "chunk begins with a free slot": ("jnp.where(fresh[row] != 0", "jnp.where(fresh[row] > 1"),
    "decode begins with its own slot": ("begin, *_: (begin[row]", "begin, fresh, own: (own[row]"),
    "decode writes where it began": ("begin, fresh, own: (own[row]", "begin, fresh, own: (begin[row]"),
    "chunk writes where it began": ("starts: (own[first[0] + turn]", "starts: (begin[first[0] + turn]"),
    "chunk without its last token": ("starts[row], starts[row + 1]", "starts[row], starts[row + 1] - 1"),
    "no mask at the tail": ("jnp.where(inside, ref[0, part, here, :], 0.0)", "ref[0, part, here, :]"),
    "the sequence before": ("row = first[0] + pl.program_id(1)", "row = first[0] + pl.program_id(1) - 1"),
    "what a token writes decays with itself": ("jnp.exp(last - decays)", "jnp.exp(last - decays + factors[:, 0:1])"),
    "a system without rates": ("rates * between * _product(keys", "between * _product(keys"),
    "an inverse a level short": ("while size < BLOCK:", "while size < BLOCK // 2:"),
    "padding lies in a slot": ("jnp.where(decoding, rows.own, 0)", "rows.own + 0 * decoding"),
}


@pytest.mark.soak
@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str) -> None:
    faulty = faulty_module(monkeypatch, tmp_path, state_scan_pallas, right, wrong)
    run = Interpreted(faulty.scan_in_place).run
    counts, num_decode = STEPS["chunks and no decode rows" if "decoding" in right else "decode rows and chunks"]
    with pytest.raises(AssertionError):
        check(run, CopyMode.EAGER, counts, num_decode, decode_only=False, delta=True, sizes=(8, 16))
