"""Every backend's sampler against the plain numpy one, and against the distributions that it promises."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.samplers import ROWS, SAMPLERS, Case, Kind, token_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from sglang_jax.runner.plan import INVALID_TOKEN, SamplingUpdate
from sglang_jax.runner.row_updates import FIELDS
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import probabilities

pytestmark = pytest.mark.slow

VOCAB = 37
GREEDY = SamplingParams(temperature=0.0)
NO_IDS = np.zeros(0, np.int32)


@pytest.fixture(scope="module", params=SAMPLERS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return SAMPLERS[request.param]


@pytest.fixture(scope="module", params=[name for name, kind in SAMPLERS.items() if not kind.slow])
def fast(request: pytest.FixtureRequest) -> Kind:
    """For thousands of samples. Each sample is a function of seed and position, so a slow sampler with the same samples
    as a fast one has the same distribution."""
    return SAMPLERS[request.param]


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


def test_equals_the_reference(kind: Kind) -> None:
    @settings(max_examples=kind.few(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(cases=st.lists(CASE, min_size=ROWS, max_size=ROWS))
    def check(cases: list[Case]) -> None:
        for token, reference in zip(kind.sample(cases), [case.reference() for case in cases], strict=True):
            # A sample whose result depends on rounding proves nothing.
            assert token == token_of(reference) or reference.margin < 1e-5

    check()


def test_a_sample_depends_only_on_its_request(kind: Kind) -> None:
    @settings(max_examples=kind.few(40), deadline=None)
    @given(case=CASE, others=st.lists(CASE, min_size=3, max_size=3), row=st.integers(0, 2), line=st.integers(0, 3))
    def check(case: Case, others: list[Case], row: int, line: int) -> None:
        rows = [3, 4, 5]
        rows.insert(line, row)
        together = kind.sample([*others[:line], case, *others[line:]], rows)
        assert together[line] == kind.sample([case])[0]

    check()


def random_case(rng: np.random.Generator) -> Case:
    """A case with a vocabulary of 3000, in which each filter and penalty affects most tokens."""
    logits = rng.normal(0, 1.5, 3000).astype(np.float32)
    likeliest = np.argsort(-logits)[:40]
    return Case(
        logits,
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.6, 1.0, 1.7], p=[0.1, 0.3, 0.3, 0.3])),
            top_k=int(rng.choice([-1, 3, 20, 400])),
            top_p=float(rng.choice([1.0, 0.95, 0.3])),
            min_p=float(rng.choice([0.0, 0.02, 0.3])),
            presence_penalty=float(rng.choice([0.0, 1.5])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.5])),
            logit_bias={int(likeliest[5]): 3.0},
        ),
        seed=int(rng.integers(2**63)),
        prompt=rng.choice(likeliest, rng.integers(1, 60)).tolist(),
        output=rng.choice(likeliest[:20], 20).tolist(),
    )


def test_all_samplers_sample_the_same_tokens() -> None:
    rng = np.random.default_rng(8)
    cases = [random_case(rng) for _ in range(5 * ROWS)]
    batches = [cases[start : start + ROWS] for start in range(0, len(cases), ROWS)]
    wanted, *others = ([token for batch in batches for token in kind.sample(batch)] for kind in SAMPLERS.values())
    assert all(tokens == wanted for tokens in others)
    assert len(set(wanted)) > 3 * ROWS


MIXES = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.7, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=0.8, min_p=0.1),
    "all": SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("sampling", MIXES.values(), ids=MIXES)
def test_frequencies_fit_the_distribution(fast: Kind, sampling: SamplingParams) -> None:
    count = 10_000
    logits = np.random.default_rng(3).normal(0, 1.2, 12).astype(np.float32)
    expected = probabilities(logits, sampling)
    observed = np.bincount(fast.samples_of(logits, sampling, count), minlength=12)
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    assert stats.chisquare(observed[possible], expected[possible] * count).pvalue > 1e-3


def sampled_tokens(fast: Kind, logits: np.ndarray, **sampling: float) -> set[int]:
    """All tokens that occur in many samples."""
    return set(fast.samples_of(logits, SamplingParams(**sampling), 2000))  # type: ignore[arg-type]


def test_top_p_works_on_the_probabilities_after_temperature_and_top_k(fast: Kind) -> None:
    # Probabilities at temperature 1: .4 .3 .2 .1; among the two that top-k keeps, the first has 4/7 > 0.55.
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert sampled_tokens(fast, logits, top_k=2, top_p=0.55) == {0}
    assert sampled_tokens(fast, logits, top_p=0.55) == {0, 1}
    # Temperature 0.5 squares and renormalises: 16/30 + 9/30 > 0.8; at temperature 1 it takes three.
    assert sampled_tokens(fast, logits, temperature=0.5, top_p=0.8) == {0, 1}
    assert sampled_tokens(fast, logits, top_p=0.8) == {0, 1, 2}


def test_ties_with_the_last_token_kept_are_kept(fast: Kind) -> None:
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert sampled_tokens(fast, logits, top_k=2) == {0, 1, 2, 3}
    assert sampled_tokens(fast, logits, top_p=0.5) == {0, 1, 2, 3}


def test_a_large_vocabulary_is_filtered_exactly(kind: Kind) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 50_000).astype(np.float32)
    for sampling in (SamplingParams(top_k=1000), SamplingParams(top_p=0.97), SamplingParams(top_k=40, top_p=0.5)):
        case = Case(logits, sampling, seed=77)
        reference = case.reference()
        assert reference.margin > 1e-6
        assert kind.sample([case]) == [token_of(reference)]


@pytest.mark.parametrize(("sampled", "token"), [(0, 4), (1, 4), (2, 9), (3, 9)])
def test_stop_ids_are_masked_until_min_new_tokens_were_sampled(kind: Kind, sampled: int, token: int) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 9]] = 1.0, 2.0
    sampling = SamplingParams(temperature=0.0, min_new_tokens=2)
    assert kind.sample([Case(logits, sampling, prompt=[1, 2, 3], output=[5] * sampled, stop_ids=[9, 30])]) == [token]


def test_the_last_token_of_the_vocabulary_is_an_ordinary_token(kind: Kind) -> None:
    """Its id is next to the number that fills unused entries of stop ids and biases."""
    last = VOCAB - 1
    logits = np.zeros(VOCAB, np.float32)
    logits[last] = 1.0
    masked = SamplingParams(temperature=0.0, min_new_tokens=3)
    assert kind.sample([Case(logits, GREEDY)]) == [last]
    assert kind.sample([Case(logits, masked, stop_ids=[5])]) == [last]
    assert kind.sample([Case(logits, masked, stop_ids=[5, last])]) == [0]
    assert kind.sample([Case(logits, SamplingParams(temperature=0.0, logit_bias={3: 0.5}))]) == [last]
    assert kind.sample([Case(logits, SamplingParams(temperature=0.0, logit_bias={3: 0.5, last: -1.0}))]) == [3]


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.75},
        {"presence_penalty": 0.75},
        {"repetition_penalty": 2.0},
        {"logit_bias": {9: -0.75}},
        {"min_new_tokens": 8},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_single_greedy_request_gets_the_one_option_it_sets(kind: Kind, asked: dict[str, float]) -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[4, 9]] = 1.5, 2.0
    sampling = SamplingParams(temperature=0.0, **asked)
    assert kind.sample([Case(logits, GREEDY, output=[9], stop_ids=[9])]) == [9]
    assert kind.sample([Case(logits, sampling, output=[9], stop_ids=[9])]) == [4]


def test_tiny_temperature_is_greedy_and_stays_finite(kind: Kind) -> None:
    logits = np.random.default_rng(1).normal(0, 30, VOCAB).astype(np.float32)
    assert kind.sample([Case(logits, SamplingParams(temperature=1e-40))]) == [int(logits.argmax())]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(top_p=0.9)], ids=["greedy", "random"])
def test_non_finite_logits_affect_only_their_row(kind: Kind, sampling: SamplingParams) -> None:
    rng = np.random.default_rng(2)
    cases = [Case(rng.normal(size=VOCAB).astype(np.float32), sampling, seed=row) for row in range(5)]
    healthy = kind.sample(cases)
    cases[0].logits[7] = np.nan
    cases[1].logits[VOCAB - 1] = np.inf
    cases[2].logits[0], cases[2].logits[3] = np.inf, np.nan
    cases[3].logits[:] = np.nan
    assert kind.sample(cases) == [INVALID_TOKEN] * 4 + [healthy[4]]


def test_rows_that_sample_nothing_leave_the_counts_unchanged(kind: Kind) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    history = np.array([3, 3, 4, 5, 5], np.int32)
    sampler = kind.make(VOCAB)
    sampler.update([SamplingUpdate(1, sampling, 0, 2, NO_IDS, history)])
    assert sampler.parameter("occurrences")[1, 3:6].tolist() == [1, 2, 4]
    sampler.count([1], [7])
    sampler.count([1], [INVALID_TOKEN])
    assert sampler.parameter("occurrences")[1].tolist() == [0, 0, 0, 1, 2, 4, 0, 2] + [0] * (VOCAB - 8)


def test_row_updates_leave_other_rows_untouched(kind: Kind) -> None:
    full = SamplingParams(
        temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={4: 2.5, 9: -1.0}
    )
    names = [field.name for field in FIELDS] + ["occurrences"]
    sampler = kind.make(VOCAB)
    stop_ids, history = np.array([1, 2], np.int32), np.array([1], np.int32)
    sampler.update([SamplingUpdate(2, full, 0x123456789ABCDEF, 11, stop_ids, history)])
    before = {name: sampler.parameter(name)[2].tolist() for name in names}
    sampler.update([SamplingUpdate(4, GREEDY, 1, 2, NO_IDS, None)])
    assert {name: sampler.parameter(name)[2].tolist() for name in names} == before
    assert sampler.parameter("temperature")[2] == np.float32(0.7)
    assert sampler.parameter("top_k").tolist() == [VOCAB, VOCAB, 3, VOCAB, VOCAB, VOCAB, VOCAB]
    assert sampler.parameter("seed")[2].tolist() == [0x89ABCDEF, 0x1234567]
    assert sampler.parameter("bias_ids")[2, :3].tolist() == [4, 9, VOCAB]
    assert sampler.parameter("bias_values")[2, :2].tolist() == [2.5, -1.0]
    assert sampler.parameter("stop_ids")[2, :3].tolist() == [1, 2, VOCAB]


def test_a_row_keeps_no_option_of_its_last_request(kind: Kind) -> None:
    logits = np.random.default_rng(4).normal(0, 1, VOCAB).astype(np.float32)
    loud = SamplingParams(
        temperature=1.5, top_k=3, min_new_tokens=9, repetition_penalty=3.0, logit_bias=dict.fromkeys(range(20), -50.0)
    )
    sampler = kind.make(VOCAB)
    sampler.update([SamplingUpdate(0, loud, 5, 1, np.arange(20, VOCAB - 1, dtype=np.int32), np.array([36], np.int32))])
    assert sampler.sample(logits[None], [0], [1]) == [36]
    sampler.update([SamplingUpdate(0, GREEDY, 5, 1, NO_IDS, None)])
    assert sampler.sample(logits[None], [0], [1]) == [int(logits.argmax())]
