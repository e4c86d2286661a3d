"""Paged attention against plain numpy: ragged lengths, shuffled pages, and NaN in every slot without a token. `KERNELS`
are those for CPUs, called from a program of XLA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_steps import Case, Step, make_step

from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.attention_kernels import cpu_attention
from sglang_jax.kernels.kv_storage import gather_kv, page_shape, write_kv
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, ragged_paged_attention, xla
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttention, HeadForm

Implementation = AttentionImplementation | Literal["kernels"]
KERNELS: Implementation = "kernels"
OF_JAX: tuple[Implementation, ...] = (AttentionImplementation.REFERENCE, AttentionImplementation.XLA)
IMPLEMENTATIONS = (*OF_JAX, KERNELS)
STORAGES = ("float32", "bfloat16", "uint16")
TOLERANCE = 2e-5
"""The same for every cache type: values are rounded before the oracle sees them."""
TOLERANCE_OF_PAIRS = 2e-2
"""Of kernels for prompts over bfloat16: queries and weights are rounded to it too."""


ATTENTION = jax.jit(ragged_paged_attention, static_argnums=0, static_argnames="scale")
BY_KERNELS = jax.jit(CpuAttention.__call__, static_argnums=0, static_argnames="scale")


def attend(implementation: Implementation, step: Step) -> np.ndarray:
    arguments = step.queries, step.kv_pages, step.batch
    run = partial(BY_KERNELS, kernels_for(step)) if implementation == KERNELS else partial(ATTENTION, implementation)
    return np.asarray(run(*arguments, scale=step.scale, options=step.options))


def kernels_for(step: Step) -> CpuAttention:
    kv_heads, head_dim = step.kv_pages.shape[1], step.kv_pages.shape[4]
    dtype = jnp.dtype(jnp.float32 if step.kv_pages.dtype == jnp.float32 else jnp.bfloat16)
    folder = EngineConfig().cache_folder()
    found = cpu_attention(HeadForm(head_dim, step.queries.shape[1] // kv_heads), kv_dtype=dtype, cache_folder=folder)
    assert found is not None
    return found


def check(implementation: Implementation, case: Case, seed: int = 0) -> None:
    step = make_step(case, seed)
    output = attend(implementation, step)
    real, decoded = int(step.batch.query_starts[-1]), case.num_decode
    rounds = implementation == KERNELS and case.storage != "float32"
    np.testing.assert_allclose(output[:decoded], step.expected[:decoded], atol=TOLERANCE, rtol=0)
    tolerance = TOLERANCE_OF_PAIRS if rounds else TOLERANCE
    np.testing.assert_allclose(output[decoded:real], step.expected[decoded:real], atol=tolerance, rtol=0)
    np.testing.assert_array_equal(output[real:], 0.0)


MIXED = Case(kv_lens=(9, 1, 30, 7), query_lens=(1, 1, 13, 7), num_decode=2, tokens=32, rows=6)
WHOLE = Case((1, 1, 30, 300), (1, 1, 30, 300), num_decode=2, tokens=352, rows=6, page_size=16, causal=False)
DECODE = Case(kv_lens=(9, 1, 30, 140), query_lens=(1, 1, 1, 1), num_decode=4, tokens=8, rows=8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", [MIXED, DECODE], ids=["mixed", "decode"])
def test_types_of_the_cache(implementation: Implementation, case: Case, storage: str) -> None:
    check(implementation, replace(case, storage=storage))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (4, 128), (8, 96), (3, 128), (8, 64)])
def test_heads(implementation: Implementation, group: int, head_dim: int) -> None:
    check(implementation, replace(MIXED, group=group, head_dim=head_dim))


@pytest.mark.parametrize("implementation", OF_JAX)
@pytest.mark.parametrize("case", [MIXED, DECODE], ids=["mixed", "decode"])
def test_values_may_be_a_slice_of_the_keys(implementation: Implementation, case: Case) -> None:
    check(implementation, replace(case, kv_heads=1, group=4, head_dim=72, value_dim=48))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_page_sizes_and_their_edges(implementation: Implementation, page_size: int) -> None:
    kv_lens = tuple(max(length, 1) for length in (page_size - 1, page_size, page_size + 1, 2 * page_size))
    for num_decode in (0, 3):
        query_lens = tuple(1 if row < num_decode else min(length, 40) for row, length in enumerate(kv_lens))
        case = Case(kv_lens, query_lens, num_decode, 160, rows=5, group=1, page_size=page_size, columns=5)
        check(implementation, case)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, AttentionImplementation.XLA_FIXED])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_texts_whose_tokens_see_all_others(implementation: Implementation, soft_cap: float | None) -> None:
    check(implementation, replace(WHOLE, soft_cap=soft_cap, sinks=soft_cap is not None))


def test_texts_whose_tokens_see_all_others_as_decode_rows() -> None:
    step = make_step(WHOLE)
    causal = replace(step, batch=step.batch.seeing_all(), options=replace(step.options, causal=True))
    np.testing.assert_allclose(attend(AttentionImplementation.XLA, causal), step.expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 300])
def test_edges_of_blocks(implementation: Implementation, length: int) -> None:
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
def test_random_steps(implementation: Implementation, seed: int) -> None:
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
    "windows of long rows": replace(DECODE, kv_lens=(9, 300, 30, 530), window=257, columns=140),
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
def test_options(implementation: Implementation, case: Case) -> None:
    if implementation == KERNELS and jnp.dtype(case.storage).itemsize == 1:
        case = replace(case, storage="uint16")  # no kernels read 8 bits
    check(implementation, case)


@pytest.mark.parametrize("implementation", OF_JAX)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_tiled_pages(implementation: Implementation, head_dim: int) -> None:
    check(implementation, replace(MIXED, head_dim=head_dim, tiled=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [4, 16])
def test_a_step_of_only_padding(implementation: Implementation, tokens: int) -> None:
    check(implementation, Case((), (), 0, tokens, rows=4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_sequences_between_others(implementation: Implementation) -> None:
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


@pytest.mark.parametrize("implementation", [AttentionImplementation.XLA, KERNELS])
def test_a_row_is_batch_invariant(implementation: Implementation) -> None:
    """The same bits for any other rows in the batch."""
    together = make_step(replace(DECODE, kv_lens=(9, 77, 30, 400), columns=100))
    outputs = attend(implementation, together)
    alone = replace(together.batch, kv_lens=together.batch.kv_lens * (jnp.arange(8) < 3))
    np.testing.assert_array_equal(attend(implementation, replace(together, batch=alone))[:3], outputs[:3])


@pytest.mark.parametrize("storage", ["float32", "uint16"])
def test_kernels_give_a_token_the_same_bits_in_any_step(storage: str) -> None:
    """A row that is decoded by itself and next to prompts; a prompt in one chunk, in two, and without the others. All
    of them together are the work of several threads."""
    case = Case((300, 150, 37), (1, 150, 20), 1, 176, rows=4, page_size=16, storage=storage)
    step = make_step(case)
    together = attend(KERNELS, step)

    def again(rows: list[int], first: int, count: int, length: int) -> np.ndarray:
        """One sequence: `count` tokens from the step's token `first` on, the last of `length` keys."""
        batch = replace(
            step.batch,
            page_table=step.batch.page_table[jnp.asarray(rows)],
            kv_lens=jnp.asarray([length], jnp.int32),
            query_starts=jnp.asarray([0, count], jnp.int32),
            num_decode=jnp.int32(count == 1),
        )
        return attend(KERNELS, replace(step, queries=step.queries[first : first + count], batch=batch))

    np.testing.assert_array_equal(again([0], 0, 1, 300), together[:1])
    np.testing.assert_array_equal(again([1], 1, 150, 150), together[1:151])
    np.testing.assert_array_equal(again([1], 1, 101, 101), together[1:102])
    np.testing.assert_array_equal(again([1], 102, 49, 150), together[102:151])
    np.testing.assert_array_equal(again([2], 151, 20, 37), together[151:171])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation: Implementation) -> None:
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
