"""A plan packed for the device is unpacked unchanged, with padding around it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.runner.plan import LAST_TOKEN, PageDeltas, StepPlan
from torch_backend.packing import StepInputs, StepLayout

DUMP_ROW = 12
GARBAGE = -77
"""The buffer's earlier content, of which nothing may remain."""


@st.composite
def plans(draw: st.DrawFn, *, decode_alone: bool) -> StepPlan:
    """Any step of up to 8 of 12 rows."""
    rows = draw(st.lists(st.integers(0, DUMP_ROW - 1), min_size=1, max_size=8, unique=True))
    num_decode = len(rows) if decode_alone else draw(st.integers(0, len(rows)))
    chunks = draw(st.lists(st.integers(1, 5), min_size=len(rows) - num_decode, max_size=len(rows) - num_decode))
    samples = draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks)))
    query_lens = [1] * num_decode + chunks
    kept = draw(st.lists(st.integers(0, 2**30), min_size=len(rows), max_size=len(rows)))
    entries = draw(st.lists(st.tuples(*[st.integers(0, 11)] * 2, st.integers(1, 2**31 - 1)), max_size=8))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=sum(chunks), max_size=sum(chunks)))
    return StepPlan(
        step=0,
        rows=np.array(rows, np.int32),
        num_decode=num_decode,
        query_lens=np.array(query_lens, np.int32),
        kv_lens=np.array(kept, np.int32) + np.array(query_lens, np.int32),
        tokens=np.array([LAST_TOKEN] * num_decode + ids, np.int32),
        samples=np.array([True] * num_decode + samples, np.bool_),
        page_deltas=(PageDeltas(*np.array(entries, np.int32).reshape(-1, 3).T),),
    )


def unpacked(layout: StepLayout, plan: StepPlan, deltas: PageDeltas) -> StepInputs:
    packed = np.full(layout.size, GARBAGE, np.int32)
    layout.pack(plan, deltas, DUMP_ROW, packed)
    assert GARBAGE not in packed
    return layout.unpack(torch.from_numpy(packed))


def starts(plan: StepPlan) -> list[int]:
    return [0, *np.cumsum(plan.query_lens).tolist()]


@settings(max_examples=150, deadline=None)
@given(plan=plans(decode_alone=False))
def test_an_exact_layout_holds_the_plan_and_nothing_else(plan: StepPlan) -> None:
    layout = StepLayout.exact(plan, plan.page_deltas[0])
    (deltas,) = plan.page_deltas
    inputs = unpacked(layout, plan, deltas)
    assert inputs.num_decode == plan.num_decode
    for found, wanted in (
        (inputs.rows, plan.rows),
        (inputs.kv_lens, plan.kv_lens),
        (inputs.query_starts, starts(plan)),
        (inputs.sampled, np.flatnonzero(plan.samples)),
        (inputs.delta_rows, deltas.rows),
        (inputs.delta_columns, deltas.columns),
        (inputs.delta_pages, deltas.pages),
        (inputs.tokens, plan.tokens if plan.num_decode < len(plan.rows) else []),
    ):
        assert found.dtype == torch.int32
        assert found.tolist() == list(wanted)


@settings(max_examples=150, deadline=None)
@given(plan=plans(decode_alone=True), more_rows=st.integers(0, 3), more_deltas=st.integers(0, 3))
def test_a_decode_layout_pads_with_the_pad_row(plan: StepPlan, more_rows: int, more_deltas: int) -> None:
    (deltas,) = plan.page_deltas
    sequences, entries = len(plan.rows), len(deltas.rows)
    bucket = sequences + more_rows
    layout = StepLayout.decode(bucket, entries + more_deltas)
    inputs = unpacked(layout, plan, deltas)
    # padding decodes too: a token each, at position 0 of page 0, which no request uses
    assert inputs.num_decode == bucket
    assert inputs.rows.tolist() == plan.rows.tolist() + [DUMP_ROW] * more_rows
    assert inputs.kv_lens.tolist() == plan.kv_lens.tolist() + [0] * more_rows
    assert inputs.query_starts.tolist() == list(range(bucket + 1))
    assert inputs.sampled.tolist() == list(range(bucket))
    assert inputs.delta_rows.tolist() == deltas.rows.tolist() + [DUMP_ROW] * more_deltas
    assert inputs.delta_columns.tolist() == deltas.columns.tolist() + [0] * more_deltas
    assert inputs.delta_pages.tolist() == deltas.pages.tolist() + [0] * more_deltas
    assert inputs.tokens.tolist() == []


@settings(max_examples=150, deadline=None)
@given(
    plan=plans(decode_alone=False), more_rows=st.integers(0, 3), more_tokens=st.integers(0, 9), others=st.integers(1, 4)
)
def test_a_mixed_layout_pads_after_decode_rows_and_after_prompts(
    plan: StepPlan, more_rows: int, more_tokens: int, others: int
) -> None:
    (deltas,) = plan.page_deltas
    decoding, chunks = plan.num_decode, len(plan.rows) - plan.num_decode
    decode, prompt = decoding + more_rows, plan.num_tokens - decoding
    if not prompt + more_tokens:
        return
    inputs = unpacked(StepLayout.mixed(decode, chunks + others, prompt + more_tokens, len(deltas.rows)), plan, deltas)

    def padded(values: np.ndarray, filler: int) -> list[int]:
        kept = values.tolist()
        return [*kept[:decoding], *[filler] * more_rows, *kept[decoding:], *[filler] * others]

    assert inputs.num_decode == decode
    assert inputs.rows.tolist() == padded(plan.rows, DUMP_ROW)
    assert inputs.kv_lens.tolist() == padded(plan.kv_lens, 0)
    lengths = inputs.query_starts.diff().tolist()
    assert lengths[:decode] == [1] * decode
    assert lengths[decode:] == [*plan.query_lens[decoding:].tolist(), *[0] * (others - 1), more_tokens]
    samples = np.flatnonzero(padded(plan.samples, 0))
    assert inputs.sampled[: len(samples)].tolist() == samples.tolist()
    assert int(inputs.sampled.max()) < len(inputs.rows)
    tokens = plan.tokens.tolist()
    assert inputs.tokens.tolist() == [
        *tokens[:decoding],
        *[0] * more_rows,
        *tokens[decoding:],
        *[0] * more_tokens,
    ]


def test_unpacked_arrays_are_views() -> None:
    """A captured step reads the same memory at each replay."""
    layout = StepLayout.decode(2, 2)
    packed = torch.zeros(layout.size, dtype=torch.int32)
    inputs = layout.unpack(packed)
    packed.copy_(torch.arange(layout.size, dtype=torch.int32))
    tensors = (inputs.rows, inputs.kv_lens, inputs.query_starts)
    deltas = (inputs.delta_rows, inputs.delta_columns, inputs.delta_pages)
    assert torch.cat([*tensors, *deltas, inputs.tokens, inputs.sampled]).tolist() == list(range(layout.size))
