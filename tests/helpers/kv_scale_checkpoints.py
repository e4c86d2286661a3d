"""Checkpoints with scales of keys and values, and transformers with keys and values rounded as by a cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint import Checkpoint

LAYERS, KV_HEADS, HEAD_DIM, GROUP = 2, 4, 8, 2
KEY_SIZES = np.array([1.0, 100.0, 0.1, 10.0])
VALUE_SIZES = np.array([10.0, 0.1, 100.0, 1.0])
"""Factors by which the keys and values of each kv head are enlarged; in the second layer, in reverse order of heads."""

LARGEST_STORED = {"fp8_e4m3": 448.0, "int8": 127.0}

Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps keys or values `[1, kv_heads, T, head_dim]` and their scales `[kv_heads, 1, 1]` to the values that a cache
returns."""


def make_uneven_checkpoint(folder: Path) -> Path:
    """A tiny llama whose kv heads differ by factors of up to 1000; queries and the output's columns undo that, so that
    every head has the same weight."""
    make_tiny_checkpoint(folder, "llama", num_attention_heads=KV_HEADS * GROUP, num_key_value_heads=KV_HEADS)

    def scaled(tensor: NDArray[np.float32], sizes: NDArray[np.float64], axis: int) -> NDArray[np.float32]:
        factors = np.repeat(sizes, tensor.shape[axis] // len(sizes))
        return (tensor * np.expand_dims(factors, 1 - axis)).astype(np.float32)

    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        keys, values = np.roll(KEY_SIZES, layer), np.roll(VALUE_SIZES, layer)
        changes = (("q_proj", 1 / keys, 0), ("k_proj", keys, 0), ("v_proj", values, 0), ("o_proj", 1 / values, 1))
        for name, sizes, axis in changes:
            tensors[f"{attention}.{name}.weight"] = scaled(tensors[f"{attention}.{name}.weight"], sizes, axis)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_tensors(folder: Path, added: dict[str, NDArray[Any]], *, scheme: dict[str, Any] | None = None) -> Path:
    """Adds tensors to a checkpoint, and a compressed-tensors `kv_cache_scheme` to its config."""
    file = folder / "model.safetensors"
    # Safetensors writes memory without regard to strides.
    in_order = {name: np.array(value, order="C") for name, value in added.items()}
    save_file(load_file(file) | in_order, file, metadata={"format": "pt"})
    if scheme is not None:
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "format": "dense",
            "kv_cache_scheme": scheme,
        }
        (folder / "config.json").write_text(json.dumps(values))
    return folder


def scale_tensors(
    scales: NDArray[np.float32], keys: str = "self_attn.k_scale", values: str = "self_attn.v_scale"
) -> dict[str, NDArray[np.float32]]:
    """`[layers, kv_heads, 2]` as tensors of each layer and side, `[kv_heads, 1, 1]` in the form of
    compressed-tensors."""
    return {
        f"model.layers.{layer}.{name}": scales[layer, :, side, None, None]
        for layer in range(len(scales))
        for side, name in enumerate((keys, values))
    }


def kv_scales_of(checkpoint: Checkpoint) -> NDArray[np.float32]:
    """The scales stored in a checkpoint, or the defaults: `[layers, kv_heads, 2]`."""
    reader = checkpoint.kv_parameters()
    sides = (Part.KEY, Part.VALUE)
    found = [
        [reader.read(ParameterName(side, ParameterKind.SCALE, layer)) for side in sides]
        for layer, described in enumerate(checkpoint.config.layers)
        if described.attention is not None
    ]
    return np.array(found).transpose(0, 2, 1)


def fitting_scales(folder: Path, tokens: Sequence[int], dtype: str) -> NDArray[np.float32]:
    """`[layers, kv_heads, 2]`: the largest key and value of each head over the largest number of `dtype`."""
    seen: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.abs().amax((0, 2, 3)))
        return tensor

    logits_with(folder, tokens, np.ones((LAYERS, KV_HEADS, 2), np.float32), note)
    largest = torch.stack(seen).view(LAYERS, 2, KV_HEADS).transpose(1, 2).numpy()
    return (largest / LARGEST_STORED[dtype]).astype(np.float32)


def logits_with(
    folder: Path, tokens: Sequence[int], scales: NDArray[np.float32], change: Round | None = None
) -> NDArray[np.float64]:
    """Logprobs `[T, vocab]` of transformers, whose attention sees rotated keys and values mapped by `change`."""

    class Changed(DynamicCache):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            if change is not None:
                both = [
                    change(states, torch.from_numpy(scales[layer_idx, :, side, None, None]))
                    for side, states in enumerate((key_states, value_states))
                ]
                key_states, value_states = both
            return super().update(key_states, value_states, layer_idx, *rest, **more)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ignore_mismatched_sizes=False)
    with torch.inference_mode():
        logits = model(torch.tensor([list(tokens)]), past_key_values=Changed(), use_cache=True).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()


def round_to_float8(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values that a cache in float8 e4m3 returns."""
    return (states / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales


def round_to_int8(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values that a cache in int8 returns."""
    return (states / scales).round().clamp(-128, 127) * scales


def worst_float8(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Off by the largest error of float8 rounding, in either direction: half of the last of 3 bits, below 2^-6 half of
    2^-9."""
    step = torch.maximum(states.abs() * 2**-4, scales * 2**-10)
    return states + step * _signs(states)


def worst_int8(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Off by the largest error of int8 rounding, in either direction: half a step."""
    return states + scales / 2 * _signs(states)


def _signs(states: torch.Tensor) -> torch.Tensor:
    random = np.random.default_rng(7).integers(0, 2, tuple(states.shape))
    return torch.from_numpy(2.0 * random - 1).float()
