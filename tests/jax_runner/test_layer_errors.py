"""The error of each layer equals that of transformers with the same layers rounded."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from helpers.tiny_models import make_tiny_checkpoint
from torch import nn

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.quantization import INT4_GROUPS, INT8_ROWS, Quantization
from sglang_jax.jax_runner.layer_errors import layer_errors, measured_layers

TOKENS = np.random.default_rng(0).integers(5, 380, 37).tolist()


def rounded(weight: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    if encoding is INT4_GROUPS:
        size = next(each for each in (128, 64, 32) if weight.shape[1] % each == 0)
        encoding = Encoding(GroupType(Levels.INT4, size, Scales.BFLOAT16))
    return torch.from_numpy(Quantization(encoding).widened(weight.numpy()))


def expected_errors(folder: Path, encoding: Encoding) -> dict[int | None, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layers = list(model.model.layers)

    def logprobs() -> torch.Tensor:
        return model(torch.tensor([TOKENS])).logits[0].double().log_softmax(-1)

    found: dict[int | None, float] = {}
    with torch.no_grad():
        plain = logprobs()
        for number in [*range(len(layers)), None]:
            changed = [layers[number]] if number is not None else layers
            linear = [each for layer in changed for each in layer.modules() if isinstance(each, nn.Linear)]
            before = [each.weight.clone() for each in linear]
            for each in linear:
                each.weight.copy_(rounded(each.weight, encoding))
            found[number] = float((plain.exp() * (plain - logprobs())).sum(-1).mean())
            for each, weight in zip(linear, before, strict=True):
                each.weight.copy_(weight)
    return found


@pytest.mark.parametrize(
    ("architecture", "encoding"),
    # Windows of 16 tokens in a second group of pages, and recurrent states.
    [("gemma3_text", INT4_GROUPS), ("qwen3_5_text", INT8_ROWS)],
    ids=["windows, int4", "states, int8"],
)
def test_errors_are_those_of_transformers(tmp_path: Path, architecture: str, encoding: Encoding) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", architecture)
    checkpoint = open_checkpoint(str(folder))
    layers = list(range(checkpoint.config.num_layers))
    errors = layer_errors(
        checkpoint.reader, checkpoint.config, Quantization(encoding), TOKENS, layers, jax.devices("cpu")[0]
    )
    found = {each.layer: each.divergence for each in errors}
    expected = expected_errors(folder, encoding)
    assert list(found) == [*layers, None]
    assert min(expected.values()) > 1e-6
    for layer, divergence in expected.items():
        assert found[layer] == pytest.approx(divergence, rel=0.02), layer


@pytest.mark.parametrize(
    ("layers", "most", "measured"),
    [(5, 64, [0, 1, 2, 3, 4]), (5, 5, [0, 1, 2, 3, 4]), (61, 4, [0, 20, 40, 60]), (30, 2, [0, 29]), (7, 1, [0])],
)
def test_few_layers_are_evenly_spaced(layers: int, most: int, measured: list[int]) -> None:
    assert measured_layers(layers, most) == measured
