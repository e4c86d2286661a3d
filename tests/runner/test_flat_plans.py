"""Plans with drafts as plans without: every query becomes a sequence, and results are joined again."""

from __future__ import annotations

import numpy as np

from sglang_jax.runner.drafts import REJECTED, flatten_drafts, pack_texts, restore_rows
from sglang_jax.runner.plan import (
    DRAFT,
    INVALID_TOKEN,
    LAST_TOKEN,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TextUpdate,
    TopLogprobs,
)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan(**changes: object) -> StepPlan:
    """Two rows with one query, one with three, one with two, and a chunk of four tokens."""
    fields: dict[str, object] = {
        "step": 3,
        "rows": integers(4, 1, 6, 0, 2),
        "num_decode": 2,
        "query_lens": integers(1, 1, 3, 2, 4),
        "kv_lens": integers(10, 20, 33, 42, 4),
        "tokens": integers(*[LAST_TOKEN] * 3, DRAFT, DRAFT, LAST_TOKEN, DRAFT, 7, 8, 9, 5),
        "samples": np.array([True, True, True, True, False]),
        "page_deltas": (),
        "length_on_device": np.array([False, True, True, False, False]),
        "prompt_logprobs": (PromptLogprobs(4, 1, integers(9)),),
    }
    return StepPlan(**{**fields, **changes})  # type: ignore[arg-type]


def test_every_query_that_samples_becomes_a_sequence() -> None:
    flat = flatten_drafts(plan())
    found = flat.plan
    assert found.rows.tolist() == [4, 1, 6, 6, 6, 0, 0, 2]
    assert found.query_lens.tolist() == [1, 1, 1, 1, 1, 1, 1, 4]
    assert found.kv_lens.tolist() == [10, 20, 31, 32, 33, 41, 42, 4]
    assert found.num_decode == 7
    assert found.samples.tolist() == [True] * 7 + [False]
    assert found.length_on_device is not None
    assert found.length_on_device.tolist() == [False, True, True, True, True, False, False, False]
    assert flat.draft_numbers.tolist() == [0, 0, 0, 1, 2, 0, 1, 0]
    assert flat.firsts.tolist() == [0, 1, 2, 5, 7]
    assert found.prompt_logprobs[0].sequence == 7
    assert found.num_tokens == found.query_lens.sum() == 11


def test_a_plan_without_drafts_is_unchanged() -> None:
    before = plan(rows=integers(4), query_lens=integers(1), tokens=integers(LAST_TOKEN), prompt_logprobs=())
    flat = flatten_drafts(before)
    assert flat.plan is before
    result = StepResult(integers(5)[:, None], integers(1))
    assert restore_rows(flat, result, 4) is result


def test_tokens_behind_a_rejected_draft_are_not_in_the_result() -> None:
    tokens = integers(11, 12, 13, 14, REJECTED, 15, INVALID_TOKEN, 16)
    logprobs = TopLogprobs(np.arange(8, dtype=np.float32), tokens[:, None], np.ones((8, 1), np.float32))
    result = restore_rows(flatten_drafts(plan()), StepResult(tokens[:, None], integers(*[1] * 7, 0), logprobs), 4)
    assert result.counts.tolist() == [1, 1, 2, 2, 0]
    assert [row[:count] for row, count in zip(result.tokens.tolist(), result.counts.tolist(), strict=True)] == [
        [11],
        [12],
        [13, 14],
        [15, INVALID_TOKEN],
        [],
    ]
    assert result.logprobs is not None
    assert result.logprobs.logprobs.reshape(5, 4)[2, :2].tolist() == [2, 3]
    assert result.logprobs.top_ids.reshape(5, 4)[3, :2].tolist() == [15, INVALID_TOKEN]


def test_texts_are_packed_with_their_rows_and_lengths() -> None:
    packed = pack_texts([TextUpdate(3, integers(8, 9))], 2, pad_row=6, width=5)
    assert packed.tolist() == [[3, 2, 8, 9, 0, 0, 0], [6, 0, 0, 0, 0, 0, 0]]
