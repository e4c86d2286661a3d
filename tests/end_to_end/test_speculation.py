"""Drafts change the number of steps of an output, and none of its tokens: real models on both backends, with drafts
made by their runners."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES
from helpers.guessed_outputs import check_same_outputs
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.errors import ConfigError
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.draft_model import open_draft
from sglang_jax.runner.protocol import Runner


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.soak)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Layers with and without a window, so that pages are freed while drafts are computed. On JAX this takes half a
    minute to compile; the simulator covers its runner with a smaller model."""
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
def drafted_by_another(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """A model whose draft model is of another family, with windows, and has a shorter context."""
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
def test_outputs_are_the_same_with_drafts_of_another_model(
    drafted_by_another: tuple[EngineConfig, Runner], at_once: int
) -> None:
    _, runner = drafted_by_another
    assert [pool.window for pool in runner.spec.pools] == [None, None, 7], "its groups are behind the model's"
    check_same_outputs(*drafted_by_another, count=10, at_once=at_once, reuse=at_once > 1)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "vocabulary of 400 tokens.*model_path .* one of 384.*same vocabulary"),
        ({"speculative_algorithm": SpeculativeAlgorithm.NGRAM}, "has no effect with speculative_algorithm ngram"),
        ({"speculative_draft_model_path": None}, "needs a draft model: give --speculative-draft-model-path"),
    ],
)
def test_an_unsuitable_draft_model_is_refused(
    backend: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder, draft = tmp_path / "model", tmp_path / "draft"
    make_tiny_checkpoint(folder, "llama")
    make_tiny_checkpoint(draft, "llama", vocab_size=400)
    config = options(folder, draft, backend).model_copy(update=changes)
    with pytest.raises(ConfigError, match=words):
        load_backend(config)(config, open_checkpoint(str(folder)))


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    """The same number of tokens: the error names the first that differs."""
    folder, draft = tmp_path / "model", tmp_path / "draft"
    make_tiny_checkpoint(folder, "llama")
    make_tiny_checkpoint(draft, "llama")
    config, checkpoint = options(folder, draft, "torch"), open_checkpoint(str(folder))
    assert open_draft(config, checkpoint) is not None
    path = draft / "tokenizer.json"
    stored = json.loads(path.read_text())
    vocabulary = stored["model"]["vocab"]
    first, second = sorted((token for token in vocabulary if token.isalpha()), key=vocabulary.__getitem__)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(stored))
    words = f"token {vocabulary[second]} is b'{second}' there, and b'{first}' for model_path .*same vocabulary"
    with pytest.raises(ConfigError, match=words):
        open_draft(config, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "right"), [(1, 20), (3, 5)])
def test_outputs_are_the_same_with_and_without_drafts(
    served: tuple[EngineConfig, Runner], at_once: int, right: int
) -> None:
    """Three requests leave room for one draft a step, one request for three."""
    found = check_same_outputs(*served, count=15, at_once=at_once, reuse=at_once > 1)
    assert found > right, "hardly any draft was accepted"


@pytest.mark.slow
def test_outputs_are_the_same_with_an_adaptive_number_of_drafts(served: tuple[EngineConfig, Runner]) -> None:
    """By how often each row's drafts were accepted, and how long steps take."""
    found = check_same_outputs(*served, count=16, at_once=2, reuse=True, adaptive=True)
    assert found > 10, "hardly any draft was accepted"


@pytest.fixture(scope="module", params=["torch", "jax"])
def backend_of_many(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.DRAFT])
def served_to_many(
    request: pytest.FixtureRequest, backend_of_many: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    """With room for drafts of 32 requests."""
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
    """200 requests, greedy and sampled, some with stop strings, some under a grammar; as many drafts as fit, and as
    pay off."""
    for adaptive in (False, True):
        check_same_outputs(*served_to_many, count=200, at_once=at_once, reuse=reuse, adaptive=adaptive)
