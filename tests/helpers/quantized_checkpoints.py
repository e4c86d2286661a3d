"""Tiny checkpoints whose weights are stored in 8 bits: by compressed-tensors itself, or in the form of ModelOpt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import is_match, match_targets
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

IGNORED = ("lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$")
"""Heads and routers, which quantisers leave unchanged."""

Weights = dict[str, NDArray[np.float32]]
"""Every tensor of a checkpoint without scales, by name, as its tool dequantises it."""


Tensors = dict[str, torch.Tensor]
"""The tensors of a file: safetensors gives float8 to torch, and not to numpy."""


class Quantised(Enum):
    """Kinds of 8-bit weights: values, scales, and how their inputs are quantised."""

    FP8_CHANNEL = "fp8, a scale for each row, inputs by token"
    FP8_TENSOR = "fp8, one scale, inputs by one stored scale"
    INT8_W8A8 = "int8, a scale for each row, inputs by token"
    INT8_W8A16 = "int8, a scale for each row, inputs as they are"
    PACKED = "the same, four in a word"
    PACKED_TENSOR = "int8, one scale, four in a word, inputs as they are"
    MODELOPT = "ModelOpt's fp8: one scale, inputs by one stored scale"


def scheme_of(kind: Quantised, *targets: str) -> QuantizationScheme:
    """The scheme of compressed-tensors, which has none for ModelOpt's files."""
    assert kind is not Quantised.MODELOPT
    values = "float" if kind in (Quantised.FP8_CHANNEL, Quantised.FP8_TENSOR) else "int"
    strategy = "tensor" if kind in (Quantised.FP8_TENSOR, Quantised.PACKED_TENSOR) else "channel"
    by_token = QuantizationArgs(num_bits=8, type=values, strategy="token", dynamic=True)
    inputs = {
        Quantised.FP8_TENSOR: QuantizationArgs(num_bits=8, type=values, strategy="tensor"),
        **dict.fromkeys((Quantised.INT8_W8A16, Quantised.PACKED, Quantised.PACKED_TENSOR)),
    }.get(kind, by_token)
    weights = QuantizationArgs(num_bits=8, type=values, strategy=strategy)
    scheme = QuantizationScheme(targets=list(targets) or ["Linear"], weights=weights, input_activations=inputs)
    # By default the tool packs int8 weights whose inputs are plain.
    scheme.format = f"{values}-quantized" if inputs else "pack-quantized"
    if kind is Quantised.INT8_W8A16:
        scheme.format = "naive-quantized"
    return scheme


def make_quantised_checkpoint(
    folder: Path, architecture: str = "qwen3", kind: Quantised = Quantised.FP8_CHANNEL, **changes: Any
) -> Weights:
    """A tiny checkpoint (see `make_tiny_checkpoint`) with all linear layers quantised, except head and routers."""
    make_tiny_checkpoint(folder, architecture, **changes)
    if kind is Quantised.MODELOPT:
        return quantise_as_modelopt(folder)
    return quantise(folder, [scheme_of(kind)], IGNORED)


def quantise(folder: Path, schemes: Sequence[QuantizationScheme], ignored: Sequence[str] = ()) -> Weights:
    """Quantises the weights of a checkpoint of one file in place, as compressed-tensors does for a model whose experts
    are linear layers."""
    random = np.random.default_rng(0)
    by_target = {target: scheme for scheme in schemes for target in scheme.targets}
    written: Tensors = {}
    plain: Weights = {}
    for name, tensor in tensors_of(folder).items():
        layer = name.removesuffix(".weight")
        module = torch.nn.Embedding(1, 1) if layer.endswith("embed_tokens") else torch.nn.Linear(1, 1)
        targets = match_targets(layer, module, by_target)
        written[name] = tensor
        if name.endswith(".weight") and tensor.ndim == 2 and targets and not is_match(layer, module, ignored):
            stored, plain[name] = _compressed(tensor, by_target[targets[0]], random)
            del written[name]
            written |= {f"{layer}.{ending}": value for ending, value in stored.items()}
        else:
            plain[name] = tensor.float().numpy()
    write_tensors(folder, written)
    formats = {scheme.format for scheme in schemes}
    config = QuantizationConfig(
        config_groups={f"group_{number}": scheme for number, scheme in enumerate(schemes)},
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=list(ignored),
    )
    set_quantization(folder, config.model_dump(mode="json") | {"sparsity_config": {}, "transform_config": {}})
    return plain


def quantise_as_modelopt(folder: Path, excluded: Sequence[str] = ("lm_head", "*.mlp.gate")) -> Weights:
    """The same in the form of ModelOpt's FP8, with the config that it also writes for other readers."""
    random = np.random.default_rng(0)
    written: Tensors = {}
    plain: Weights = {}
    for name, tensor in tensors_of(folder).items():
        written[name], plain[name] = tensor, tensor.float().numpy()
        if not name.endswith("proj.weight"):
            continue
        scale = np.float32(np.abs(plain[name]).max() / 448)
        values = (plain[name] / scale).astype(ml_dtypes.float8_e4m3fn)
        plain[name] = values.astype(np.float32) * scale
        written[name] = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        written[f"{name}_scale"] = torch.tensor(scale)
        written[name.replace(".weight", ".input_scale")] = torch.tensor(np.float32(random.uniform(0.01, 1)))
    write_tensors(folder, written)
    numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
    values_of_config = {
        "config_groups": {"group_0": group},
        "ignore": list(excluded),
        "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.37.0"},
        "quant_method": "modelopt",
    }
    set_quantization(folder, values_of_config)
    return plain


def tensors_of(folder: Path) -> Tensors:
    """The tensors of a checkpoint of one file."""
    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: Tensors) -> None:
    """Replaces the tensors of a checkpoint of one file."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def write_plain_twin(quantised: Path, weights: Weights, folder: Path) -> Path:
    """Writes a checkpoint with plain weights that is otherwise the same; returns its folder."""
    shutil.copytree(quantised, folder)
    set_quantization(folder, None)
    write_tensors(folder, {name: torch.from_numpy(value) for name, value in weights.items()})
    return folder


def set_quantization(folder: Path, values: dict[str, Any] | None) -> None:
    """Puts a `quantization_config` into a folder's config.json, or removes it."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields.pop("quantization_config", None)
    if values is not None:
        fields["quantization_config"] = values
    file.write_text(json.dumps(fields))


def _compressed(
    weight: torch.Tensor, scheme: QuantizationScheme, random: np.random.Generator
) -> tuple[Tensors, NDArray[np.float32]]:
    """The tensors in the file, by the end of their names, and the numbers to which compressed-tensors
    dequantises them."""
    assert scheme.weights is not None
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    per_row = scheme.weights.strategy == "channel"
    least, most = (
        (weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)) if per_row else (weight.min(), weight.max())
    )
    scale, _ = calculate_qparams(least, most, scheme.weights)
    stored = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    plain = compressor.decompress(stored, scheme)["weight"].float().numpy()
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        stored["input_scale"] = torch.tensor([random.uniform(0.01, 1)], dtype=torch.float32)
    return stored, plain
