"""A request's states, and the values derived from its fields."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.request import TRANSITIONS, Request, RequestState

C, W, P, D, R, F = RequestState

LEGAL = {(C, W), (C, F), (W, P), (W, F), (P, D), (P, R), (P, F), (D, R), (D, F), (R, P), (R, F)}


def make_request(**fields: object) -> Request:
    facts: dict[str, object] = {
        "id": 7,
        "sequence": 1,
        "sampling": SamplingParams(),
        "seed": 0,
        "tokens": np.arange(10, dtype=np.int32).tobytes(),
        "prompt_len": 10,
        "total_len": 20,
        "stop_ids": np.zeros(0, np.int32),
        "stream": True,
        "top_logprobs": -1,
        "next_prompt_logprob": 10,
        "published_prompt_logprob": 10,
        "namespace": None,
        "priority": 0,
    }
    return Request(**(facts | fields))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestState, RequestState)))
def test_only_the_tables_transitions_are_possible(before: RequestState, after: RequestState) -> None:
    request = make_request(state=before)
    if (before, after) in LEGAL:
        request.move_to(after)
        assert request.state is after
    else:
        with pytest.raises(RuntimeError, match=f"request 7 cannot go from {before.name} to {after.name}"):
            request.move_to(after)
        assert request.state is before


def test_every_state_is_in_the_table_and_only_the_end_is_final() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert [state for state, following in TRANSITIONS.items() if not following] == [RequestState.FINISHED]


@pytest.mark.parametrize(
    ("next_prompt_logprob", "limit"),
    [(10, 9), (9, 8), (5, 4), (1, 0), (0, 0)],
)
def test_the_match_stops_before_wanted_logprobs_and_before_the_last_token(next_prompt_logprob: int, limit: int) -> None:
    """A cached position gives no logits. Regression: the first requested logprobs were missing when its position was
    matched."""
    assert make_request(next_prompt_logprob=next_prompt_logprob).match_limit == limit


def test_kept_output_counts_as_prefill_and_may_be_matched() -> None:
    request = make_request(tokens=np.arange(14, dtype=np.int32).tobytes())
    assert request.prefill_len == 14
    assert request.match_limit == 13
    assert request.token_slice(9, 12).tolist() == [9, 10, 11]


def test_asking_for_the_row_of_a_request_without_one_names_it() -> None:
    with pytest.raises(AssertionError, match="request 7 has no row"):
        _ = make_request().row
