"""Guessing tokens changes how many steps an output takes, and no token of it: real models on both backends, with the
guesses that their runners make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.family_cases import FAMILIES
from helpers.scheduling import RecordingChannel
from helpers.stand_in_subject import Narrowed
from helpers.tiny_models import TINY_VOCAB_SIZE, make_tiny_checkpoint

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.errors import ConfigError
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import Finished, NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

STYLES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=0.3, top_k=8, min_p=0.02, seed=11, min_new_tokens=9, stop_token_ids=(5, 6, 7, 8, 9)),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.4),
    SamplingParams(temperature=1.1, seed=5, logit_bias={17: 3.0, 40: 2.0, 41: 2.0}),
)


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.soak)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Layers with a window beside some without, so that pages are given back while drafts are computed. On JAX this
    takes half a minute to compile, and the simulator has its runner with a smaller model."""
    case, folder = FAMILIES["gemma3"], Path(tmp_path_factory.mktemp("drafts"))
    make_tiny_checkpoint(folder, case.architecture, **case.changes)
    config = EngineConfig(
        model_path=str(folder),
        backend=Backend(request.param),
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=600,
        context_length=160,
        speculative_algorithm=SpeculativeAlgorithm.NGRAM,
        speculative_num_draft_tokens=3,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    runner.warm_up(lambda done, total, what: None)
    yield config, runner
    assert runner.report().compiles_after_warm_up == 0
    runner.close()


def options(folder: Path, draft: Path, backend: str) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder),
        backend=Backend(backend),
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=4,
        max_total_tokens=600,
        context_length=160,
        speculative_algorithm=SpeculativeAlgorithm.DRAFT,
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=3,
    )


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.soak)])
def guessed_by_another(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """A model whose draft model is of another family, with windows, and knows fewer positions."""
    folder, draft = (Path(tmp_path_factory.mktemp(name)) for name in ("model", "draft"))
    case = FAMILIES["gemma3"]
    make_tiny_checkpoint(folder, "qwen3")
    make_tiny_checkpoint(draft, case.architecture, **{**case.changes, "max_position_embeddings": 100})
    config = options(folder, draft, request.param)
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    runner.warm_up(lambda done, total, what: None)
    yield config, runner
    assert runner.report().compiles_after_warm_up == 0
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
def test_outputs_are_the_same_with_guesses_of_another_model(
    guessed_by_another: tuple[EngineConfig, Runner], at_once: int
) -> None:
    _, runner = guessed_by_another
    assert [pool.window for pool in runner.spec.pools] == [None, None, 7], "its groups are behind the model's"
    check(*guessed_by_another, count=10, at_once=at_once, reuse=at_once > 1)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "vocabulary of 400 tokens.*model_path .* one of 384.*same vocabulary"),
        ({"speculative_algorithm": SpeculativeAlgorithm.NGRAM}, "does nothing with speculative_algorithm ngram"),
        ({"speculative_draft_model_path": None}, "say which model guesses, by --speculative-draft-model-path"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused(
    backend: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    make_tiny_checkpoint(folder, "llama")
    make_tiny_checkpoint(draft, "llama", vocab_size=400)
    config = options(folder, draft, backend).model_copy(update=changes)
    with pytest.raises(ConfigError, match=words):
        load_backend(config)(config, open_checkpoint(str(folder)))


def requests(count: int) -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts that repeat themselves, some of which begin alike; ways to sample; logprobs or none."""
    rng = np.random.default_rng(count)
    made = []
    shared = np.tile(rng.integers(10, TINY_VOCAB_SIZE, 6), 5).tolist()
    for number in range(count):
        passage = rng.integers(10, TINY_VOCAB_SIZE, int(rng.integers(2, 9))).tolist()
        prompt = shared * (number % 3 == 0) + passage * int(rng.integers(1, 6))
        how = STYLES[number % len(STYLES)]
        sampling = replace(how, max_new_tokens=int(rng.integers(max(how.min_new_tokens, 1), 50)))
        made.append((prompt, sampling, (-1, -1, 2)[number % 3]))
    return made


def outputs(
    config: EngineConfig, runner: Runner, asked: list[tuple[list[int], SamplingParams, int]], at_once: int
) -> tuple[dict[int, list[int]], dict[int, list[float | None]], list[Finished]]:
    """Tokens and logprobs of each request, at most `at_once` of them in flight; and what the scheduler said last."""
    channel = RecordingChannel()
    scheduler = Scheduler(runner, (2,), config, channel)
    waiting = [
        NewRequest(id=number, token_ids=np.array(prompt, np.int32).tobytes(), sampling=how, stream=True, top_logprobs=k)
        for number, (prompt, how, k) in enumerate(asked, 1)
    ]
    while waiting or not scheduler.idle:
        while waiting and len(scheduler.requests) < at_once:
            scheduler.add(waiting.pop(0))
        scheduler.step()
        check_everything(scheduler.cache)
    numbers = range(1, len(asked) + 1)
    logprobs = {number: [logprob for _, logprob in channel.logprobs.get(number, [])] for number in numbers}
    return {number: channel.output(number) for number in numbers}, logprobs, [channel.finished[one] for one in numbers]


def check(config: EngineConfig, runner: Runner, count: int, at_once: int, reuse: bool) -> int:
    """Compares outputs with drafts and without; how many drafts were right."""
    config = config.model_copy(update={"disable_radix_cache": not reuse})
    plain = config.model_copy(update={"speculative_algorithm": SpeculativeAlgorithm.NONE})
    one_by_one = Narrowed(runner, replace(runner.spec, max_samples=1), lambda result: None)
    asked = requests(count)
    expected, expected_logprobs, _ = outputs(plain, one_by_one, asked, at_once)
    # Without a policy that measures time, so that there are as many drafts whatever the machine does.
    tokens, logprobs, ended = outputs(plain, runner, asked, at_once)
    assert tokens == expected
    for number, found in logprobs.items():
        np.testing.assert_allclose(found, expected_logprobs[number], atol=1e-3, err_msg=f"request {number}")
    counts = [one.drafts for one in ended if one.drafts is not None]
    assert len(counts) == count
    for (_, sampling, _), one in zip(asked, ended, strict=True):
        assert one.drafts is not None
        assert one.drafts.right <= min(one.drafts.drafts, one.num_tokens)
        assert not (sampling.counts_tokens and one.drafts.drafts), "penalties depend on the token before"
    return sum(one.right for one in counts)


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "right"), [(1, 20), (3, 5)])
def test_outputs_are_the_same_with_guesses_and_without(
    served: tuple[EngineConfig, Runner], at_once: int, right: int
) -> None:
    """Three requests leave room for one guess a step, one for three."""
    assert check(*served, count=15, at_once=at_once, reuse=at_once > 1) > right, "hardly any guess was right"


@pytest.fixture(scope="module", params=["torch", "jax"])
def backend_of_many(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.DRAFT])
def served_to_many(
    request: pytest.FixtureRequest, backend_of_many: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    """With room for guesses next to 32 requests."""
    case = FAMILIES["gemma3"]
    folder, draft = (Path(tmp_path_factory.mktemp(name)) for name in ("model", "draft"))
    make_tiny_checkpoint(folder, case.architecture, **case.changes)
    make_tiny_checkpoint(draft, "qwen3")
    more: dict[str, object] = {"max_running_requests": 64, "max_total_tokens": 9600}
    if request.param is SpeculativeAlgorithm.NGRAM:
        more |= {"speculative_algorithm": request.param, "speculative_draft_model_path": None}
    config = options(folder, draft, backend_of_many).model_copy(update=more)
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    yield config, runner
    runner.close()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_many_outputs_are_the_same(served_to_many: tuple[EngineConfig, Runner], at_once: int, reuse: bool) -> None:
    """200 requests, greedy and sampled."""
    check(*served_to_many, count=200, at_once=at_once, reuse=reuse)
