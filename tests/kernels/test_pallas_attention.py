"""The TPU kernels in the interpreter, against plain numpy: with late copies over NaN, and with eager copies and race
detection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.attention_steps import Case, Step, make_step
from helpers.tpu_interpreter import CopyMode, Interpreted

from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, ragged_paged_attention
from sglang_jax.kernels.ragged_paged_attention.pallas import blocks, decode_sizes, prefill, shapes
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks
from sglang_jax.kernels.ragged_paged_attention.pallas.pages import PageFetcher
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import HEADS_TOGETHER, PrefillBlocks

MODES = list(CopyMode)
EXACT, ROUNDED = 2e-5, 2e-2
"""Bounds for float32 pages, and for pages whose products are in bfloat16."""

DECODE = Case((), (), 0, tokens=6, rows=6, head_dim=128, page_size=16, columns=20, tiled=True)
MIXED = replace(DECODE, tokens=48)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 keys, so that short sequences have several; programs of few rows and queries, and passes of two
    heads, which compile in half the time."""
    monkeypatch.setattr(blocks, "_decode_by_costs", lambda shape: DecodeBlocks(2, 128 // shape.page_size))
    monkeypatch.setattr(blocks, "_prefill_by_costs", lambda shape: PrefillBlocks(16, 128 // shape.page_size))
    monkeypatch.setattr(prefill, "HEADS_TOGETHER", 2)


@cache
def kernel(scale: float, cores: int = 1) -> Interpreted:
    return Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS, scale=scale, cores=cores)


def attend(step: Step, mode: CopyMode, attention: Interpreted | None = None) -> tuple[np.ndarray, bool]:
    attention = attention or kernel(step.scale)
    output, raced = attention.run(mode, step.queries, step.kv_pages, step.batch, options=step.options)
    return np.asarray(output, np.float32), raced


def check(case: Case, mode: CopyMode, seed: int = 0, attention: Interpreted | None = None) -> None:
    step = make_step(case, seed)
    output, raced = attend(step, mode, attention)
    assert not raced
    real = int(step.batch.query_starts[-1])
    bound = EXACT if case.storage == "float32" else ROUNDED
    np.testing.assert_allclose(output[:real], step.expected[:real], atol=bound, rtol=0)
    np.testing.assert_array_equal(output[real:], 0.0)


def decode(*kv_lens: int) -> Case:
    return replace(DECODE, kv_lens=kv_lens, query_lens=(1,) * len(kv_lens), num_decode=len(kv_lens))


def mixed(kv_lens: tuple[int, ...], query_lens: tuple[int, ...], num_decode: int) -> Case:
    return replace(MIXED, kv_lens=kv_lens, query_lens=query_lens, num_decode=num_decode)


@pytest.mark.parametrize("mode", MODES)
def test_decode_rows(mode: CopyMode) -> None:
    """One row, no row, all rows; lengths around pages of 16 and blocks of 128; one program for all."""
    for kv_lens in ((1,), (), (15, 16, 17, 127, 128, 129), (260, 1, 256, 2, 5, 3)):
        check(decode(*kv_lens), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_last_block_is_computed_as_far_as_it_has_keys(monkeypatch: pytest.MonkeyPatch, mode: CopyMode) -> None:
    """Blocks of 512 keys, of which 512, 384, 256 or 128 are computed, in runs of 256: lengths around each, and after a
    whole block."""
    monkeypatch.setattr(decode_sizes, "_KEYS_OF_SHORT", 128)
    monkeypatch.setattr(decode_sizes, "_SCORES_OF_A_RUN", 512)
    monkeypatch.setattr(blocks, "_decode_by_costs", lambda shape: DecodeBlocks(1, 512 // shape.page_size))
    case = replace(decode(128, 129, 257, 384, 385, 641), columns=48, kv_heads=1, group=2)
    step = make_step(case, 0)
    attention = Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS, scale=step.scale, cores=1)
    check(case, mode, attention=attention)


def in_pairs(*kv_lens: int) -> Case:
    return replace(decode(*kv_lens), kv_heads=1, group=2, page_size=64, columns=20)


@cache
def kernel_of_pairs() -> Interpreted:
    step = make_step(in_pairs(1))
    return Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS, scale=step.scale, cores=1)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Interpreted:
    """Pairs of rows of up to 512 keys share a block, of which there are three; other blocks have 1,024 keys."""
    monkeypatch.setattr(blocks, "_decode_by_costs", lambda shape: DecodeBlocks(2, 1024 // shape.page_size))
    monkeypatch.setattr(decode_sizes, "_MIN_DEPTH", 3)
    monkeypatch.setattr(decode_sizes, "_MAX_DEPTH", 3)
    return kernel_of_pairs()


@pytest.mark.parametrize("mode", MODES)
def test_short_rows_share_a_block(pairs: Interpreted, mode: CopyMode) -> None:
    """In sequence, before and after long rows; next to a row without keys, and to none."""
    for kv_lens in ((512, 3, 16, 511, 1, 200), (300, 0, 513, 5, 17, 40), (1100, 700, 0, 0, 511), (2, 1, 1025)):
        check(in_pairs(*kv_lens), mode, attention=pairs)


def test_the_last_pages_of_the_last_row_of_a_full_table(monkeypatch: pytest.MonkeyPatch, pairs: Interpreted) -> None:
    """The table ends after their page numbers, though the kernel reads as many as a short row may have."""
    monkeypatch.setattr(decode_sizes, "_KEYS_OF_SHORT", 128)
    case = replace(in_pairs(1, 2, 3, 4, 5, 2048), page_size=16, columns=128, window=70)
    check(case, CopyMode.EAGER, attention=pairs)


def test_a_row_is_the_same_in_a_group_and_by_itself(pairs: Interpreted) -> None:
    """The same bits next to a short row, a long one, and one whose keys are NaN."""
    step = make_step(in_pairs(300, 700, 12, 512, 5))
    beside_long, _ = attend(step, CopyMode.ON_WAIT, pairs)
    batch = replace(step.batch, kv_lens=np.array([300, 20, 12, 512, 5, 0], np.int32))
    beside_short, _ = attend(replace(step, batch=batch), CopyMode.ON_WAIT, pairs)
    poisoned = step.kv_pages.at[step.batch.page_table[1, 0]].set(np.nan).at[step.batch.page_table[2, 0]].set(np.nan)
    beside_poison, _ = attend(replace(step, batch=batch, kv_pages=poisoned), CopyMode.ON_WAIT, pairs)
    assert np.isnan(beside_poison[1:3]).all()
    for other in (beside_short, beside_poison):
        np.testing.assert_array_equal(other[[0, 3, 4]], beside_long[[0, 3, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_mixed_steps(mode: CopyMode) -> None:
    """Chunks that share a block of queries, fill blocks or straddle them; only decode rows, only prefill, neither."""
    for kv_lens, query_lens, num_decode in (
        ((9, 1, 30, 7), (1, 1, 13, 7), 2),
        ((300,), (48,), 0),
        ((129, 16, 17, 128, 15, 1), (1, 16, 5, 9, 15, 1), 1),
        ((20, 140, 16), (20, 12, 16), 0),
        ((5, 200), (1, 1), 2),
        ((), (), 0),
    ):
        check(mixed(kv_lens, query_lens, num_decode), mode)


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_between_others(mode: CopyMode) -> None:
    """Rows without keys among decode rows, chunks without queries among chunks: no program waits for a copy that is
    never started."""
    check(mixed((9, 0, 30, 0, 20), (1, 1, 13, 0, 7), 2), mode)
    check(mixed((0, 0, 30, 0, 20), (0, 0, 30, 0, 18), 0), mode)
    check(decode(0, 7, 0, 0, 200), mode)


def test_short_chunks_in_a_wide_block_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks within a part of the block are computed only for that part: in the first part, over its edge, in the
    second."""
    monkeypatch.setattr(blocks, "_prefill_by_costs", lambda shape: PrefillBlocks(256, 128 // shape.page_size))
    case = replace(mixed((100, 60, 150, 5), (100, 60, 40, 5), 0), tokens=256, kv_heads=1, group=1)
    check(case, CopyMode.EAGER)


TWO_CORES = {
    "decode rows on both": decode(260, 1, 256, 2, 5, 3),
    "decode rows on one": decode(129, 40),
    "a chunk over the edge": mixed((9, 150, 7), (1, 37, 7), 1),
    "a chunk up to the edge, empty ones at it": mixed((24, 0, 30, 0, 20), (24, 0, 8, 0, 15), 0),
    "chunks on one": mixed((150, 9), (10, 9), 0),
    "a chunk on the other": mixed((1, 2, 3, 4, 200, 5), (1, 1, 1, 1, 20, 5), 4),
    "nothing": mixed((), (), 0),
}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on v4 and v5p; the first core has two blocks of queries and the second one or two."""
    monkeypatch.setitem(shapes.CORES, shapes.Chip.INTERPRETER, 2)
    monkeypatch.setattr(blocks, "_decode_by_costs", lambda shape: DecodeBlocks(1, 128 // shape.page_size))


def check_on_two_cores(name: str, mode: CopyMode) -> None:
    case = replace(TWO_CORES[name], kv_heads=1)
    check(case, mode, attention=kernel(make_step(case).scale, cores=2))


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_two_cores_share_the_work() -> None:
    check_on_two_cores("a chunk over the edge", CopyMode.EAGER)


@pytest.mark.soak
@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWO_CORES)
def test_two_cores_share_random_work(name: str, mode: CopyMode) -> None:
    check_on_two_cores(name, mode)


@pytest.mark.soak
@pytest.mark.usefixtures("two_cores")
def test_a_missing_wait_on_two_cores_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageFetcher, "wait_for_block", lambda *_: None)
    step = make_step(replace(TWO_CORES["decode rows on both"], kv_heads=1))
    attention = Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS, scale=step.scale, cores=2)
    _, raced = attend(step, CopyMode.EAGER, attention)
    assert raced


LONG = mixed((9, 320, 300, 20), (1, 1, 20, 9), 2)
BFLOAT16 = {"storage": "bfloat16", "query_type": "bfloat16"}


def heads(kv_heads: int, group: int, head_dim: int, page_size: int, **fields: Any) -> Case:
    shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "page_size": page_size}
    return replace(mixed((page_size + 1, 140, 20), (1, 1, 20), 2), **shape, **fields)


FORMS = {
    "a window": replace(LONG, window=70),
    "a window shorter than a page, sinks": replace(LONG, window=5, sinks=True),
    "float8, a window, sinks": replace(LONG, **BFLOAT16 | {"storage": "float8_e4m3fn"}, window=70, sinks=True),
    "multi-query, a soft cap, sinks": heads(1, 8, 96, 64, soft_cap=0.7, sinks=True),
    "three per kv head, packed": heads(1, 3, 64, 16, **BFLOAT16),
    "one per kv head, int8": heads(3, 1, 80, 32, **BFLOAT16 | {"storage": "int8"}),
    "four per kv head, wide": heads(1, 4, 256, 128),
    "latent vectors": heads(1, 16, 576, 16, value_dim=512),
}


@pytest.mark.parametrize(("case", "mode"), list(zip(FORMS.values(), MODES * 4, strict=False)), ids=FORMS)
def test_every_variant_of_the_kernel(monkeypatch: pytest.MonkeyPatch, case: Case, mode: CopyMode) -> None:
    """Each combination of options, types and heads is a program; heads that fill two passes of four, and heads that
    do not."""
    if case.group != LONG.group:
        monkeypatch.setattr(prefill, "HEADS_TOGETHER", HEADS_TOGETHER)
    check(case, mode)


def test_pages_outside_the_window_are_not_read() -> None:
    """Their columns of the page table name pages that do not exist."""
    case = FORMS["a window"]
    step = make_step(case)
    table = np.array(step.batch.page_table)
    first_keys = [max(length - count + 1 - 70, 0) for length, count in zip(case.kv_lens, case.query_lens, strict=True)]
    for row, first_key in enumerate(first_keys):
        table[row, : first_key // case.page_size] = 1 << 20
    assert (table == 1 << 20).sum() > 20
    batch = replace(step.batch, page_table=table)
    output, _ = attend(replace(step, batch=batch), CopyMode.ON_WAIT)
    np.testing.assert_allclose(output[:31], step.expected[:31], atol=EXACT, rtol=0)


def test_a_row_is_batch_invariant() -> None:
    """The same bits next to other rows, one of which holds NaN."""
    step = make_step(decode(40, 200, 7, 100))
    alone, _ = attend(step, CopyMode.ON_WAIT)
    poisoned = step.kv_pages.at[step.batch.page_table[1, 3]].set(np.nan)
    beside, _ = attend(replace(step, kv_pages=poisoned), CopyMode.ON_WAIT)
    assert np.isnan(beside[1]).all()
    np.testing.assert_array_equal(np.delete(beside, 1, axis=0), np.delete(alone, 1, axis=0))


IN_ANY_CHUNK = replace(mixed((340, 9), (40, 2), 0), columns=24)
"""The last 40 tokens of a sequence, and a short one. With a window of 70 keys, the first 25 start in the block of keys
from 128 on, and the others in the next."""
ANY_FORM = {
    "a window, a soft cap, sinks": replace(IN_ANY_CHUNK, kv_heads=1, window=70, soft_cap=0.7, sinks=True),
    "bfloat16": replace(IN_ANY_CHUNK, **BFLOAT16),
    "int8, a window": replace(IN_ANY_CHUNK, **BFLOAT16 | {"storage": "int8"}, window=70),
    "latent vectors": replace(IN_ANY_CHUNK, kv_heads=1, group=16, head_dim=576, value_dim=512),
}
PARTS = (
    {0: (0, 15), 1: (0, 2)},
    {1: (0, 1), 0: (15, 30)},
    {0: (30, 31)},
    {0: (31, 32), 1: (1, 2)},
    {1: (0, 2), 0: (32, 40)},
)
"""Steps with some tokens of each sequence, from the first to the last (exclusive)."""


_QUICK = "a window, a soft cap, sinks", CopyMode.ON_WAIT


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        pytest.param(form, mode, marks=() if (form, mode) == _QUICK else pytest.mark.soak)
        for form in ANY_FORM
        for mode in MODES
    ],
)
def test_fixed_blocks_give_a_token_the_same_bits_in_any_chunk(form: str, mode: CopyMode) -> None:
    """In whole chunks, in parts of them, as a decode row, and next to others, wherever the tokens before it start."""
    case = ANY_FORM[form]
    step = make_step(case)
    attention = Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS_FIXED, scale=step.scale)
    whole, raced = attend(step, mode, attention)
    assert not raced
    bound = EXACT if case.storage == "float32" else ROUNDED
    np.testing.assert_allclose(whole[:42], step.expected[:42], atol=bound, rtol=0)
    of_sequences = np.split(whole[:42], np.cumsum(case.query_lens)[:-1])
    for part in PARTS:
        found, raced = attend(_part_of(step, case, part), mode, attention)
        assert not raced
        np.testing.assert_array_equal(
            found[: sum(last - first for first, last in part.values())],
            np.concatenate([of_sequences[row][first:last] for row, (first, last) in part.items()]),
        )


def _part_of(step: Step, case: Case, part: Mapping[int, tuple[int, int]]) -> Step:
    """A step with the tokens `part[row]` of each sequence's tokens in `step`."""
    starts = np.cumsum((0, *case.query_lens))
    places = np.concatenate([starts[row] + np.arange(*tokens) for row, tokens in part.items()])
    lengths = [case.kv_lens[row] - case.query_lens[row] + last for row, (_, last) in part.items()]
    counts = [last - first for first, last in part.values()]
    padding = [0] * (case.rows - len(part))
    table = np.zeros_like(step.batch.page_table)
    table[: len(part)] = np.asarray(step.batch.page_table)[list(part)]
    batch = replace(
        step.batch,
        page_table=jnp.asarray(table),
        kv_lens=jnp.asarray(lengths + padding, jnp.int32),
        query_starts=jnp.asarray(np.cumsum([0, *counts, *padding]), jnp.int32),
        num_decode=jnp.int32(np.cumprod(np.array(counts) == 1).sum()),
    )
    queries = jnp.zeros_like(step.queries).at[: len(places)].set(step.queries[places])
    return replace(step, queries=queries, batch=batch)


@pytest.mark.parametrize("wait", ["wait_for_block", "wait_for_numbers"])
@pytest.mark.parametrize("case", [decode(40, 200, 7), mixed((40, 200), (20, 13), 0)], ids=["decode", "prefill"])
def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch, wait: str, case: Case) -> None:
    monkeypatch.setattr(PageFetcher, wait, lambda *_: None)
    step = make_step(replace(case, kv_heads=1, group=1))
    attention = Interpreted(ragged_paged_attention, AttentionImplementation.PALLAS, scale=step.scale)
    _, raced = attend(step, CopyMode.EAGER, attention)
    assert raced


def test_pages_of_another_shape_are_refused() -> None:
    step = make_step(replace(decode(3), tiled=False, head_dim=64))
    with pytest.raises(ValueError, match="a multiple of 128 lanes, got 64"):
        attend(step, CopyMode.EAGER)
