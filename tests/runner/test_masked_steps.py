"""Steps in two parts on every runner: forward at launch, sampling under masks, against the dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import stand_in_jax, stand_in_torch
from helpers.fake_capture import FakeCapture
from helpers.plan_driver import DECODE, Driven, PlanDriver, masks_of
from helpers.stand_in_model import VOCAB, dense_logits, random_weights

from sglang_jax.runner.group import GroupRunner, Order, follow
from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.rank_beats import Progress
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.reference import reference_sample
from torch_backend.graphs import Bucket
from torch_backend.noise import gumbel_noise

pytestmark = pytest.mark.slow

WEIGHTS = random_weights()
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (9, 17, 5)]
PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.5, repetition_penalty=1.2)

RUNNERS: dict[str, Callable[..., Runner]] = {
    "jax": stand_in_jax.stand_in_runner,
    "torch": stand_in_torch.stand_in_runner,
    "torch captured": lambda weights, **sizes: stand_in_torch.stand_in_runner(
        weights, capture=FakeCapture(), graph_buckets=(1, 3), mixed_buckets=(Bucket(2, 32),), **sizes
    ),
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = RUNNERS[request.param](WEIGHTS)
    runner.warm_up(lambda done, total, what: None)
    yield runner
    runner.close()


@pytest.fixture
def driver(runner: Runner) -> Iterator[PlanDriver]:
    before = runner.report().compiles_after_warm_up
    yield PlanDriver(runner)
    assert runner.report().compiles_after_warm_up == before


def allowed_behind(tokens: list[int]) -> list[int]:
    """A few tokens, which differ for each text."""
    return np.random.default_rng([len(tokens), *tokens]).choice(VOCAB, 5, replace=False).tolist()


def dense(tokens: list[int], allowed: list[int] | None) -> int:
    logits = dense_logits(WEIGHTS, tokens)[-1]
    if allowed is not None:
        keep = np.zeros(VOCAB, bool)
        keep[allowed] = True
        logits = np.where(keep, logits, -np.inf)
    return int(logits.argmax())


def masked_step(driver: PlanDriver, parts: list[tuple[Driven, int]], masked: list[Driven], **wanted: object) -> None:
    launched = driver.launch(parts, masked=masked, **wanted)  # type: ignore[arg-type]
    assert launched.plan.masked is not None
    under = [request for (request, _), yes in zip(parts, launched.plan.masked, strict=True) if yes]
    launched.handle.sample(masks_of([allowed_behind(request.tokens) for request in under], VOCAB))
    launched.finish()


def test_greedy_under_a_mask_is_the_most_likely_allowed_token_and_other_rows_do_not_change(driver: PlanDriver) -> None:
    one, two, three = (driver.admit(prompt) for prompt in PROMPTS)
    masked_step(driver, [(one, 9), (two, 10)], [one])
    masked_step(driver, [(one, DECODE), (two, 7), (three, 5)], [one, three], top_logprobs=5)
    for _ in range(4):
        masked_step(driver, [(one, DECODE), (two, DECODE), (three, DECODE)], [one, three], top_logprobs=1)
    for request, masked in ((one, True), (two, False), (three, True)):
        tokens = list(request.prompt)
        for token in request.output:
            assert token == dense(tokens, allowed_behind(tokens) if masked else None)
            tokens.append(token)
        assert len(request.output) >= 5
    logits = dense_logits(WEIGHTS, three.tokens)[len(three.prompt) - 1 : -1]
    for found, line, token in zip(three.logprobs, logits, three.output, strict=True):
        assert found.logprobs[0] == pytest.approx(line[token] - np.log(np.exp(line).sum()), abs=1e-4)


def test_masked_and_plain_steps_alternate_with_two_in_flight(driver: PlanDriver) -> None:
    request = driver.admit(PROMPTS[0])
    first = driver.launch([(request, 9)], masked=[request])
    first.handle.sample(masks_of([allowed_behind(request.tokens)], VOCAB))
    second = driver.launch([(request, DECODE)])
    first.finish()
    second.finish()
    third = driver.launch([(request, DECODE)], masked=[request])
    third.handle.sample(masks_of([allowed_behind(request.tokens)], VOCAB))
    third.finish()
    tokens = list(PROMPTS[0])
    for token, masked in zip(request.output, (True, False, True), strict=True):
        assert token == dense(tokens, allowed_behind(tokens) if masked else None)
        tokens.append(token)


def test_sampling_and_penalties_work_on_the_allowed_tokens(driver: PlanDriver) -> None:
    style = SamplingParams(temperature=0.9, top_k=3, top_p=0.95, logit_bias={7: 2.0})
    requests = [driver.admit(PROMPTS[0], style, seed=3), driver.admit(PROMPTS[1], PENALISED)]
    masked_step(driver, [(requests[0], 9), (requests[1], 17)], requests)
    for _ in range(6):
        masked_step(driver, [(request, DECODE) for request in requests], requests)
    ids = np.arange(VOCAB, dtype=np.uint32)
    for request in requests:
        output: list[int] = []
        for token in request.output:
            tokens = [*request.prompt, *output]
            keep = np.zeros(VOCAB, bool)
            keep[allowed_behind(tokens)] = True
            logits = np.where(keep, dense_logits(WEIGHTS, tokens)[-1], -1e30).astype(np.float32)
            noise = gumbel_noise((request.seed, 0), len(tokens), ids)
            found = reference_sample(
                logits, request.sampling, prompt=request.prompt, output=output, stop_ids=[], noise=noise
            )
            assert token == found.token
            output.append(token)


@pytest.mark.parametrize("hidden_by_the_mask", [False, True])
def test_logits_that_are_not_finite_are_reported_under_a_mask_too(runner: Runner, hidden_by_the_mask: bool) -> None:
    """All logits of a sequence, or only that of a token which the mask does not allow."""
    make = stand_in_jax.stand_in_runner if runner.report().backend == "jax" else stand_in_torch.stand_in_runner
    poisoned = [array.copy() for array in WEIGHTS]
    prompt = [5, 77, 6]
    if hidden_by_the_mask:
        poisoned[-1][:, next(token for token in range(VOCAB) if token not in allowed_behind(prompt))] = np.nan
    else:
        poisoned[0][77] = np.nan
    sick_runner = make(poisoned, max_rows=2, token_budget=16)
    driver = PlanDriver(sick_runner)
    sick = driver.admit(prompt)
    masked_step(driver, [(sick, 3)], [sick])
    assert sick.output == [INVALID_TOKEN]
    sick_runner.close()


def test_a_step_that_waits_for_masks_is_not_overtaken(driver: PlanDriver) -> None:
    one, two = driver.admit(PROMPTS[0]), driver.admit(PROMPTS[2])
    waiting = driver.launch([(one, 9)], masked=[one])
    with pytest.raises(RuntimeError, match="waits for its masks"):
        driver.launch([(two, 5)])
    waiting.handle.sample(masks_of([[1]], VOCAB))
    with pytest.raises(RuntimeError, match="waits for no masks"):
        waiting.handle.sample(masks_of([[1]], VOCAB))
    waiting.finish()
    assert one.output == [1]


def test_masks_reach_the_followers_of_a_group() -> None:
    """The other rank samples by itself, from plans and masks that were sent over the wire."""
    from sglang_jax.runner.group import ORDERS

    leader, other = (stand_in_torch.stand_in_runner(WEIGHTS) for _ in range(2))
    orders: list[Order] = []

    class Followers:
        def send(self, order: Order) -> None:
            orders.append(ORDERS.decode(ORDERS.encode(order)))

        def check(self) -> None:
            """No follower is lost."""

        def close(self) -> None:
            """There is nothing to close."""

    driver = PlanDriver(GroupRunner(leader, Followers()))
    request = driver.admit(PROMPTS[0])
    masked_step(driver, [(request, 9)], [request])
    for _ in range(3):
        masked_step(driver, [(request, DECODE)], [request])
    assert len(orders) == 8
    told = []
    launch = other.launch

    def launch_and_note(plan: object) -> object:
        told.append(launch(plan))  # type: ignore[arg-type]
        return told[-1]

    other.launch = launch_and_note  # type: ignore[method-assign,assignment]
    from sglang_jax.runner.group import Leave

    feed = iter([*orders, Leave()])
    other.close = lambda: None  # type: ignore[method-assign]
    follow(other, lambda: next(feed), Progress())
    assert int(other._rows.last_tokens[request.row]) == request.output[-1]
    leader.close()
