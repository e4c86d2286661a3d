"""Split-KV decode in the interpreter against numpy in float64: shuffled pages, NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.torch_attention_steps import Case, Step, make_step
from helpers.triton_attention import AMPERE, HOPPER, TOLERANCE, attend, check
from helpers.triton_interpreter import shuffled_programs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_backend.attention.triton import TritonAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kernels import decode_attention
from torch_backend.kernels.attention_tiles import TRITON_TYPES, widen
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import decode_tile, plan_decode, splits_bound

SPLIT = 256


def decode(*kv_lens: int, **changes: object) -> Case:
    """A decode step of bfloat16, whose tiles have 64 keys."""
    case = Case(kv_lens=kv_lens, query_lens=(1,) * len(kv_lens), num_decode=len(kv_lens), dtype=torch.bfloat16)
    return replace(case, **changes)


def select(step: Step, rows: list[int]) -> Step:
    """The decode rows `rows` of a step, in that order, over the same pages."""
    batch, wanted = step.batch, torch.tensor(rows)
    smaller = ForwardBatch(
        batch.tokens[wanted],
        batch.positions[wanted],
        batch.write_slots[wanted],
        batch.page_table[wanted],
        batch.kv_lens[wanted],
        torch.arange(len(rows) + 1, dtype=torch.int32),
        len(rows),
    )
    return replace(step, queries=step.queries[wanted], batch=smaller, expected=step.expected[rows])


SHORT = decode(9, 1, 30, 140, 16, padding=3)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_edges_of_tiles_and_splits(page_size: int) -> None:
    edges = (1, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70)
    check(decode(*edges, page_size=page_size, kv_heads=1))


@pytest.mark.parametrize("page_size", [1, 16])
def test_float32_is_exact_to_rounding(page_size: int) -> None:
    check(decode(15, 16, 17, 1, SPLIT + 33, dtype=torch.float32, page_size=page_size, padding=1))


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"),
    [(1, 1, 64), (3, 3, 96), (1, 9, 80), (2, 4, 128), (1, 16, 64), (2, 8, 256), (1, 2, 80), (1, 17, 64)],
)
def test_heads(kv_heads: int, group: int, head_dim: int) -> None:
    lens = (9, 1, SPLIT + 40)
    check(decode(*lens, padding=1, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=16, sinks=True))


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["same", "float8"])
def test_types(chip: Chip, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Without instructions for float8 the kernel widens its bits."""
    check(decode(9, 1, 70, SPLIT + 20, padding=1, dtype=dtype, kv_dtype=kv_dtype, head_dim=128, page_size=16), chip)


@triton.jit
def _widen(codes, out, COMPUTE: tl.constexpr):
    lanes = tl.arange(0, 256)
    tl.store(out + lanes, widen(tl.load(codes + lanes), COMPUTE))


@pytest.mark.parametrize("compute", TOLERANCE, ids=str)
def test_every_finite_float8_is_widened_exactly(compute: torch.dtype) -> None:
    """As float8 and as bytes, subnormal numbers included."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = ~codes.view(torch.float8_e4m3fn).float().isnan()
    assert int(finite.sum()) == 254
    for stored in (codes, codes.view(torch.float8_e4m3fn)):
        out = torch.empty(256, dtype=compute)
        _widen[(1,)](stored, out, COMPUTE=TRITON_TYPES[compute])
        assert torch.equal(out[finite].float(), codes.view(torch.float8_e4m3fn)[finite].float())


@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"),
    [
        (None, 1.5, False),
        (None, None, True),
        (1, 1.5, True),
        (6, None, False),
        (70, 1.5, True),
        (SPLIT + 50, None, True),
        (SPLIT + 50, 1.5, False),
    ],
)
def test_options(window: int | None, soft_cap: float | None, sinks: bool) -> None:
    """A window smaller than a tile, over tiles, and over splits, in rows shorter and longer than it."""
    lens = (9, 1, 140, SPLIT + 1, 2 * SPLIT + 100)
    check(decode(*lens, padding=1, kv_heads=1, page_size=16, window=window, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("page_size", [64, 128])
def test_windows_may_start_inside_pages(page_size: int) -> None:
    """Pages that hold a tile: it must not reach over their end."""
    check(decode(100, 140, SPLIT + 90, 2 * SPLIT + 33, kv_heads=1, page_size=page_size, window=75))


def test_options_in_float32() -> None:
    """In rows of one split and of two."""
    lens = (9, 1, SPLIT + 33)
    for window in (33, SPLIT + 20):
        check(decode(*lens, dtype=torch.float32, kv_heads=1, window=window, soft_cap=1.5, sinks=True, padding=1))


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_step_of_only_padding(sinks: bool) -> None:
    check(decode(padding=4, columns=3, sinks=sinks))


def test_splits_of_long_rows_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 8 splits, of 256 keys here, a row has longer splits instead of more."""
    monkeypatch.setattr(decode_attention, "_SPLITS_OF_ALL_HEADS", 8)
    assert splits_bound(kv_heads=1) == 8
    check(decode(8 * SPLIT, 8 * SPLIT + 1, 5, kv_heads=1, group=1, page_size=64, sinks=True))


def test_large_scores_do_not_overflow() -> None:
    step = make_step(decode(9, 1, SPLIT + 300, dtype=torch.float32, kv_heads=1))
    assert bool(attend(replace(step, queries=step.queries * 1e4)).isfinite().all())


