"""The numpy sampler on cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import adjusted_logits, kept_tokens, probabilities, reference_sample

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
SILENCE = np.zeros(4, np.float32)


def test_penalties_count_prompt_and_output_as_documented() -> None:
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0, logit_bias={3: 4.0}, min_new_tokens=5
    )
    logits = np.array([2.0, -2.0, 2.0, 0.0, 7.0], np.float32)
    adjusted = adjusted_logits(logits, sampling, prompt=[0, 1], output=[2, 2, 1], stop_ids=[4])
    # 0: only repetition. 1: -2 * 2 - .5 - 1. 2: 2 / 2 - 2 * .5 - 1. 3: only bias. 4: masked.
    assert adjusted.tolist() == [1.0, -5.5, -1.0, 4.0, -np.inf]


def test_stop_ids_are_allowed_once_min_new_tokens_were_sampled() -> None:
    sampling = SamplingParams(min_new_tokens=2)
    assert adjusted_logits(LOGITS, sampling, [0], [1], [2])[2] == -np.inf
    assert adjusted_logits(LOGITS, sampling, [0], [1, 1], [2])[2] == LOGITS[2]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(), [0, 1, 2, 3]),
        (SamplingParams(top_k=3), [0, 1, 2]),
        (SamplingParams(top_p=0.69), [0, 1]),
        (SamplingParams(top_p=0.71), [0, 1, 2]),
        (SamplingParams(top_k=2, top_p=0.56), [0]),  # 0.4 / 0.7 is above 0.56
        (SamplingParams(min_p=0.49), [0, 1, 2]),
        (SamplingParams(min_p=0.51), [0, 1]),
        (SamplingParams(temperature=0.5, min_p=0.49), [0, 1]),  # squared ratios: 1, .5625, .25
    ],
)
def test_filters(sampling: SamplingParams, kept: list[int]) -> None:
    assert np.flatnonzero(kept_tokens(LOGITS, sampling)[0]).tolist() == kept


def test_ties_are_kept_together() -> None:
    tied = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
    assert kept_tokens(tied, SamplingParams(top_k=2))[0].tolist() == [True, True, True, False]


def test_probabilities_are_renormalised() -> None:
    assert probabilities(LOGITS, SamplingParams(top_k=2)) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(LOGITS, SamplingParams(temperature=0.5)) == pytest.approx(np.array([16, 9, 4, 1]) / 30)


def test_samples() -> None:
    def sample(sampling: SamplingParams, noise: np.ndarray, logits: np.ndarray = LOGITS) -> int | None:
        return reference_sample(logits, sampling, prompt=[0], output=[], stop_ids=[], noise=noise).token

    loud = np.array([0.0, 0.0, 9.0, 0.0], np.float32)
    assert sample(SamplingParams(), loud) == 2
    assert sample(SamplingParams(temperature=0.0), loud) == 0
    assert sample(SamplingParams(top_k=2), loud) == 0
    assert sample(SamplingParams(), SILENCE, np.array([0.0, np.nan, 0.0, 0.0], np.float32)) is None
