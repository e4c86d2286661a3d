"""The TPU kernels of short convolutions in the interpreter, against token-by-token computation: NaN wherever the
kernels must not read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.pallas_state_rows import faulty_module, pallas_rows
from helpers.tpu_interpreter import CopyMode, Interpreted

from sglang_jax.kernels import causal_convolution_pallas
from sglang_jax.kernels.causal_convolution import tail_shape
from sglang_jax.kernels.causal_convolution_pallas import TOKENS as WINDOW
from sglang_jax.kernels.causal_convolution_pallas import convolve_in_place

ROWS, SLOTS, TOKENS = 40, 90, 5 * WINDOW + 4
CHANNELS, WIDTH = 1100, 4
STEPS = {
    "edges of windows": ([1, WINDOW - 1, WINDOW, WINDOW + 1, 2], 0),
    "decode rows and chunks": ([1] * 5 + [3, WINDOW + 9, 2, 1, 40], 5),
    "a window of decode rows": ([1] * (ROWS - 1) + [WINDOW], ROWS - 1),
    "chunks and no decode rows": ([2 * WINDOW + 1], 0),
    "decode rows alone": ([1] * ROWS, ROWS),
    "nothing": ([], 0),
}
MANY = [1] * 39
DECODES = {"all rows": [1] * ROWS, "some": [1] * 9, "none": list[int]()}

Convolve = Callable[..., tuple[Any, bool]]


def reference(x: np.ndarray, taps: np.ndarray, bias: np.ndarray, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32, one token of one sequence at a time: outputs, and the last inputs."""
    found = []
    for token in x:
        window = np.concatenate((tail, token[None]))
        found.append((window * taps.T).sum(axis=0) + bias)
        tail = window[1:]
    return np.array(found).reshape(x.shape), tail


def check(
    run: Convolve, mode: CopyMode, counts: list[int], num_decode: int, *, decode_only: bool, storage: str = "bfloat16"
) -> None:
    rows = pallas_rows(ROWS, SLOTS, counts, num_decode, decode_only=decode_only)
    rng = np.random.default_rng(3)
    used = sum(counts)
    x = rng.standard_normal((ROWS if decode_only else TOKENS, CHANNELS)).astype(np.float32)
    x[used:] = np.nan
    kept = np.asarray(jnp.asarray(x, storage).astype(jnp.float32))
    taps, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((CHANNELS, WIDTH), CHANNELS))
    before = np.full((SLOTS, *tail_shape(WIDTH - 1, CHANNELS, tiled=True)), np.nan, np.float32)
    begun = np.asarray(rows.begin)[~np.asarray(rows.fresh)]
    before[begun] = rng.standard_normal((len(begun), *before.shape[1:]))
    before = np.asarray(jnp.asarray(before, storage).astype(jnp.float32))
    (found, pool), races = run(
        mode, jnp.asarray(x), jnp.asarray(taps), jnp.asarray(bias), jnp.asarray(before, storage), rows
    )
    assert not races

    def plain(pool: np.ndarray) -> np.ndarray:
        return pool.reshape(SLOTS, WIDTH - 1, -1)[..., :CHANNELS]

    expected_pool, first = plain(before).copy(), 0
    for sequence, count in enumerate(counts):
        begin = plain(before)[rows.begin[sequence]] * 1
        if rows.fresh[sequence]:
            begin[:] = 0
        expected, expected_pool[rows.own[sequence]] = reference(kept[first : first + count], taps, bias, begin)
        np.testing.assert_allclose(found[first : first + count], expected, rtol=1e-5, atol=1e-5)
        first += count
    np.testing.assert_array_equal(found[first:], 0)
    np.testing.assert_array_equal(plain(np.asarray(pool.astype(jnp.float32)))[1:], expected_pool[1:])


@pytest.fixture(scope="module")
def compiled() -> Interpreted:
    return Interpreted(convolve_in_place)


@pytest.mark.parametrize("counts", DECODES.values(), ids=DECODES)
def test_decode_steps(compiled: Interpreted, counts: list[int]) -> None:
    check(compiled.run, CopyMode.EAGER, counts, len(counts), decode_only=True)


