"""Every runner driven by hand on a small model, against that model's dense forward in numpy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import stand_in_jax, stand_in_torch
from helpers.fake_capture import FakeCapture
from helpers.plan_driver import DECODE, Driven, PlanDriver
from helpers.stand_in_model import VOCAB, dense_logits, random_weights

from sglang_jax.runner.plan import INVALID_TOKEN, PromptLogprobs
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from torch_backend.graphs import Bucket

pytestmark = pytest.mark.slow

WEIGHTS = random_weights()
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (9, 1, 23, 14)]
RANDOM = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01)
PENALISED = SamplingParams(
    temperature=1.2, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3, min_new_tokens=4
)


MakeRunner = Callable[..., Runner]


def captured_torch_runner(weights: Sequence[np.ndarray], **sizes: int) -> Runner:
    """Decode steps of up to three rows are replayed, and steps with prompts of up to two; larger ones are launched one
    operation after the other."""
    mixed = (Bucket(0, 8), Bucket(2, 32))
    return stand_in_torch.stand_in_runner(
        weights, capture=FakeCapture(), graph_buckets=(1, 3), mixed_buckets=mixed, **sizes
    )


RUNNERS: dict[str, MakeRunner] = {
    "jax": stand_in_jax.stand_in_runner,
    "torch": stand_in_torch.stand_in_runner,
    "torch captured": captured_torch_runner,
}


@pytest.fixture(scope="module", params=RUNNERS)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    return RUNNERS[request.param]


@pytest.fixture(scope="module")
def runner(make_runner: MakeRunner) -> Iterator[Runner]:
    runner = make_runner(WEIGHTS)
    runner.warm_up(lambda done, total, what: None)
    yield runner
    runner.close()


@pytest.fixture
def driver(runner: Runner) -> Iterator[PlanDriver]:
    """A driver of the warm runner; no test may cause a compilation."""
    before = runner.report().compiles_after_warm_up
    yield PlanDriver(runner)
    assert runner.report().compiles_after_warm_up == before


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The dense model's greedy tokens."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(WEIGHTS, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def run_alone(
    driver: PlanDriver, prompt: Sequence[int], sampling: SamplingParams, count: int, seed: int = 0
) -> list[int]:
    """Output of a request that runs by itself."""
    request = driver.admit(prompt, sampling, seed=seed, stop_ids=[0, 1, 2])
    output = driver.generate(request, count)
    driver.release(request)
    return list(output)


@pytest.mark.parametrize("chunk", [1, 3, 16, 32])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_text_equals_the_dense_models_for_every_chunk_size(
    driver: PlanDriver, prompt: list[int], chunk: int
) -> None:
    request = driver.admit(prompt)
    assert driver.generate(request, 8, chunk) == greedy(prompt, 8)


def test_decode_rows_and_prefill_chunks_in_one_step(driver: PlanDriver) -> None:
    first, second, third, fourth = (driver.admit(prompt) for prompt in PROMPTS)
    driver.step([(first, 9)])
    driver.step([(first, DECODE), (third, 13), (second, 1)])
    driver.step([(second, DECODE), (first, DECODE), (fourth, 7), (third, 10)])
    driver.step([(first, DECODE), (second, DECODE), (third, DECODE), (fourth, 7)])
    for _ in range(4):
        driver.step([(fourth, DECODE), (second, DECODE), (first, DECODE), (third, DECODE)])
    for request in (first, second, third, fourth):
        assert request.output == greedy(request.prompt, len(request.output))
        assert len(request.output) >= 5


def test_a_chunk_of_one_token_reads_the_plan_and_not_the_last_sample(driver: PlanDriver) -> None:
    driver.generate(driver.admit(PROMPTS[0]), 2)
    driver.free_rows = [0, 1, 2, 3]
    again = driver.admit(PROMPTS[3])
    assert driver.generate(again, 3, chunk=1) == greedy(PROMPTS[3], 3)


def test_chunks_that_do_not_sample_leave_last_token_and_counts_unchanged(driver: PlanDriver) -> None:
    sampling = SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    expected = run_alone(driver, PROMPTS[2], sampling, 12)
    chunked = driver.admit(PROMPTS[2], sampling)
    assert driver.generate(chunked, 12, chunk=5) == expected


@pytest.mark.parametrize("sampling", [RANDOM, PENALISED], ids=["random", "penalised"])
def test_two_steps_in_flight_sample_the_same_as_one_at_a_time(driver: PlanDriver, sampling: SamplingParams) -> None:
    expected = run_alone(driver, PROMPTS[0], sampling, 20, seed=3)
    request = driver.admit(PROMPTS[0], sampling, seed=3, stop_ids=[0, 1, 2])
    flying = [driver.launch([(request, 9)])]
    for _ in range(19):
        flying.append(driver.launch([(request, DECODE)]))
        flying.pop(0).finish()
    flying.pop().finish()
    assert request.output == expected


def test_output_is_batch_invariant_and_depends_on_neither_row_nor_bucket(driver: PlanDriver) -> None:
    expected = run_alone(driver, PROMPTS[3], RANDOM, 10, seed=2**62 + 5)
    others = [driver.admit(PROMPTS[0], PENALISED, seed=1), driver.admit(PROMPTS[2], seed=2)]
    request = driver.admit(PROMPTS[3], RANDOM, seed=2**62 + 5, stop_ids=[0, 1, 2])
    driver.step([(others[0], 9), (others[1], 20), (request, 3)])
    driver.step([(others[0], DECODE), (request, 11), (others[1], 3)])
    for _ in range(9):
        driver.step([(others[1], DECODE), (request, DECODE), (others[0], DECODE)])
    assert request.row == 2
    assert request.output == expected


def test_a_row_keeps_nothing_of_its_last_request(driver: PlanDriver) -> None:
    loud = SamplingParams(temperature=2.0, logit_bias=dict.fromkeys(range(50), -100.0), repetition_penalty=3.0, top_k=2)
    before = driver.admit(PROMPTS[1], loud)
    driver.generate(before, 10)
    assert min(before.output) >= 50
    driver.release(before)
    after = driver.admit(PROMPTS[1])
    assert after.row == 0
    assert driver.generate(after, 10) == greedy(PROMPTS[1], 10)
    driver.release(after)
    assert run_alone(driver, PROMPTS[1], PENALISED, 10) == run_alone(driver, PROMPTS[1], PENALISED, 10)


@pytest.mark.parametrize("sampling", [RANDOM, PENALISED], ids=["random", "penalised"])
def test_retracted_requests_continue_with_the_same_output(driver: PlanDriver, sampling: SamplingParams) -> None:
    expected = run_alone(driver, PROMPTS[2], sampling, 12, seed=9)
    request = driver.admit(PROMPTS[2], sampling, seed=9, stop_ids=[0, 1, 2])
    driver.generate(request, 5)
    driver.release(request)
    other = driver.admit(PROMPTS[0], PENALISED)
    driver.generate(other, 3)
    driver.readmit(request)
    assert driver.generate(request, 12, chunk=7) == expected


def test_shared_pages_are_read_and_more_deltas_than_the_bucket_takes_are_applied(driver: PlanDriver) -> None:
    prompt = RNG.integers(0, VOCAB, 62).tolist()
    owner = driver.admit(prompt)
    driver.step([(owner, 32)])
    driver.step([(owner, 30)])
    other = driver.admit(prompt)
    driver.share_prefix(owner, other, 15)
    driver.step([(owner, DECODE), (other, 2)])
    driver.step([(owner, DECODE), (other, DECODE)])
    assert owner.output[:2] == other.output == greedy(prompt, 2)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_output_logprobs_are_those_of_the_raw_logits(driver: PlanDriver, top: int) -> None:
    one = driver.admit(PROMPTS[0], SamplingParams(temperature=0.7, logit_bias={5: 3.0}, presence_penalty=1.0), seed=4)
    two = driver.admit(PROMPTS[2])
    driver.step([(one, 9), (two, 23)], top_logprobs=top)
    for _ in range(3):
        driver.step([(two, DECODE), (one, DECODE)], top_logprobs=top)
    for request in (one, two):
        expected = log_softmax(dense_logits(WEIGHTS, request.tokens))[len(request.prompt) - 1 : -1]
        for found, logprobs, token in zip(request.logprobs, expected, request.output, strict=True):
            assert found.logprobs[0] == pytest.approx(logprobs[token], abs=1e-4)
            assert found.top_ids.shape == (1, top)
            assert found.top_ids[0].tolist() == np.argsort(-logprobs)[:top].tolist()
            assert found.top_logprobs[0] == pytest.approx(np.sort(logprobs)[::-1][:top], abs=1e-4)


def test_prompt_logprobs_of_chunks(driver: PlanDriver) -> None:
    request, other = driver.admit(PROMPTS[2]), driver.admit(PROMPTS[0])
    driver.step([(request, 8), (other, 9)], prompt_logprobs=[wanted(request, 0, 3, 8)], prompt_top_logprobs=5)
    driver.step([(other, DECODE), (request, 15)], prompt_logprobs=[wanted(request, 1, 8, 22)], prompt_top_logprobs=5)
    logprobs = log_softmax(dense_logits(WEIGHTS, request.prompt))
    found = np.concatenate([part.logprobs for part in request.prompt_logprobs])
    expected = [logprobs[position, request.prompt[position + 1]] for position in range(3, 22)]
    assert found == pytest.approx(expected, abs=1e-4)
    top_ids = np.concatenate([part.top_ids for part in request.prompt_logprobs])
    assert top_ids.tolist() == np.argsort(-logprobs[3:22], axis=-1)[:, :5].tolist()
    assert request.output == greedy(request.prompt, 1)


def wanted(request: Driven, sequence: int, start: int, end: int) -> PromptLogprobs:
    """Logprobs of the tokens after positions `start` to `end`, within the chunk that is launched next."""
    targets = np.array(request.prompt[start + 1 : end + 1], np.int32)
    return PromptLogprobs(sequence, start - request.committed, targets)


def test_non_finite_logits_end_only_their_request(make_runner: MakeRunner) -> None:
    poisoned = [array.copy() for array in WEIGHTS]
    poisoned[0][77] = np.nan
    runner = make_runner(poisoned, max_rows=2, token_budget=16)
    driver = PlanDriver(runner)
    sick = driver.admit([5, 77, 6], PENALISED)
    healthy = driver.admit([token for token in PROMPTS[0] if token != 77])
    driver.step([(sick, 3), (healthy, 9)])
    driver.step([(sick, DECODE), (healthy, DECODE)])
    assert sick.output == [INVALID_TOKEN, INVALID_TOKEN]
    assert healthy.output == greedy(healthy.prompt, 2)
    driver.release(sick)
    driver.release(healthy)
    # Its row and pages serve the next request.
    assert driver.generate(driver.admit(PROMPTS[3]), 3) == greedy(PROMPTS[3], 3)
    runner.close()


def test_a_plan_beyond_the_budget_is_refused_and_changes_nothing(driver: PlanDriver) -> None:
    long = driver.admit(RNG.integers(0, VOCAB, 40).tolist())
    with pytest.raises(ValueError, match="a step of 40 tokens in 1 rows"):
        driver.launch([(long, 40)])
    driver.release(long)
    assert driver.generate(driver.admit(PROMPTS[0]), 3) == greedy(PROMPTS[0], 3)


@pytest.mark.parametrize("beyond", [0, 2**30, -(2**30)], ids=["by one", "by far", "below 0"])
def test_a_page_outside_the_pool_is_refused_by_name_and_changes_nothing(driver: PlanDriver, beyond: int) -> None:
    page = driver.runner.spec.pools[0].num_pages + beyond
    driver.free_pages.append(page)
    wrong = driver.admit(PROMPTS[0])
    with pytest.raises(
        ValueError, match=rf"row {wrong.row} page {page} in column \d+ of page table full: its pool has"
    ):
        driver.launch([(wrong, len(PROMPTS[0]))])
    wrong.pages.remove(page)
    driver.release(wrong)
    assert driver.generate(driver.admit(PROMPTS[0]), 3) == greedy(PROMPTS[0], 3)


def test_a_row_beyond_its_page_table_is_refused(driver: PlanDriver) -> None:
    long = driver.admit(PROMPTS[0])
    most = driver.runner.spec.max_pages_per_row * driver.page_size
    launched = driver.launch([(long, len(PROMPTS[0]))])
    launched.finish()
    wrong = replace(launched.plan, kv_lens=np.array([most + 1], np.int32))
    with pytest.raises(ValueError, match=rf"{most + 1} tokens in row {long.row}: .* at most {most}"):
        driver.runner.launch(wrong)
    driver.release(long)


def test_a_profile_shows_the_steps(runner: Runner, tmp_path: Path) -> None:
    driver = PlanDriver(runner)
    request = driver.admit(PROMPTS[0])
    driver.generate(request, 2)
    runner.start_profile(str(tmp_path))
    driver.generate(request, 5)
    runner.stop_profile()
    driver.generate(request, 6)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    if runner.report().backend == "torch":
        (file,) = files
        names = {event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert any(name.startswith("aten::") for name in names)
    else:
        (file,) = [file for file in files if file.name.endswith(".xplane.pb")]
        profile = jax.profiler.ProfileData.from_file(str(file))
        events = [event.name for plane in profile.planes for line in plane.lines for event in line.events]
        assert events.count("step") == 3
    driver.release(request)
