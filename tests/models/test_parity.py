"""Logits of both backends against transformers: every architecture and rotary variant, paged, chunked, decoded, mixed.

The Torch backend computes all of them, JAX those that differ most; `make soak` runs the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.parity_cases import (
    DYNAMIC,
    MODELS,
    STEPS,
    TOLERANCE,
    bfloat16_errors,
    decoded_logits,
    prompts,
    transformers_logits,
)
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel

from sglang_jax.models import AttentionImplementation
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention

KERNELS: dict[str, dict[str, Any]] = {
    "jax xla": {"attention": AttentionImplementation.XLA},
    "jax reference": {"attention": AttentionImplementation.REFERENCE},
    "torch numba": {"numba": True},
    "torch native": {"attention": NativeAttention()},
    "torch reference": {"attention": ReferenceAttention()},
    "torch traced": {"traced": True, "numba": True},
}
TORCH = ("torch numba", "torch native")


def load(folder: Path, kernels: str, **options: Any) -> PagedModel | TorchPagedModel:
    make = PagedModel if kernels.startswith("jax") else TorchPagedModel
    return make(folder, **KERNELS[kernels], **options)


def cases(first: Iterable[Any], kernels: Iterable[str], in_make_test: Iterable[tuple[Any, str]]) -> list[Any]:
    """The product of both; cases that are not listed run with `make soak`."""
    chosen = set(in_make_test)
    product = [(one, kernel) for one in first for kernel in kernels]
    assert chosen <= set(product)
    return [
        pytest.param(one, kernel, id=f"{one}-{kernel}", marks=() if (one, kernel) in chosen else pytest.mark.soak)
        for one, kernel in product
    ]


def check(model: PagedModel | TorchPagedModel, architecture: str, overrides: dict[str, Any]) -> None:
    sequences = prompts()
    for tokens, logits in zip(sequences, model.run(sequences, STEPS), strict=True):
        assert len(logits) == len(tokens)
        expected = transformers_logits(architecture, tokens, **overrides)
        assert np.abs(logits - expected).max() < TOLERANCE


ON_JAX = ("llama_biases", "mistral", "qwen3_biases", "dynamic", "llama3", "yarn_mscale", "yarn_attention_factor")
EACH = [*((name, kernels) for name in MODELS for kernels in TORCH), *((name, "jax xla") for name in ON_JAX)]
REFERENCES = [("mistral", "torch reference"), ("mistral", "jax reference")]


@pytest.mark.parametrize(
    ("name", "kernels"), cases(MODELS, [name for name in KERNELS if name != "torch traced"], [*EACH, *REFERENCES])
)
def test_logits_equal_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    check(load(make_tiny_checkpoint(tmp_path, architecture, **overrides), kernels), architecture, overrides)


SIZES = [(1, "jax xla"), (1, "torch numba"), (16, "torch native"), (64, "torch numba")]


@pytest.mark.parametrize(("page_size", "kernels"), cases((1, 16, 64), ("jax xla", *TORCH), SIZES))
def test_page_sizes(page_size: int, kernels: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    check(load(folder, kernels, page_size=page_size, columns=64 // page_size), "llama", {})


@pytest.mark.parametrize("kernels", ["jax xla", "torch native"])
class TestDynamicScaling:
    """Beyond the original context: each token as in a sequence that ends with it, as transformers decodes."""

    @pytest.mark.parametrize(
        "steps",
        [
            ({0: 10}, {0: 20}, *[{0: 1}] * 13),
            pytest.param(({0: 16}, *[{0: 1}] * 27), marks=pytest.mark.soak),
            pytest.param(({0: 43},), marks=pytest.mark.soak),
        ],
        ids=["chunked and decoded", "decoded", "prefilled"],
    )
    def test_every_way_to_compute_a_sequence_gives_the_same_logits(
        self, steps: tuple[dict[int, int], ...], kernels: str, tmp_path: Path
    ) -> None:
        folder = make_tiny_checkpoint(tmp_path, "llama", **DYNAMIC)
        tokens = prompts()[1]
        (logits,) = load(folder, kernels).run([tokens], steps)
        assert np.abs(logits - decoded_logits("llama", tokens, prompt=16, **DYNAMIC)).max() < TOLERANCE
        assert np.abs(logits - decoded_logits("llama", tokens, prompt=1, **DYNAMIC)).max() < TOLERANCE

    def test_within_the_original_context(self, kernels: str, tmp_path: Path) -> None:
        folder = make_tiny_checkpoint(tmp_path, "llama", **DYNAMIC)
        tokens = prompts()[0][:16]
        (logits,) = load(folder, kernels).run([tokens], ({0: 9}, {0: 7}))
        assert np.abs(logits - transformers_logits("llama", tokens, **DYNAMIC)).max() < TOLERANCE


IN_BFLOAT16 = ("llama", "qwen2", "qwen3", "gemma3_text")
ROUNDED = [
    *((name, "torch numba") for name in IN_BFLOAT16),
    ("gemma3_text", "torch native"),
    ("gemma3_text", "jax xla"),
]


@pytest.mark.parametrize(("architecture", "kernels"), cases(IN_BFLOAT16, ("jax xla", *TORCH, "torch traced"), ROUNDED))
def test_bfloat16_is_as_close_to_float32_as_in_transformers(architecture: str, kernels: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype="bfloat16")
    dtype: Any = "bfloat16" if kernels.startswith("jax") else torch.bfloat16
    sequences = prompts()
    found = load(folder, kernels, dtype=dtype).run(sequences, STEPS)
    error, reference_error = bfloat16_errors(architecture, sequences, found)
    assert 0 < error < 1.2 * reference_error


@pytest.mark.parametrize(
    ("name", "kernels"), cases(("llama_biases", "mistral", "qwen2", "qwen3"), TORCH, [("mistral", "torch numba")])
)
def test_greedy_tokens_are_those_of_the_jax_model(name: str, kernels: str, tmp_path: Path) -> None:
    """Each token that the torch model decodes is, after its prefix, the most likely token of the JAX model."""
    architecture, overrides = MODELS[name]
    folder = make_tiny_checkpoint(tmp_path, architecture, **overrides)
    decoding = load(folder, kernels)
    assert isinstance(decoding, TorchPagedModel)
    tokens = decoding.greedy(prompts()[0][:16], 32)
    (logits,) = PagedModel(folder).run([tokens], [{0: 48}])
    assert logits.argmax(-1)[15:47].tolist() == tokens[16:].tolist()
