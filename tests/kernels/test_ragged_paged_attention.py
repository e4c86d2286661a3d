"""Paged attention against plain numpy: ragged lengths, shuffled pages, and NaN in every slot without a token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_steps import Case, Step, make_step

from sglang_jax.kernels.kv_storage import gather_kv, page_shape, write_kv
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, ragged_paged_attention, xla

IMPLEMENTATIONS = (AttentionImplementation.REFERENCE, AttentionImplementation.XLA)
STORAGES = ("float32", "bfloat16", "uint16")
TOLERANCE = 2e-5
"""The same for every cache type: values are rounded before the oracle sees them."""


ATTENTION = jax.jit(ragged_paged_attention, static_argnums=0, static_argnames="scale")


def attend(implementation: AttentionImplementation, step: Step) -> np.ndarray:
    output = ATTENTION(implementation, step.queries, step.kv_pages, step.batch, scale=step.scale, options=step.options)
    return np.asarray(output)


def check(implementation: AttentionImplementation, case: Case, seed: int = 0) -> None:
    step = make_step(case, seed)
    output = attend(implementation, step)
    real = int(step.batch.query_starts[-1])
    np.testing.assert_allclose(output[:real], step.expected[:real], atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(output[real:], 0.0)


MIXED = Case(kv_lens=(9, 1, 30, 7), query_lens=(1, 1, 13, 7), num_decode=2, tokens=32, rows=6)
DECODE = Case(kv_lens=(9, 1, 30, 140), query_lens=(1, 1, 1, 1), num_decode=4, tokens=8, rows=8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [MIXED, DECODE], ids=["mixed", "decode"])
def test_types_of_the_cache(implementation: AttentionImplementation, case: Case, storage: str) -> None:
    check(implementation, replace(case, storage=storage))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (4, 128), (8, 96), (3, 128), (8, 64)])
def test_heads(implementation: AttentionImplementation, group: int, head_dim: int) -> None:
    check(implementation, replace(MIXED, group=group, head_dim=head_dim))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [MIXED, DECODE], ids=["mixed", "decode"])
def test_values_may_be_a_slice_of_the_keys(implementation: AttentionImplementation, case: Case) -> None:
    check(implementation, replace(case, kv_heads=1, group=4, head_dim=72, shared=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_page_sizes_and_their_edges(implementation: AttentionImplementation, page_size: int) -> None:
    kv_lens = tuple(max(length, 1) for length in (page_size - 1, page_size, page_size + 1, 2 * page_size))
    for num_decode in (0, 3):
        query_lens = tuple(1 if row < num_decode else min(length, 40) for row, length in enumerate(kv_lens))
        case = Case(kv_lens, query_lens, num_decode, 160, rows=5, group=1, page_size=page_size, columns=5)
        check(implementation, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 300])
def test_edges_of_blocks(implementation: AttentionImplementation, length: int) -> None:
    """A whole prompt, the end of one, its last token in a mixed step, and its last token in a decode step."""
    for query_len in sorted({1, min(length, 65), length}):
        check(implementation, Case((5, length), (1, query_len), 1, 304, rows=2, kv_heads=1, page_size=16))
    check(implementation, Case((length, 3), (1, 1), 2, 2, rows=2, kv_heads=1, page_size=16))


@pytest.mark.parametrize(
    ("page_size", "columns", "window"),
    [(16, 45, None), (16, 45, 200), (24, 30, 30), (24, 30, 400), (128, 6, None), (128, 6, 400), (512, 2, 200)],
)
def test_keys_that_every_query_sees(page_size: int, columns: int, window: int | None) -> None:
    """Chunks after so long a prefix that blocks between the oldest and the newest need no mask, and lengths around
    that bound."""
    first_keys = (255, 256, 257, 319, 320, 639)
    for first in first_keys:
        kv_lens = (first + 1, first + 70, first + 2)
        case = Case(kv_lens, (1, 70, 2), 1, 80, rows=4, page_size=page_size, columns=columns, window=window)
        check(AttentionImplementation.XLA, replace(case, group=1, kv_heads=1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(8))
def test_random_steps(implementation: AttentionImplementation, seed: int) -> None:
    """One program for all seeds: shapes do not depend on lengths."""
    rng = np.random.default_rng(seed)
    sequences = int(rng.integers(1, 7))
    num_decode = int(rng.integers(0, sequences + 1))
    query_lens, kv_lens = [], []
    for row in range(sequences):
        query_lens.append(1 if row < num_decode else int(rng.integers(1, 15)))
        kv_lens.append(query_lens[-1] + int(rng.integers(0, 150)))
    kv_lens[0] = 160
    case = Case(tuple(kv_lens), tuple(query_lens), num_decode, tokens=96, rows=7, page_size=8)
    check(implementation, case, seed)


OPTIONS = {
    "a window of one": replace(MIXED, window=1),
    "a window": replace(MIXED, kv_lens=(9, 1, 150, 7), window=11, columns=50),
    "a window of decode rows": replace(DECODE, window=11),
    "a soft cap": replace(MIXED, soft_cap=0.7),
    "sinks": replace(MIXED, sinks=True),
    "sinks of decode rows": replace(DECODE, sinks=True),
    "all": replace(MIXED, kv_lens=(9, 1, 150, 7), window=11, columns=50, soft_cap=0.7, sinks=True, storage="int8"),
    "int8": replace(DECODE, storage="int8"),
    "float8": replace(MIXED, storage="float8_e4m3fn"),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS)
def test_options(implementation: AttentionImplementation, case: Case) -> None:
    check(implementation, case)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_tiled_pages(implementation: AttentionImplementation, head_dim: int) -> None:
    check(implementation, replace(MIXED, head_dim=head_dim, tiled=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [4, 16])
def test_a_step_of_only_padding(implementation: AttentionImplementation, tokens: int) -> None:
    check(implementation, Case((), (), 0, tokens, rows=4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_sequences_between_others(implementation: AttentionImplementation) -> None:
    step = make_step(replace(MIXED, rows=4))
    batch = step.batch
    with_gap = replace(
        batch,
        page_table=jnp.insert(batch.page_table, 3, 0, axis=0),
        kv_lens=jnp.insert(batch.kv_lens, 3, 0),
        query_starts=jnp.insert(batch.query_starts, 3, batch.query_starts[3]),
    )
    output = attend(implementation, replace(step, batch=with_gap))
    np.testing.assert_allclose(output, step.expected, atol=2e-5)


def test_a_row_is_batch_invariant() -> None:
    """The same bits for any other rows in the batch."""
    together = make_step(replace(DECODE, kv_lens=(9, 77, 30, 400), columns=100))
    outputs = attend(AttentionImplementation.XLA, together)
    alone = replace(together.batch, kv_lens=together.batch.kv_lens * (jnp.arange(8) < 3))
    np.testing.assert_array_equal(attend(AttentionImplementation.XLA, replace(together, batch=alone))[:3], outputs[:3])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation: AttentionImplementation) -> None:
    step = make_step(MIXED)
    output = attend(implementation, replace(step, queries=step.queries * 1e4))
    assert np.isfinite(output).all()


def test_keys_and_values_are_stored_in_their_slots() -> None:
    kv_pages = jnp.zeros((5, 3, 2, 4, 8), jnp.uint16)
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 6, 3, 8)).astype(np.float32)
    slots = np.array([9, 4, 19, 18, 0, 7], np.int32)
    written = write_kv(kv_pages, jnp.asarray(keys), jnp.asarray(values), jnp.asarray(slots))
    found_keys, found_values = gather_kv(written, jnp.arange(5), 8)
    for token, slot in enumerate(slots):
        np.testing.assert_array_equal(found_keys[:, slot], keys[token].astype(jnp.bfloat16).astype(np.float32))
        np.testing.assert_array_equal(found_values[:, slot], values[token].astype(jnp.bfloat16).astype(np.float32))
    untouched = np.setdiff1d(np.arange(20), slots)
    assert not np.asarray(found_keys)[:, untouched].any()
    assert not np.asarray(found_values)[:, untouched].any()


@pytest.mark.parametrize("size", [40, 576])
def test_latent_vectors_in_tiles_are_keys_and_values(size: int) -> None:
    pages = jnp.full(page_shape(3, 1, 4, size, tiled=True, shared=True), jnp.nan)
    latents = np.random.default_rng(0).standard_normal((4, 1, size)).astype(np.float32)
    written = write_kv(pages, jnp.asarray(latents), None, jnp.arange(8, 12))
    for found in gather_kv(written, jnp.asarray([2]), size):
        np.testing.assert_array_equal(found[0], latents[:, 0])
    assert np.isfinite(written[2]).all(), "what pads them is 0"


def test_memory_depends_on_blocks_and_not_on_the_table() -> None:
    case = replace(DECODE, columns=500)
    step = make_step(case)
    queries = jnp.asarray(step.queries)
    lowered = ATTENTION.lower(AttentionImplementation.XLA, queries, step.kv_pages, step.batch, scale=0.125)
    block_of_keys = case.rows * case.kv_heads * 128 * case.head_dim * 4
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 8 * block_of_keys


@pytest.mark.parametrize("tokens", [1, 8], ids=["decode", "mixed"])
def test_blocks_depend_on_lengths_and_not_on_the_table(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def count_and_gather(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda: read.append(1))
        return gather_kv(*arguments)

    monkeypatch.setattr(xla, "gather_kv", count_and_gather)
    step = make_step(Case((1,), (1,), tokens % 8, tokens, rows=1, kv_heads=1, page_size=16, columns=400))
    attention = jax.jit(partial(ragged_paged_attention, AttentionImplementation.XLA, scale=step.scale))

    def blocks(length: int) -> int:
        read.clear()
        batch = replace(step.batch, kv_lens=jnp.asarray([length], jnp.int32))
        attention(step.queries, step.kv_pages, batch, options=step.options).block_until_ready()
        jax.effects_barrier()
        return len(read)

    assert blocks(1) <= 2
    assert blocks(6400) >= 6400 // 256
    assert blocks(1) <= 2
