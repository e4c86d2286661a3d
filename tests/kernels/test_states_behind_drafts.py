"""Steps whose rows have drafts: states and outputs equal those of as many successive decode steps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.state_steps import DRAFTED_SLOTS, DraftedStep, drafted_step, random_scan
from helpers.tpu_interpreter import CopyMode, Interpreted

from sglang_jax.kernels.causal_convolution import tail_shape
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs
from sglang_jax.kernels.states import convolve_states, scan_states

STEP = drafted_step()
XLA, PALLAS = AttentionImplementation.XLA, AttentionImplementation.PALLAS
FIXED = AttentionImplementation.PALLAS_FIXED
Run = Callable[..., tuple[jax.Array, jax.Array]]


def rows_of(begin: list[int], own: list[int], drafts: list[int] | None) -> StateRows:
    count = len(own)
    places = jnp.arange(count)
    return StateRows(
        begin=jnp.array(begin, jnp.int32),
        fresh=jnp.zeros(count, bool),
        own=jnp.array(own, jnp.int32),
        sequences=places,
        offsets=0 * places,
        query_starts=jnp.arange(count + 1),
        num_decode=jnp.int32(count),
        decode_only=True,
        drafts=None if drafts is None else jnp.array(drafts, jnp.int32),
    )


def filled(*shape: int) -> jax.Array:
    """Random values in the slots that rows start from, NaN in all others."""
    pool = np.full((DRAFTED_SLOTS, *shape), np.nan, np.float32)
    begun = sorted(set(STEP.begin))
    pool[begun] = np.random.default_rng(2).standard_normal((len(begun), *shape))
    return jnp.asarray(pool)


scan_once = jax.jit(partial(scan_states, XLA))
convolve_once = jax.jit(lambda x, weight, pool, rows: convolve_states(XLA, x, weight, None, pool, rows))


def in_interpreter(function: Run) -> Run:
    """TPU kernels, in the interpreter mode that detects a state that is read before it is written."""
    interpreted = Interpreted(function)

    def run(*arguments: object) -> tuple[jax.Array, jax.Array]:
        found, races = interpreted.run(CopyMode.EAGER, *arguments)
        assert not races
        return found

    return run


SCANS = {
    "xla": scan_once,
    "pallas": in_interpreter(partial(scan_states, PALLAS)),
    "fixed": in_interpreter(partial(scan_states, FIXED)),
}
CONVOLUTIONS = {
    "xla": convolve_once,
    "pallas": in_interpreter(lambda x, weight, pool, rows: convolve_states(PALLAS, x, weight, None, pool, rows)),
    "fixed": in_interpreter(lambda x, weight, pool, rows: convolve_states(FIXED, x, weight, None, pool, rows)),
}


def one_by_one(step: DraftedStep, sequence: int) -> StateRows:
    return rows_of([step.source(sequence)], [step.own[sequence]], None)


@pytest.mark.parametrize(
    ("run", "dtype", "delta"),
    [
        *itertools.product([SCANS["xla"]], [jnp.float32, jnp.bfloat16], [True, False]),
        (SCANS["pallas"], jnp.float32, True),
        (SCANS["pallas"], jnp.bfloat16, False),
        (SCANS["fixed"], jnp.float32, True),
    ],
)
def test_matrices_after_drafts_equal_those_of_decode_steps(run: Run, delta: bool, dtype: jnp.dtype) -> None:
    count = len(STEP.own)
    arrays = [None if array is None else jnp.asarray(array[:count]) for array in random_scan(delta)]
    inputs, pool = ScanInputs(*arrays), filled(4, 8, 16).astype(dtype)
    expected = pool
    found, pool = run(inputs, pool, rows_of(STEP.begin, STEP.own, STEP.drafts))
    assert pool.dtype == dtype
    for sequence in range(count):
        part = ScanInputs(*(None if array is None else array[sequence : sequence + 1] for array in arrays))
        output, expected = scan_once(part, expected, one_by_one(STEP, sequence))
        np.testing.assert_allclose(found[sequence], output[0], rtol=1e-6, atol=1e-6, err_msg=f"sequence {sequence}")
    np.testing.assert_allclose(pool[1:], expected[1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("run", "tiled"),
    [
        (CONVOLUTIONS["xla"], False),
        (CONVOLUTIONS["xla"], True),
        (CONVOLUTIONS["pallas"], True),
        pytest.param(CONVOLUTIONS["fixed"], True, marks=pytest.mark.soak),
    ],
    ids=["xla, plain slots", "xla, tiled slots", "pallas", "pallas, fixed"],
)
def test_conv_inputs_after_drafts_equal_those_of_decode_steps(run: Run, tiled: bool, width: int) -> None:
    count = len(STEP.own)
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((count, 5), np.float32), rng.standard_normal((5, width), np.float32)
    shape = tail_shape(width - 1, 5, tiled=tiled)
    pool = filled(*shape)
    if tiled:
        pool = pool.reshape(DRAFTED_SLOTS, width - 1, -1).at[1:, :, 5:].multiply(0).reshape(pool.shape)
    expected = pool
    found, pool = run(jnp.asarray(x), jnp.asarray(weight), pool, rows_of(STEP.begin, STEP.own, STEP.drafts))
    for sequence in range(count):
        part = jnp.asarray(x[sequence : sequence + 1])
        output, expected = convolve_once(part, jnp.asarray(weight), expected, one_by_one(STEP, sequence))
        np.testing.assert_allclose(found[sequence], output[0], rtol=1e-6, atol=1e-6, err_msg=f"sequence {sequence}")
    np.testing.assert_array_equal(pool[1:], expected[1:])


def test_no_pool_is_copied() -> None:
    """The pool is larger than everything that a step computes."""
    count = len(STEP.own)
    arrays = [None if array is None else jnp.asarray(array[:count]) for array in random_scan(True)]
    run = jax.jit(lambda inputs, pool, rows: scan_states(XLA, inputs, pool, rows), donate_argnums=1)
    rows = rows_of(STEP.begin, STEP.own, STEP.drafts)
    text = run.lower(ScanInputs(*arrays), filled(4, 8, 16), rows).compile().as_text()
    assert f"f32[{DRAFTED_SLOTS},4,8,16]" in text
    assert not re.search(rf"= f32\[{DRAFTED_SLOTS},4,8,16\]\S* copy\(", text)


def test_steps_without_drafts_are_unchanged() -> None:
    """The same bits, whether or not the program supports drafts."""
    arrays = [None if array is None else jnp.asarray(array[:3]) for array in random_scan(True)]
    inputs, pool, rows = ScanInputs(*arrays), filled(4, 8, 16), rows_of([1, 9, 3], [1, 2, 3], [0, 0, 0])
    for found, expected in zip(
        scan_once(inputs, pool, rows), scan_once(inputs, pool, replace(rows, drafts=None)), strict=True
    ):
        np.testing.assert_array_equal(found[1:], expected[1:])
