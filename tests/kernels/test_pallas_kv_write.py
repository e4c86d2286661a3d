"""The kernel that writes pages, in the interpreter: stored values, untouched slots, and races."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tpu_interpreter import CopyMode, Interpreted

from sglang_jax.kernels import kv_write
from sglang_jax.kernels.kv_storage import from_storage, page_shape, write_kv
from sglang_jax.kernels.kv_write import find_runs, write_kv_on_tpu
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Chip

PAGES, PAGE_SIZE = 9, 32

SLOTS = {
    "rows of a batch and padding": [3 * 32 + 5, 7 * 32 + 31, 2 * 32, 0, 0],
    "chunks over tiles and pages": [
        *range(4 * 32 + 13, 5 * 32),
        *range(8 * 32, 8 * 32 + 9),
        5 * 32 + 8,
        *range(6 * 32, 7 * 32),
        0,
        0,
    ],
    "nothing": [0, 0, 0],
    "more than a program takes": [*range(32 + 5, 3 * 32 + 20), *range(7 * 32 + 7, 7 * 32 + 16)],
}
LONGEST = max(len(slots) for slots in SLOTS.values())
OF_A_PROGRAM = 64

FORMS = {
    "float32": ("float32", 64),
    "bfloat16": ("bfloat16", 256),
    "int8": ("int8", 80),
    "float8": ("float8_e4m3fn", 64),
}
CASES = [("bfloat16", CopyMode.ON_WAIT), *zip(FORMS, [CopyMode.ON_WAIT, CopyMode.EAGER] * 2, strict=True)]


@pytest.mark.parametrize(("form", "mode"), CASES, ids=str)
def test_pages_after_a_write(monkeypatch: pytest.MonkeyPatch, form: str, mode: CopyMode) -> None:
    """The same pages as after a plain scatter, except page 0; every case is one more run of the same program."""
    monkeypatch.setattr(kv_write, "_TOKENS_PER_PROGRAM", OF_A_PROGRAM)
    assert sorted(len(slots) > OF_A_PROGRAM for slots in SLOTS.values()) == [False, False, False, True]
    storage, head_dim = FORMS[form]
    rng = np.random.default_rng(0)
    shape = page_shape(PAGES, 2, PAGE_SIZE, head_dim, tiled=True)
    before = jnp.asarray(rng.integers(-100, 100, shape), storage)
    scales = jnp.asarray(rng.uniform(0.01, 0.02, (2, 2)), jnp.float32) if before.dtype.itemsize == 1 else None
    keys, values = jnp.asarray(rng.standard_normal((2, LONGEST, 2, head_dim)), jnp.float32)

    def write_on_tpu(
        pages: jax.Array, keys: jax.Array, values: jax.Array, slots: jax.Array, scales: jax.Array | None
    ) -> jax.Array:
        return write_kv_on_tpu(pages, keys, values, find_runs(pages, slots), scales)

    write = Interpreted(write_on_tpu)
    for slots in SLOTS.values():
        padded = jnp.asarray(slots + [0] * (LONGEST - len(slots)), jnp.int32)
        expected = write_kv(before, keys, values, padded, scales)
        found, raced = write.run(mode, before, keys, values, padded, scales)
        assert not raced
        np.testing.assert_array_equal(from_storage(found[1:]), from_storage(expected[1:]))
        np.testing.assert_array_equal(from_storage(found[0]), from_storage(before[0]))


def write_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> tuple[jax.Array, jax.Array, bool]:
    """Two programs write the slots of one tile of a sequence. Returns the expected pages, the actual ones, and
    whether there was a race."""
    monkeypatch.setattr(kv_write, "_TOKENS_PER_PROGRAM", 32)
    before = jnp.zeros(page_shape(PAGES, 1, PAGE_SIZE, 64, tiled=True), jnp.float32)
    keys, values = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64, 1, 64)), jnp.float32)
    slots = jnp.arange(PAGE_SIZE + 4, PAGE_SIZE + 4 + 64, dtype=jnp.int32)

    def write_on_tpu(pages: jax.Array, keys: jax.Array, values: jax.Array, slots: jax.Array) -> jax.Array:
        return write_kv_on_tpu(pages, keys, values, find_runs(pages, slots))

    found, raced = Interpreted(write_on_tpu, cores=2).run(CopyMode.EAGER, before, keys, values, slots)
    return write_kv(before, keys, values, slots), found, raced


def test_a_tile_of_two_programs_on_a_device_of_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found, raced = write_on_two_cores(monkeypatch)
    assert not raced
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("chip", [Chip.V4, Chip.V5E, Chip.TPU7X])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 128), (8, 128), (32, 96), (16, 256)])
def test_a_program_stays_within_the_vector_memory(kv_heads: int, head_dim: int, chip: Chip, dtype: jnp.dtype) -> None:
    pages = jax.ShapeDtypeStruct(page_shape(9, kv_heads, 64, head_dim, tiled=True), dtype)
    slots = jax.ShapeDtypeStruct((512,), jnp.int32)
    limit = VMEM_LIMITS[chip]
    runs = jax.eval_shape(partial(find_runs, vmem_limit=limit), pages, slots)
    width = runs.shape[2]
    assert kv_write.vmem_bytes(pages, width) < limit
    # narrower only where more tokens would not fit
    assert width == 128 or kv_write.vmem_bytes(pages, width + 32) > limit * 3 // 4


@pytest.mark.soak
def test_cores_that_share_the_writing_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    params = kv_write.pltpu.CompilerParams
    shared = partial(params, dimension_semantics=("parallel",))
    monkeypatch.setattr(kv_write.pltpu, "CompilerParams", lambda dimension_semantics, **others: shared(**others))
    expected, found, raced = write_on_two_cores(monkeypatch)
    assert raced or not np.array_equal(found, expected)


def test_values_beyond_an_8_bit_type_become_its_largest() -> None:
    pages = jnp.zeros(page_shape(2, 1, PAGE_SIZE, 64, tiled=True), jnp.int8)
    keys = jnp.full((1, 1, 64), 1e9)
    written = jax.jit(write_kv)(pages, keys, -keys, jnp.asarray([PAGE_SIZE]), jnp.ones((1, 2)))
    assert set(np.unique(written[1, 0, 0, 0])) == {-128, 127}
