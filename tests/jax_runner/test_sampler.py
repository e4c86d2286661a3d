"""The device sampler against the plain numpy one, and against the distributions it promises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32 as jax_threefry_2x32
from scipy import stats

from sglang_jax.jax_runner.noise import gumbel_noise, threefry_2x32
from sglang_jax.jax_runner.sampler import first_argmax, sample
from sglang_jax.jax_runner.sampling_state import (
    SamplingState,
    apply_row_updates,
    set_occurrences,
)
from sglang_jax.runner.plan import INVALID_TOKEN, RowUpdate
from sglang_jax.runner.row_updates import count_history, pack_row_updates
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import ReferenceDraw, probabilities, reference_sample

VOCAB = 37
ROWS = 6
GREEDY = SamplingParams(temperature=0.0)

_sample = jax.jit(sample)
_apply = jax.jit(apply_row_updates)
_set_occurrences = jax.jit(set_occurrences)
_noise = jax.jit(gumbel_noise, static_argnums=2)


@dataclass(frozen=True)
class Case:
    """A request about to draw its next token."""

    logits: np.ndarray
    sampling: SamplingParams
    seed: int = 0
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    stop_ids: Sequence[int] = field(default=())

    @property
    def kv_len(self) -> int:
        return len(self.prompt) + len(self.output)

    def update(self, row: int) -> RowUpdate:
        history = np.array([*self.prompt, *self.output], np.int32) if self.sampling.counts_tokens else None
        stop_ids = np.array(self.stop_ids, np.int32)
        return RowUpdate(row, self.sampling, self.seed, len(self.prompt), stop_ids, history)


def state_with(updates: Sequence[RowUpdate], rows: int = ROWS, vocab: int = VOCAB) -> SamplingState:
    """State of `rows` rows and a dump row after `updates`."""
    state = SamplingState.empty(rows + 1, vocab)
    state = _apply(state, pack_row_updates(updates, max(len(updates), 1), rows, vocab))
    for update in updates:
        if update.history is not None:
            state = _set_occurrences(state, np.int32(update.row), count_history(update, vocab))
    return state


def draw(cases: Sequence[Case], rows: Sequence[int] | None = None, lines: int | None = None) -> list[int]:
    """Draws for all cases in one batch; `rows` are their rows, `lines` the lines of the padded batch."""
    vocab = len(cases[0].logits)
    rows = range(len(cases)) if rows is None else rows
    lines = len(cases) if lines is None else lines
    state = state_with([case.update(row) for case, row in zip(cases, rows, strict=True)], vocab=vocab)
    logits = np.zeros((lines, vocab), np.float32)
    logits[: len(cases)] = [case.logits for case in cases]
    row_ids = np.full(lines, ROWS, np.int32)
    row_ids[: len(cases)] = rows
    kv_lens = np.zeros(lines, np.int32)
    kv_lens[: len(cases)] = [case.kv_len for case in cases]
    tokens = _sample(logits, state, row_ids, kv_lens, np.arange(lines) < len(cases))
    return np.asarray(tokens)[: len(cases)].tolist()


def noise_of(case: Case) -> np.ndarray:
    seeds = np.array([[case.seed & 0xFFFFFFFF, case.seed >> 32]], np.uint32)
    return np.asarray(_noise(seeds, np.array([case.kv_len], np.int32), len(case.logits)))[0]


def token_of(reference: ReferenceDraw) -> int:
    return INVALID_TOKEN if reference.token is None else reference.token


def expect(case: Case) -> ReferenceDraw:
    return reference_sample(
        case.logits,
        case.sampling,
        prompt=case.prompt,
        output=list(case.output),
        stop_ids=case.stop_ids,
        noise=noise_of(case),
    )


TOKEN = st.integers(0, VOCAB - 1)
# Multiples of 1/8: ties are frequent, and sums of logits, biases and penalties are exact in float32.
LOGITS = st.lists(st.integers(-60, 60).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0)),
    top_k=st.sampled_from((-1, 1, 2, 5, 20, VOCAB, 1000)),
    top_p=st.sampled_from((1.0, 0.99, 0.9, 0.5, 0.1, 1e-6)),
    min_p=st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)),
    frequency_penalty=st.sampled_from((0.0, 0.5, -0.25, 2.0)),
    presence_penalty=st.sampled_from((0.0, 1.5, -2.0)),
    repetition_penalty=st.sampled_from((1.0, 2.0, 0.5)),
    min_new_tokens=st.integers(0, 4),
    logit_bias=st.dictionaries(TOKEN, st.integers(-16, 16).map(lambda n: n / 4), max_size=4),
)
CASE = st.builds(
    Case,
    logits=LOGITS.map(lambda values: np.array(values, np.float32)),
    sampling=SAMPLING,
    seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(TOKEN, min_size=1, max_size=6),
    output=st.lists(TOKEN, max_size=6),
    stop_ids=st.lists(TOKEN, max_size=4, unique=True),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases=st.lists(CASE, min_size=ROWS, max_size=ROWS))
def test_equals_the_reference(cases: list[Case]) -> None:
    expected = [expect(case) for case in cases]
    tokens = draw(cases)
    # A draw within rounding of ending otherwise says nothing.
    for token, reference in zip(tokens, expected, strict=True):
        assert token == token_of(reference) or reference.margin < 1e-5


@settings(max_examples=50, deadline=None)
@given(case=CASE, company=st.lists(CASE, min_size=3, max_size=3), row=st.integers(0, 2), data=st.data())
def test_a_draw_depends_on_nothing_but_its_request(
    case: Case, company: list[Case], row: int, data: st.DataObject
) -> None:
    alone = draw([case])
    line = data.draw(st.integers(0, 3))
    rows = [3, 4, 5]
    rows.insert(line, row)
    together = draw([*company[:line], case, *company[line:]], rows=rows, lines=8)
    assert together[line] == alone[0]


def test_noise_bits_are_threefry() -> None:
    key, counter = np.array([1234567, 987654321], np.uint32), np.arange(64, dtype=np.uint32)
    expected = np.asarray(jax_threefry_2x32(key, counter))
    words = threefry_2x32((jnp.uint32(key[0]), jnp.uint32(key[1])), (counter[:32], counter[32:]))
    assert np.concatenate([np.asarray(word) for word in words]).tolist() == expected.tolist()


def test_noise_is_gumbel_and_differs_by_seed_word_and_position() -> None:
    seeds = np.array([[5, 0], [5, 0], [6, 0], [5, 1]], np.uint32)
    noise = np.asarray(_noise(seeds, np.array([9, 10, 9, 9], np.int32), 20_000))
    assert np.isfinite(noise).all()
    for row in noise:
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-4
    correlations = np.corrcoef(noise) - np.eye(4)
    assert np.abs(correlations).max() < 0.03


def draws_of(logits: np.ndarray, sampling: SamplingParams, count: int) -> np.ndarray:
    """Tokens drawn by one request at `count` positions."""
    state = state_with([RowUpdate(0, sampling, 2**40 + 17, 1, np.zeros(0, np.int32), None)], vocab=len(logits))
    lines = 500
    many = jax.jit(functools.partial(sample, state=state, rows=np.zeros(lines, np.int32), active=np.ones(lines, bool)))
    repeated = np.tile(logits, (lines, 1))
    positions = np.arange(count, dtype=np.int32).reshape(-1, lines)
    return np.concatenate([np.asarray(many(repeated, kv_lens=kv_lens)) for kv_lens in positions])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.8, min_p=0.1),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all"],
)
def test_frequencies_fit_the_distribution(sampling: SamplingParams) -> None:
    count = 20_000
    logits = np.random.default_rng(3).normal(0, 1.2, 12).astype(np.float32)
    expected = probabilities(logits, sampling)
    observed = np.bincount(draws_of(logits, sampling, count), minlength=12)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible] * count).pvalue > 1e-3


def test_top_p_works_on_the_probabilities_after_temperature_and_top_k() -> None:
    # Probabilities at temperature 1: .4 .3 .2 .1; among the two that top-k keeps, the first has 4/7 > 0.55.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert set(draws_of(logits, SamplingParams(top_k=2, top_p=0.55), 2000)) == {0}
    assert set(draws_of(logits, SamplingParams(top_p=0.55), 2000)) == {0, 1}
    # Temperature 0.5 squares and renormalises: 16/30 + 9/30 > 0.8; at temperature 1 it takes three.
    assert set(draws_of(logits, SamplingParams(temperature=0.5, top_p=0.8), 2000)) == {0, 1}
    assert set(draws_of(logits, SamplingParams(top_p=0.8), 2000)) == {0, 1, 2}


def test_ties_with_the_last_token_kept_are_kept() -> None:
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert set(draws_of(logits, SamplingParams(top_k=2), 2000)) == {0, 1, 2, 3}
    assert set(draws_of(logits, SamplingParams(top_p=0.5), 2000)) == {0, 1, 2, 3}


def test_a_large_vocabulary_is_filtered_exactly() -> None:
    logits = np.random.default_rng(0).normal(0, 3, 50_000).astype(np.float32)
    for sampling in (SamplingParams(top_k=1000), SamplingParams(top_p=0.97), SamplingParams(top_k=40, top_p=0.5)):
        case = Case(logits, sampling, seed=77)
        reference = expect(case)
        assert reference.margin > 1e-6
        assert draw([case]) == [token_of(reference)]


@pytest.mark.parametrize(("drawn", "token"), [(0, 4), (1, 4), (2, 9), (3, 9)])
def test_stop_ids_are_masked_until_enough_tokens_were_drawn(drawn: int, token: int) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 9]] = 1.0, 2.0
    sampling = SamplingParams(temperature=0.0, min_new_tokens=2)
    assert draw([Case(logits, sampling, prompt=[1, 2, 3], output=[5] * drawn, stop_ids=[9, 30])]) == [token]


def test_tiny_temperature_is_greedy_and_stays_finite() -> None:
    logits = np.random.default_rng(1).normal(0, 30, VOCAB).astype(np.float32)
    assert draw([Case(logits, SamplingParams(temperature=1e-40))]) == [int(logits.argmax())]


def test_non_finite_logits_spoil_their_row_alone() -> None:
    rng = np.random.default_rng(2)
    cases = [Case(rng.normal(size=VOCAB).astype(np.float32), SamplingParams(), seed=row) for row in range(4)]
    healthy = draw(cases)
    for row, poison in enumerate((np.nan, np.inf, -np.inf)):
        cases[row].logits[row] = poison
    assert draw(cases) == [INVALID_TOKEN, INVALID_TOKEN, INVALID_TOKEN, healthy[3]]


def test_lines_that_draw_nothing_leave_the_counts_alone() -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    history = np.array([3, 3, 4, 5, 5], np.int32)
    update = RowUpdate(1, sampling, 0, 2, np.zeros(0, np.int32), history)
    state = state_with([update])
    assert state.occurrences[1, 3:6].tolist() == [1, 2, 4]
    counted = state.count(np.array([1, 1]), np.array([7, 8]), np.array([True, False]))
    assert counted.occurrences[1, 3:9].tolist() == [1, 2, 4, 0, 2, 0]


def test_row_updates_leave_other_rows_untouched() -> None:
    full = SamplingParams(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={4: 2.5, 9: -1.0}
    )
    seed = 0x123456789ABCDEF
    before = state_with([RowUpdate(2, full, seed, 11, np.array([1, 2], np.int32), np.array([1], np.int32))])
    after = _apply(before, pack_row_updates([RowUpdate(4, GREEDY, 1, 2, np.zeros(0, np.int32), None)], 8, ROWS, VOCAB))
    for name, values in after.__dict__.items():
        assert np.array_equal(values[2], before.__dict__[name][2]), name
    assert after.temperature[2] == np.float32(0.7)
    assert after.top_k.tolist() == [VOCAB, VOCAB, 3, VOCAB, VOCAB, VOCAB, VOCAB]
    assert after.seed[2].tolist() == [0x89ABCDEF, 0x1234567]
    assert after.bias_ids[2, :3].tolist() == [4, 9, VOCAB]
    assert after.bias_values[2, :2].tolist() == [2.5, -1.0]
    assert after.stop_ids[2, :3].tolist() == [1, 2, VOCAB]


def test_too_many_stop_ids_are_refused() -> None:
    update = RowUpdate(0, GREEDY, 0, 1, np.arange(17, dtype=np.int32), None)
    with pytest.raises(ValueError, match="row 0 has 17 stop ids, the sampler holds 16"):
        pack_row_updates([update], 1, ROWS, VOCAB)


def test_first_argmax_takes_the_lowest_of_equals() -> None:
    assert first_argmax(np.array([[1.0, 3.0, 3.0], [-np.inf, -np.inf, -2.0]])).tolist() == [1, 2]
