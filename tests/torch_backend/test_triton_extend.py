"""Paged extend in the interpreter against numpy in float64: shuffled pages, NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.torch_attention_steps import Case, Step, make_step
from helpers.triton_attention import AMPERE, HOPPER, TOLERANCE, attend, check
from helpers.triton_interpreter import shuffled_programs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_backend.batch import ForwardBatch
from torch_backend.kernels import extend_plan
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.extend_plan import ExtendForm, ExtendTile, plan_extend


def step_of(*sequences: tuple[int, int], num_decode: int = 0, **changes: object) -> Case:
    """Sequences as (cached prefix, new tokens), in bfloat16: blocks of 128 / group tokens and tiles of 64 keys."""
    kv_lens = tuple(prefix + new for prefix, new in sequences)
    case = Case(kv_lens=kv_lens, query_lens=tuple(new for _, new in sequences), num_decode=num_decode)
    return replace(case, dtype=torch.bfloat16, **changes)


def only_sequence(step: Step, row: int, num_decode: int) -> Step:
    """One sequence of a step, over the same pages."""
    batch = step.batch
    tokens = slice(*batch.query_starts[row : row + 2].tolist())
    smaller = ForwardBatch(
        batch.tokens[tokens],
        batch.positions[tokens],
        batch.write_slots[tokens],
        batch.page_table[row : row + 1],
        batch.kv_lens[row : row + 1],
        torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32),
        num_decode,
    )
    return replace(step, queries=step.queries[tokens], batch=smaller, expected=step.expected[tokens])


MIXED = step_of((40, 1), (0, 1), (17, 13), (0, 70), (0, 1), (90, 5), num_decode=2)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_edges_of_blocks_and_tiles(page_size: int) -> None:
    """Two heads a kv head make blocks of 64 tokens; prefixes end in the middle of tiles, of pages, and on edges."""
    sequences = ((0, 1), (0, 63), (0, 64), (0, 65), (1, 64), (63, 66), (64, 64), (65, 129), (200, 3))
    check(step_of(*sequences, kv_heads=1, page_size=page_size))


@pytest.mark.parametrize("page_size", [1, 16])
def test_float32_is_exact_to_rounding(page_size: int) -> None:
    """Blocks of 8 tokens, tiles of 16 keys."""
    sequences = ((0, 1), (0, 7), (0, 9), (15, 8), (16, 17), (33, 2))
    check(replace(step_of(*sequences, page_size=page_size), dtype=torch.float32))


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"),
    [(1, 1, 64), (3, 3, 96), (1, 5, 80), (2, 4, 128), (1, 16, 64), (2, 8, 256), (1, 2, 80)],
)
def test_heads(kv_heads: int, group: int, head_dim: int) -> None:
    """Three and five heads do not divide a block's rows."""
    sequences = ((0, 50), (70, 45), (3, 2))
    check(step_of(*sequences, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=16, sinks=True))


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["same", "float8"])
def test_types(chip: Chip, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Without instructions for float8 the kernel widens its bits."""
    case = step_of((20, 30), (0, 9), (100, 6), head_dim=128, page_size=16)
    check(replace(case, dtype=dtype, kv_dtype=kv_dtype), chip)


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"),
    [(None, 1.5, False), (None, None, True), (1, 1.5, True), (6, None, False), (70, 1.5, True), (150, None, True)],
)
def test_options(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    """A window smaller than a tile and over tiles, that starts in the prefix and in the chunk."""
    sequences = ((0, 9), (0, 140), (130, 66), (200, 1))
    check(step_of(*sequences, kv_heads=1, page_size=16, window=window, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("page_size", [64, 128])
def test_windows_may_start_inside_pages(page_size: int) -> None:
    """Pages that hold a tile: it must not reach over their end."""
    check(step_of((100, 40), (0, 190), (333, 7), kv_heads=1, page_size=page_size, window=75))


@pytest.mark.parametrize("page_size", [1, 16])
def test_options_in_float32(page_size: int) -> None:
    case = step_of((5, 30), (40, 3), (0, 18), page_size=page_size, window=13, soft_cap=1.5, sinks=True)
    check(replace(case, dtype=torch.float32))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_rows_with_chunks(dtype: torch.dtype, window: int | None) -> None:
    check(replace(MIXED, dtype=dtype, window=window, page_size=16))


def test_long_decode_rows_with_chunks() -> None:
    """Decode rows of several splits; a chunk of one token is not a decode row."""
    check(step_of((600, 1), (300, 1), (0, 1), (10, 20), num_decode=2, kv_heads=1, page_size=16, sinks=True))


def test_sequences_without_tokens() -> None:
    """Between others, at the ends, and as the only one."""
    check(step_of((9, 0), (30, 1), (5, 7), (12, 0), (1, 0), (0, 3), (8, 0), page_size=16))
    check(step_of((30, 1), (7, 0), num_decode=1, page_size=16))


def test_one_chunk_of_many_blocks() -> None:
    check(step_of((70, 500), kv_heads=1, group=1, page_size=64))


def test_large_scores_do_not_overflow() -> None:
    step = make_step(replace(MIXED, dtype=torch.float32, page_size=16))
    assert bool(attend(replace(step, queries=step.queries * 1e4)).isfinite().all())


@pytest.mark.parametrize("window", [None, 50])
def test_a_sequence_is_batch_invariant(window: int | None) -> None:
    """The same bits for a single sequence and with programs in any order."""
    step = make_step(replace(MIXED, kv_heads=1, page_size=16, window=window))
    together = attend(step)
    starts = step.batch.query_starts.tolist()
    for row in range(len(starts) - 1):
        tokens = slice(starts[row], starts[row + 1])
        assert torch.equal(attend(only_sequence(step, row, int(row < MIXED.num_decode))), together[tokens])
    for seed in range(3):
        with shuffled_programs(seed):
            assert torch.equal(attend(step), together)


@pytest.mark.parametrize("window", [None, 50])
def test_chunks_do_not_change_a_query(window: int | None) -> None:
    """The same bits wherever the sequence is cut: blocks of 64 tokens then start elsewhere."""
    whole = make_step(step_of((10, 200), kv_heads=1, page_size=16, window=window))
    expected = attend(whole)
    for chunks in ((37, 163), (64, 1, 135), (100, 60, 40)):
        start = 0
        for count in chunks:
            tokens = slice(start, start + count)
            batch = replace(
                whole.batch,
                tokens=whole.batch.tokens[tokens],
                positions=whole.batch.positions[tokens],
                write_slots=whole.batch.write_slots[tokens],
                kv_lens=torch.tensor([10 + start + count], dtype=torch.int32),
                query_starts=torch.tensor([0, count], dtype=torch.int32),
            )
            assert torch.equal(attend(replace(whole, queries=whole.queries[tokens], batch=batch)), expected[tokens])
            start += count


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    num_decode, others = draw(0, 4), draw(0, 5)
    sequences = [(draw(0, 300), 1) for _ in range(num_decode)] + [(draw(0, 200), draw(0, 90)) for _ in range(others)]
    if not sequences:
        sequences = [(0, 1)]
    case = step_of(
        *sequences,
        num_decode=num_decode,
        kv_heads=1,
        group=draw(1, 7),
        page_size=2 ** draw(0, 7),
        window=draw(1, 100) if draw(0, 2) else None,
        sinks=bool(draw(0, 2)),
    )
    check(case, seed=seed)


LARGE = Chip(capability=90, processors=1000)
"""A chip that few blocks leave idle, so that their keys are split."""


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tiles of keys."""
    monkeypatch.setattr(extend_plan, "SPLIT", 128)


@pytest.mark.usefixtures("short_splits")
class TestSplits:
    """Sequences of several splits: a block's program loops over them, or each split has its own program."""

    @pytest.mark.parametrize(
        ("chip", "window", "soft_cap", "sinks"),
        [(HOPPER, None, 1.5, True), (LARGE, 70, None, True), (LARGE, None, 1.5, False), (HOPPER, 300, None, False)],
    )
    def test_are_merged(self, chip: Chip, window: int | None, soft_cap: float | None, sinks: bool) -> None:
        """Lengths on, before and after the edges of splits; sequences of one split, of two, of many, and without
        queries."""
        sequences = ((0, 128), (100, 29), (12, 0), (390, 3), (9, 20))
        check(step_of(*sequences, kv_heads=1, page_size=16, window=window, soft_cap=soft_cap, sinks=sinks), chip)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["same", "float8"])
    def test_of_every_type(self, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
        case = step_of((300, 1), (390, 5), (60, 9), num_decode=1, head_dim=80, group=3, page_size=16)
        check(replace(case, dtype=dtype, kv_dtype=kv_dtype), LARGE)

    @pytest.mark.parametrize(("window", "sinks"), [(None, True), (150, False)])
    def test_give_the_same_bits_in_any_step(self, window: int | None, sinks: bool) -> None:
        """In a loop or in parallel, as the only sequence or with others, in any order, in one chunk or in several."""
        case = step_of((300, 1), (290, 80), (0, 20), num_decode=1, kv_heads=1, page_size=16, window=window)
        step = make_step(replace(case, sinks=sinks))
        together = attend(step)
        assert torch.equal(attend(step, LARGE), together)
        with shuffled_programs(1):
            assert torch.equal(attend(step, LARGE), together)
        assert torch.equal(attend(only_sequence(step, 1, 0), LARGE), together[1:81])
        first = only_sequence(step, 1, 0)
        start = 0
        for count in (37, 43):
            tokens = slice(start, start + count)
            batch = replace(
                first.batch,
                tokens=first.batch.tokens[tokens],
                positions=first.batch.positions[tokens],
                write_slots=first.batch.write_slots[tokens],
                kv_lens=torch.tensor([290 + start + count], dtype=torch.int32),
                query_starts=torch.tensor([0, count], dtype=torch.int32),
            )
            chunk = replace(first, queries=first.queries[tokens], batch=batch)
            assert torch.equal(attend(chunk, LARGE), together[1 + start : 1 + start + count])
            start += count

    @pytest.mark.parametrize(("window", "sinks"), [(None, True), (20, False)])
    def test_of_padding_in_captured_steps(self, window: int | None, sinks: bool) -> None:
        """After the sequences, some without tokens, and tokens without keys: their output is 0."""
        step = make_step(step_of((30, 1), (90, 70), num_decode=1, kv_heads=1, page_size=16, window=window, sinks=sinks))
        batch = step.batch
        padded = replace(
            batch,
            page_table=torch.cat([batch.page_table, torch.zeros_like(batch.page_table)]),
            kv_lens=torch.cat([batch.kv_lens, torch.zeros_like(batch.kv_lens)]),
            query_starts=torch.tensor([0, 1, 71, 71, 160], dtype=torch.int32),
        )
        queries = torch.cat([step.queries, torch.ones(89, *step.queries.shape[1:]).to(step.queries)])
        for chip in (HOPPER, LARGE):
            found = attend(replace(step, queries=queries, batch=padded), chip)
            assert torch.equal(found[:71], attend(step))
            assert not found[71:].any()


def test_keys_are_split_where_blocks_leave_half_of_the_chip_idle() -> None:
    """A short chunk on a long prefix on an H100; not a long one, nor one whose sums would take too much memory."""
    chip = Chip(capability=90, processors=132)

    def splits(tokens: int, longest: int, kv_heads: int = 8, window: int | None = None) -> int | None:
        form = ExtendForm(kv_heads, 4, 128, window, extend_plan.extend_tile(128, torch.bfloat16, chip))
        starts, lens = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, tokens], [longest]))
        plan = plan_extend(starts, lens, 0, tokens, longest, form, chip)
        return None if plan.splits is None else int(plan.splits.starts[-1])

    assert splits(100, 2048) is None
    assert splits(100, 32_768) == 4 * 16
    assert splits(100, 32_768, window=4096) == 4 * 3
    assert splits(256, 32_768) is None
    assert splits(256, 32_768, kv_heads=1) == 8 * 16
    assert splits(200, 262_144) is None


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 12_000)), min_size=1, max_size=9),
    num_decode=st.integers(0, 3),
    tokens=st.sampled_from([1, 8, 42, 128]),
    window=st.sampled_from([None, 30, 3000]),
)
@example(lengths=[(20, 9), (9, 0), (0, 7)] * 43, num_decode=2, tokens=8, window=None)
def test_items_cover_the_blocks_and_their_splits(
    lengths: list[tuple[int, int]], num_decode: int, tokens: int, window: int | None
) -> None:
    counts = torch.tensor([0, *[1] * num_decode, *(count for count, _ in lengths)])
    kv_lens = torch.tensor([*[5] * num_decode, *(sum(both) for both in lengths)], dtype=torch.int32)
    query_starts = counts.cumsum(0).to(torch.int32)
    form = ExtendForm(1, 1, 16, window, ExtendTile(tokens, 16, 4, 2))
    plan = plan_extend(query_starts, kv_lens, num_decode, int(query_starts[-1]), 13_000, form, Chip(90, 10**9))
    blocks = [-(-count // tokens) for count, _ in lengths]
    firsts = [max(prefix - window + 1, 0) // extend_plan.SPLIT if window else 0 for _, prefix in lengths]
    splits = [
        -(-(count + prefix) // extend_plan.SPLIT) - first
        for (count, prefix), first in zip(lengths, firsts, strict=True)
    ]
    assert plan.splits is not None
    for items, per_block in ((plan.blocks, [1] * len(blocks)), (plan.splits, splits)):
        expected = [count * each for count, each in zip(blocks, per_block, strict=True)]
        assert items.starts.diff().tolist() == expected
        owners = [row for row, count in enumerate(expected) for _ in range(count)]
        assert len(owners) <= items.owners.numel()
        assert items.owners[: len(owners)].tolist() == owners
