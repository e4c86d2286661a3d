"""Guessing tokens of models that keep recurrent states changes no token: wrong guesses leave nothing in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES
from helpers.guessed_outputs import check_same_outputs
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.jax_runner.runner import JaxRunner
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from torch_backend.runner import TorchRunner

DELTA_NET, MAMBA, BESIDE_ATTENTION, CONVOLUTIONS = "qwen3_5_text", "mamba2", "falcon_h1", "lfm2"
DRAFT, WINDOWS = SpeculativeAlgorithm.DRAFT, "gemma3"
"""A draft model, which has layers with a window and some without."""
SOAK = pytest.mark.soak

CHANGES = {CONVOLUTIONS: {"layer_types": ["full_attention", "conv"]}}
"""Of the first layer's inputs a state has the same behind guesses of one token over and over, right or wrong."""


@pytest.fixture(
    scope="module",
    params=[
        (DELTA_NET, Backend.TORCH),
        pytest.param((MAMBA, Backend.TORCH), marks=SOAK),
        pytest.param((BESIDE_ATTENTION, Backend.TORCH), marks=SOAK),
        (CONVOLUTIONS, Backend.TORCH),
        (MAMBA, Backend.TORCH, DRAFT),
        pytest.param((DELTA_NET, Backend.JAX), marks=SOAK),
        pytest.param((MAMBA, Backend.JAX), marks=SOAK),
        pytest.param((BESIDE_ATTENTION, Backend.JAX), marks=SOAK),
        pytest.param((CONVOLUTIONS, Backend.JAX), marks=SOAK),
        pytest.param((MAMBA, Backend.JAX, DRAFT), marks=SOAK),
        pytest.param((CONVOLUTIONS, Backend.JAX, DRAFT), marks=SOAK),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    family, backend, *draft = request.param
    folder = make_tiny_checkpoint(Path(tmp_path_factory.mktemp(family)), family, **CHANGES.get(family, {}))
    guesses: dict[str, object] = {"speculative_algorithm": SpeculativeAlgorithm.NGRAM}
    if draft:
        case, folder_of_draft = FAMILIES[WINDOWS], Path(tmp_path_factory.mktemp("draft"))
        make_tiny_checkpoint(folder_of_draft, case.architecture, **case.changes)
        guesses = {"speculative_algorithm": DRAFT, "speculative_draft_model_path": str(folder_of_draft)}
    config = EngineConfig(
        model_path=str(folder),
        backend=backend,
        device="cpu",
        dtype="float32",
        page_size=4,
        chunked_prefill_size=16,
        max_running_requests=16,
        max_mamba_cache_size=32,
        max_total_tokens=2400,
        context_length=160,
        mamba_track_interval=8,
        skip_warmup=True,
        debug_memory=True,
        speculative_num_draft_tokens=5,
        **guesses,
    )
    runner = load_backend(config)(config, open_checkpoint(str(folder)))
    yield config, runner
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "reuse"), [(1, True), (8, False), (1, False), (8, True)])
def test_outputs_are_the_same_with_guesses_and_without(
    served: tuple[EngineConfig, Runner], at_once: int, reuse: bool
) -> None:
    """Eight requests leave room for eight guesses a step."""
    right = check_same_outputs(*served, count=15, at_once=at_once, reuse=reuse, words=3, atol=2e-5)
    assert right > 5, "hardly any guess was right"


@pytest.mark.slow
def test_states_that_take_in_wrong_guesses_are_noticed(
    served: tuple[EngineConfig, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: after a step with guesses a row goes on from the state behind its own token."""
    monkeypatch.setattr(TorchRunner, "_settle_states", lambda self, *arguments: None)
    monkeypatch.setattr(JaxRunner, "_settle", lambda self, unfolded: None)
    with pytest.raises(AssertionError):
        check_same_outputs(*served, count=15, at_once=1, reuse=False, words=3, atol=2e-5)
