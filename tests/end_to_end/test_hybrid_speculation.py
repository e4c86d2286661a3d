"""Drafts for models with recurrent states change no token: rejected drafts leave the states unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES, LATENT
from helpers.guessed_outputs import check_same_outputs
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures import manifest
from sglang_jax.architectures.registry import family_named
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import Backend, EngineConfig, SpeculativeAlgorithm
from sglang_jax.jax_runner.runner import JaxRunner
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.protocol import Runner
from torch_backend.runner import TorchRunner

DELTA_NET, MAMBA, BESIDE_ATTENTION, CONVOLUTIONS = "qwen3_5_text", "mamba2", "falcon_h1", "lfm2"
MIXED = "mixed"
"""An untrained model of latent attention, a window and a gated delta net: all kinds of cache groups in one model."""
DRAFT, WINDOWS = SpeculativeAlgorithm.DRAFT, "gemma3"
"""A draft model that has layers with and without a window."""
SOAK = pytest.mark.soak

CHANGES = {CONVOLUTIONS: {"layer_types": ["full_attention", "conv"]}}
"""For drafts that repeat one token, the first layer's convolution inputs are the same whether accepted or rejected."""


@pytest.fixture(
    scope="module",
    params=[
        (DELTA_NET, Backend.TORCH),
        pytest.param((MAMBA, Backend.TORCH), marks=SOAK),
        pytest.param((BESIDE_ATTENTION, Backend.TORCH), marks=SOAK),
        (CONVOLUTIONS, Backend.TORCH),
        (MIXED, Backend.TORCH, DRAFT),
        pytest.param((MAMBA, Backend.TORCH, DRAFT), marks=SOAK),
        pytest.param((DELTA_NET, Backend.JAX), marks=SOAK),
        pytest.param((MAMBA, Backend.JAX), marks=SOAK),
        pytest.param((BESIDE_ATTENTION, Backend.JAX), marks=SOAK),
        pytest.param((CONVOLUTIONS, Backend.JAX), marks=SOAK),
        pytest.param((MAMBA, Backend.JAX, DRAFT), marks=SOAK),
        pytest.param((MIXED, Backend.JAX, DRAFT), marks=SOAK),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    family, backend, *by_draft = request.param
    folder = Path(tmp_path_factory.mktemp(family))
    drafting: dict[str, object] = {"speculative_algorithm": SpeculativeAlgorithm.NGRAM}
    if by_draft:
        draft = tiny(WINDOWS, folder / "draft")
        drafting = {"speculative_algorithm": DRAFT, "speculative_draft_model_path": str(draft.source.path)}
    with pytest.MonkeyPatch.context() as patch:
        checkpoint = mixed(folder, patch) if family == MIXED else tiny(family, folder)
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
            **drafting,
        )
        runner = load_backend(config)(config, checkpoint)
    yield config, runner
    runner.close()


def tiny(family: str, folder: Path) -> Checkpoint:
    case = (FAMILIES | LATENT).get(family)
    folder.mkdir(exist_ok=True)
    if case is None:
        make_tiny_checkpoint(folder, family, **CHANGES.get(family, {}))
    else:
        make_tiny_checkpoint(folder, case.architecture, **case.changes)
    return open_checkpoint(str(folder))


def mixed(folder: Path, patch: pytest.MonkeyPatch) -> Checkpoint:
    """`MIXED`, of layers of three families, with random weights. `patch` lasts while weights are loaded, so that a
    family has names for the parameters of all three."""
    latent = tiny("deepseek_v3", folder)
    windows, states = (tiny(family, folder / family).config for family in (WINDOWS, DELTA_NET))
    window = next(layer for layer in windows.layers if layer.attention is not None and layer.attention.window)
    layers = (latent.config.layers[0], window, states.layers[0], latent.config.layers[-1])
    config = replace(latent.config, layers=layers, mtp_layers=0)
    families = [family_named(model.architecture) for model in (windows, states, config)]
    names = {part: name for family in families for part, name in family.names.items()}
    patch.setattr(manifest, "family_named", lambda name: replace(family_named(name), names=names))
    return replace(latent, config=config, reader=DummyReader(config, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "reuse"), [(1, True), (8, False), (1, False), (8, True)])
def test_outputs_are_the_same_with_and_without_drafts(
    served: tuple[EngineConfig, Runner], at_once: int, reuse: bool
) -> None:
    """Eight requests leave room for eight drafts a step."""
    right = check_same_outputs(*served, count=15, at_once=at_once, reuse=reuse, words=3, atol=2e-5)
    assert right > 5, "hardly any draft was accepted"


@pytest.mark.slow
def test_states_that_include_rejected_drafts_are_noticed(
    served: tuple[EngineConfig, Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: after a step with drafts, a row continues from the state after its own token."""
    monkeypatch.setattr(TorchRunner, "_settle_states", lambda self, *arguments: None)
    monkeypatch.setattr(JaxRunner, "_settle", lambda self, flat: None)
    with pytest.raises(AssertionError):
        check_same_outputs(*served, count=15, at_once=1, reuse=False, words=3, atol=2e-5)
