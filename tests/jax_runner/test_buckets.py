"""Shapes of programs, and plans packed into them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.jax_runner.buckets import Bucket, Buckets
from sglang_jax.jax_runner.packing import NO_TARGET, StepLayout
from sglang_jax.runner.packing import SAMPLES
from sglang_jax.runner.plan import LAST_TOKEN, PageDeltas, PromptLogprobs, StepPlan


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_the_default_ladder_on_a_cpu_is_modest() -> None:
    buckets = Buckets.ladder(max_rows=32, token_budget=512, page_size=16)
    assert [bucket.rows for bucket in buckets.decode] == [2, 4, 8, 16, 32]
    assert [(bucket.tokens, bucket.rows) for bucket in buckets.mixed] == [(16, 8), (64, 32), (256, 32), (512, 32)]


@given(max_rows=st.integers(1, 300), token_budget=st.integers(1, 3000), data=st.data())
def test_every_step_within_the_spec_fits(max_rows: int, token_budget: int, data: st.DataObject) -> None:
    buckets = Buckets.ladder(max_rows, max(token_budget, 2 * max_rows), page_size=16)
    num_rows = data.draw(st.integers(1, max_rows))
    num_tokens = data.draw(st.integers(num_rows, max(token_budget, 2 * max_rows)))
    num_decode = num_tokens if num_tokens == num_rows and data.draw(st.booleans()) else 0
    bucket = buckets.pick(num_tokens, num_rows, num_decode)
    assert num_tokens <= bucket.tokens
    assert num_rows <= bucket.rows
    assert bucket.decode_only == (num_decode > 0)
    # No smaller one would be enough.
    for other in buckets:
        if other.decode_only == bucket.decode_only and other.tokens < bucket.tokens:
            assert num_tokens > other.tokens or num_rows > other.rows


def test_small_work_uses_small_buckets() -> None:
    buckets = Buckets.ladder(max_rows=256, token_budget=2048, page_size=64)
    assert buckets.pick(1, 1, 1).tokens == 2
    assert buckets.pick(10, 1, 0).tokens == 16
    assert buckets.pick(20, 9, 8).tokens == 64
    assert buckets.pick(5, 5, 0).tokens == 16


def test_a_step_beyond_the_largest_bucket_is_an_error_that_names_both_sizes() -> None:
    buckets = Buckets.ladder(max_rows=4, token_budget=100, page_size=4)
    with pytest.raises(ValueError, match=r"129 tokens in 1 rows .* \(128 tokens, 4 rows\)"):
        buckets.pick(129, 1, 0)


PLAN = StepPlan(
    step=0,
    rows=integers(3, 0, 2),
    num_decode=1,
    query_lens=integers(1, 2, 4),
    kv_lens=integers(9, 2, 7),
    tokens=integers(LAST_TOKEN, 11, 12, 21, 22, 23, 24),
    samples=np.array([True, False, True]),
    page_deltas=(PageDeltas(integers(0, 2), integers(0, 1), integers(8, 5)),),
    prompt_logprobs=(PromptLogprobs(2, 1, integers(23, 24)),),
    top_logprobs=5,
    prompt_top_logprobs=1,
)


def test_a_packed_plan_unpacks_to_its_fields_and_padding() -> None:
    layout = StepLayout(Bucket(tokens=10, rows=4, deltas=3), dump_row=6)
    packed = layout.pack(PLAN, PLAN.page_deltas[0])
    assert (packed.dtype, packed.shape) == (np.int32, (layout.size,))
    inputs = layout.unpack(packed)
    assert (inputs.num_decode, inputs.num_tokens, inputs.top_logprobs, inputs.prompt_top_logprobs) == (1, 7, 5, 1)
    assert inputs.rows.tolist() == [3, 0, 2, 6]
    assert inputs.kv_lens.tolist() == [9, 2, 7, 0]
    assert inputs.flags.tolist() == [SAMPLES, 0, SAMPLES, 0]
    assert inputs.query_starts.tolist() == [0, 1, 3, 7, 7]
    assert inputs.delta_rows.tolist() == [0, 2, 6]
    assert inputs.delta_columns.tolist() == [0, 1, 0]
    assert inputs.delta_pages.tolist() == [8, 5, 0]
    assert inputs.tokens.tolist() == [LAST_TOKEN, 11, 12, 21, 22, 23, 24, 0, 0, 0]
    assert inputs.prompt_targets.tolist() == [NO_TARGET] * 4 + [23, 24] + [NO_TARGET] * 4


def test_a_decode_bucket_carries_no_prompt_tokens() -> None:
    mixed, decode = (StepLayout(Bucket(tokens, 4, 4), dump_row=6) for tokens in (5, 4))
    assert mixed.size - decode.size == 2 * 5