@pytest.mark.parametrize("window", [None, SPLIT + 9])
def test_a_row_is_batch_invariant(window: int | None) -> None:
    """The same bits for a single row, in another order, on a chip with more processors, and with programs in any
    order."""
    step = make_step(decode(700, 9, 300, 64, SPLIT, kv_heads=1, page_size=16, window=window, sinks=True))
    together = attend(step)
    for row in range(step.batch.kv_lens.numel()):
        assert torch.equal(attend(select(step, [row]))[0], together[row])
    order = [3, 0, 4, 2]
    assert torch.equal(attend(select(step, order)), together[order])
    assert torch.equal(attend(step, Chip(90, processors=132)), together)
    for seed in range(3):
        with shuffled_programs(seed):
            assert torch.equal(attend(step), together)


def test_the_last_program_merges_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, in successive layers, in the same memory: no layer reads or counts another's sums."""
    merge, merges = decode_attention.merge_splits, []

    def counted(*arguments: Any, **constants: Any) -> None:
        merges.append(1)
        merge(*arguments, **constants)

    monkeypatch.setattr(decode_attention, "merge_splits", counted)
    steps = [make_step(decode(600, 9, 270, kv_heads=2, page_size=16, padding=1), number) for number in (0, 1)]
    batch = steps[0].batch
    assert torch.equal(steps[1].batch.kv_lens, batch.kv_lens)
    expected = [attend(step) for step in steps]
    plan = plan_decode(batch.kv_lens, batch.num_decode, 1024, kv_heads=2, window=None)
    partials = decode_attention.Partials.allocate(plan, steps[0].queries)
    for seed in (None, 1):
        for step, wanted in zip(steps, expected, strict=True):
            partials.weighted.fill_(torch.nan)
            partials.sums.fill_(torch.nan)
            output = torch.full_like(step.queries, torch.nan)
            table, lens = step.batch.page_table, step.batch.kv_lens
            with shuffled_programs(seed):
                decode_attention.decode_attention(
                    step.queries, step.kv, table, lens, step.options, plan, partials, output, HOPPER
                )
            assert torch.equal(output, wanted)
            assert not plan.finished.any()
    assert len(merges) == 6 * 2 * 2  # two rows of several splits, of two kv heads


def test_a_row_of_the_most_splits_is_merged_in_parts() -> None:
    """More splits than are read at a time: eight heads of 128 numbers, in groups of eight splits."""
    check(decode(20 * SPLIT + 3, 5, kv_heads=1, group=8, head_dim=128, page_size=64, sinks=True))


def test_layers_of_one_step_share_plans_where_possible() -> None:
    """Windows, heads and head sizes that differ between the layers of a model."""
    case = decode(300, 40, SPLIT + 9, kv_heads=1, page_size=16)
    steps = [make_step(replace(case, window=window)) for window in (None, 50, None)]
    steps += [make_step(replace(case, kv_heads=2, group=1)), make_step(replace(case, group=8, head_dim=256))]
    attention = TritonAttention(HOPPER).prepare(steps[0].batch)
    for step in steps:
        assert torch.equal(step.batch.page_table, steps[0].batch.page_table)  # sampled with the same seed
        output = attention(step.queries, step.kv, step.options)
        torch.testing.assert_close(output.double(), torch.from_numpy(step.expected), atol=1.6e-2, rtol=0)


@settings(max_examples=20, deadline=None)
@given(
    kv_lens=st.lists(st.integers(0, 20_000), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 9_000),
    kv_heads=st.sampled_from([1, 8, 40]),
)
@example(kv_lens=[700, 9, 0] * 100, window=None, kv_heads=8)
def test_splits_cover_what_a_row_sees(kv_lens: list[int], window: int | None, kv_heads: int) -> None:
    plan = plan_decode(torch.tensor(kv_lens, dtype=torch.int32), len(kv_lens), max(kv_lens), kv_heads, window)
    counts = plan.items.starts.diff().tolist()
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    assert plan.items.owners[: len(owners)].tolist() == owners
    assert len(owners) <= plan.items.owners.numel()
    for kv_len, count in zip(kv_lens, counts, strict=True):
        first = 0 if window is None else max(kv_len - window, 0) // 64 * 64
        splits = -(-(kv_len - first) // SPLIT)
        bound = splits_bound(kv_heads)
        assert count == splits if splits <= bound else bound / 2 <= count <= bound


def test_tiles_divide_splits() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            for capability in (80, 90, 100):
                assert 64 % decode_tile(head_dim, dtype, Chip(capability, 132)).keys == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "scale of scores must be positive"),
        ({"window": 0}, "at least the query's own key"),
    ],
)
def test_unsupported_options_are_errors(change: dict[str, float], message: str) -> None:
    step = make_step(SHORT)
    with pytest.raises(ValueError, match=message):
        attend(replace(step, options=replace(step.options, **change)))


def test_unsupported_shapes_are_errors() -> None:
    step = make_step(replace(SHORT, kv_heads=2, group=2))
    with pytest.raises(ValueError, match="3 query heads cannot be divided among 2 kv heads"):
        attend(replace(step, queries=step.queries[:, :3].contiguous()))
    with pytest.raises(ValueError, match="must be contiguous"):
        attend(replace(step, queries=step.queries.transpose(1, 2).contiguous().transpose(1, 2)))
    with pytest.raises(ValueError, match="page size must be a power of two, not 12"):
        attend(make_step(replace(SHORT, page_size=12)))


def test_a_plan_of_another_window_is_an_error() -> None:
    step = make_step(SHORT)
    plan = plan_decode(step.batch.kv_lens, step.batch.num_decode, 160, kv_heads=2, window=None)
    partials, output = decode_attention.Partials.allocate(plan, step.queries), torch.empty_like(step.queries)
    table, lens = step.batch.page_table, step.batch.kv_lens
    options = replace(step.options, window=5)
    with pytest.raises(ValueError, match="splits are of a window of None keys, not 5"):
        decode_attention.decode_attention(step.queries, step.kv, table, lens, options, plan, partials, output, HOPPER)