@pytest.mark.parametrize(("counts", "num_decode"), STEPS.values(), ids=STEPS)
def test_steps_with_chunks(compiled: Interpreted, counts: list[int], num_decode: int) -> None:
    check(compiled.run, CopyMode.EAGER, counts, num_decode, decode_only=False)


def test_copies_that_arrive_as_late_as_they_may(compiled: Interpreted) -> None:
    counts, num_decode = STEPS["decode rows and chunks"]
    check(compiled.run, CopyMode.ON_WAIT, counts, num_decode, decode_only=False)


def test_decode_rows_as_chunks() -> None:
    run = Interpreted(partial(convolve_in_place, fixed=True)).run
    check(run, CopyMode.EAGER, DECODES["some"], 9, decode_only=True)


def tile_by_tile(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Programs of decode rows take a tile each, so that buffers are reused."""
    monkeypatch.setattr(module, "rows_at_once", lambda rows, bytes_of_row: 8)


@pytest.mark.parametrize("mode", CopyMode)
def test_many_programs_of_decode_rows(mode: CopyMode, monkeypatch: pytest.MonkeyPatch) -> None:
    tile_by_tile(monkeypatch, causal_convolution_pallas)
    check(Interpreted(convolve_in_place).run, mode, MANY, len(MANY), decode_only=True, storage="float32")


FAULTS = {
    "decode begins with a free slot": ("fresh[program * at_once + row] != 0", "fresh[program * at_once + row] > 1"),
    "decode begins with its own slot": ("pool.at[begin[program", "pool.at[own[program"),
    "decode leaves what it began with": ("row, pl.ds(1, kept)]", "row, pl.ds(0, kept)]"),
    "decode leaves inputs as they came": ("place in range(kept + 1)]", "place in range(kept)] + [inputs[token]]"),
    "a set is filled before it left": ("pl.when(program >= _SETS - 1)", "pl.when(program < 0)"),
    "decode computes before all is there": ("pltpu.make_async_copy(of_all, of_all, arrived.at[here]).wait()", "pass"),
    "chunk begins with a free slot": ("fresh[sequence] != 0", "fresh[sequence] > 1"),
    "chunk begins with its own slot": ("pool.at[begin[sequence]]", "pool.at[own[sequence]]"),
    "a neighbour is fetched before it left": ("leave(sequence - 1).wait()", "None"),
    "chunk leaves where it began": (
        "before.at[here], pool.at[own[sequence]]",
        "before.at[here], pool.at[begin[sequence]]",
    ),
    "outputs of decode rows are lost": ("pltpu.sync_copy(old.at", "(lambda *_: None)(old.at"),
    "outputs of the sequence before are lost": ("jnp.where(own >= begins, found, outputs[own, column])", "found"),
    "a chunk goes on behind its end": ("inside = (own >= begins) & (own < ends)", "inside = own >= begins"),
    "a chunk begins before its first token": ("inside = (own >= begins) &", "inside = (own >= 0) &"),
    "what is kept is not rounded": ("inputs[at].astype(before.dtype).astype(_FLOAT32)", "inputs[at]"),
    "a tap at another place": ("taps[tap, column] * one", "taps[1, column] * one"),
    "padding lies in a slot": ("jnp.where(decodes, rows.own, 0)", "rows.own + 0 * decodes"),
}


@pytest.mark.soak
@pytest.mark.parametrize(("right", "wrong"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str) -> None:
    faulty = faulty_module(monkeypatch, tmp_path, causal_convolution_pallas, right, wrong)
    tile_by_tile(monkeypatch, faulty)
    run = Interpreted(faulty.convolve_in_place).run
    with pytest.raises(AssertionError):
        check_some(run)


def check_some(run: Convolve) -> None:
    """Steps in which every fault shows."""
    check(run, CopyMode.ON_WAIT, *STEPS["decode rows and chunks"], decode_only=False)
    check(run, CopyMode.EAGER, *STEPS["chunks and no decode rows"], decode_only=False)
    for mode in CopyMode:
        check(run, mode, MANY, len(MANY), decode_only=True)
