"""Tiny checkpoints whose weights are quantised in groups: by compressed-tensors itself, or in the layouts of GPTQ, AWQ,
FP8 in blocks and MXFP4, written number by number."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from helpers.quantized_checkpoints import (
    IGNORED,
    Tensors,
    Weights,
    set_quantization,
    tensors_of,
    write_tensors,
)
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SIZE = 32


class Grouped(Enum):
    INT4 = "compressed-tensors, 4 bits"
    INT4_ZEROS = "compressed-tensors, 4 bits, zeros"
    INT4_ROWS = "compressed-tensors, 4 bits, a scale for each row"
    INT4_ORDER = "compressed-tensors, 4 bits, inputs in another order"
    INT8 = "compressed-tensors, 8 bits"
    INT8_ZEROS = "compressed-tensors, 8 bits, zeros"
    FP8_BLOCKS = "compressed-tensors, float8 in squares"
    GPTQ = "gptq, 4 bits"
    GPTQ_ZEROS = "gptq, 4 bits, zeros"
    GPTQ_ORDER = "gptq, 4 bits, zeros, inputs in another order"
    GPTQ_8 = "gptq, 8 bits, zeros"
    GPTQ_V2 = "gptq of the second version, 4 bits, zeros"
    AWQ = "awq"
    FP8 = "fp8 in squares"
    CT_MXFP4 = "compressed-tensors, floats of 4 bits"
    CT_NVFP4 = "compressed-tensors, floats of 4 bits with two scales"
    MODELOPT = "modelopt, floats of 4 bits with two scales"
    MXFP4 = "mxfp4"
    """Of the experts of gpt-oss."""

    @property
    def bits(self) -> int:
        return 8 if "8" in self.name else 4

    @property
    def zeros(self) -> bool:
        return self.name.endswith(("ZEROS", "ORDER", "GPTQ_8", "V2", "AWQ")) and self is not Grouped.INT4_ORDER


def make_grouped_checkpoint(folder: Path, architecture: str, kind: Grouped, **changes: Any) -> Weights:
    """A tiny checkpoint (see `make_tiny_checkpoint`) with all linear layers quantised in groups of 32 (squares of 32 by
    32), except head and routers; with MXFP4, only the experts of gpt-oss. Returns every tensor as its tool dequantises
    it."""
    make_tiny_checkpoint(folder, architecture, **changes)
    random = np.random.default_rng(0)
    written: Tensors = {}
    plain: Weights = {}
    for name, tensor in tensors_of(folder).items():
        layer = name.removesuffix(".weight")
        if kind is Grouped.MXFP4 and name.endswith(("gate_up_proj", "down_proj")):
            stored, plain[name] = _mxfp4(tensor)
            written |= {f"{name}_{ending}": value for ending, value in stored.items()}
            continue
        linear = tensor.ndim == 2 and layer.endswith("proj") and kind is not Grouped.MXFP4
        if not linear:
            written[name], plain[name] = tensor, tensor.float().numpy()
            continue
        write = _float4 if "floats" in kind.value else _WRITERS[kind.value.split(",")[0].split()[0]]
        stored, plain[name] = write(tensor, kind, random)
        written |= {f"{layer}.{ending}": value for ending, value in stored.items()}
    write_tensors(folder, written)
    set_quantization(folder, config_of(kind))
    return plain


def config_of(kind: Grouped) -> dict[str, Any]:
    """The `quantization_config` of its tool."""
    if kind.name.startswith("GPTQ"):
        fields = {"bits": kind.bits, "group_size": SIZE, "sym": not kind.zeros, "desc_act": kind is Grouped.GPTQ_ORDER}
        version = {"checkpoint_format": "gptq_v2"} if kind is Grouped.GPTQ_V2 else {}
        return {"quant_method": "gptq", "damp_percent": 0.01, **fields, **version}
    if kind is Grouped.AWQ:
        return {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"}
    if kind is Grouped.FP8:
        block = {"weight_block_size": [SIZE, SIZE], "activation_scheme": "dynamic"}
        return {"quant_method": "fp8", "fmt": "e4m3", **block}
    if kind is Grouped.MODELOPT:
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    if kind is Grouped.MXFP4:
        return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    scheme = _scheme(kind)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format,
        quantization_status="compressed",
        ignore=[*IGNORED, "re:.*embed_tokens"],
    )
    fields = config.model_dump(mode="json")
    if kind is Grouped.INT4_ORDER:  # written by earlier versions
        fields["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return fields


def _scheme(kind: Grouped) -> QuantizationScheme:
    if kind in (Grouped.CT_MXFP4, Grouped.CT_NVFP4):
        name, strategy, size = ("mxfp4", "group", 32) if kind is Grouped.CT_MXFP4 else ("nvfp4", "tensor_group", 16)
        weights = QuantizationArgs(num_bits=4, type="float", strategy=strategy, group_size=size, symmetric=True)
        return QuantizationScheme(targets=["Linear"], weights=weights, format=f"{name}-pack-quantized")
    if kind is Grouped.FP8_BLOCKS:
        weights = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[SIZE, SIZE])
        return QuantizationScheme(targets=["Linear"], weights=weights, format="naive-quantized")
    strategy: dict[str, Any] = {"strategy": "group", "group_size": SIZE}
    if kind is Grouped.INT4_ROWS:
        strategy = {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=kind.bits, type="int", symmetric=not kind.zeros, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=weights, format="pack-quantized")


def _compressed(
    weight: torch.Tensor, kind: Grouped, random: np.random.Generator
) -> tuple[Tensors, NDArray[np.float32]]:
    scheme = _scheme(kind)
    assert scheme.weights is not None
    assert scheme.format is not None
    rows, columns = weight.shape
    if kind is Grouped.FP8_BLOCKS:
        squares = weight.reshape(rows // SIZE, SIZE, columns // SIZE, SIZE)
        least, most = squares.amin((1, 3)), squares.amax((1, 3))
    else:
        of_groups = weight.reshape(rows, 1 if kind is Grouped.INT4_ROWS else columns // SIZE, -1)
        least, most = of_groups.amin(2), of_groups.amax(2)
    state: Tensors = {"weight": weight}
    state["weight_scale"], zeros = calculate_qparams(least, most, scheme.weights)
    if kind.zeros:
        state["weight_zero_point"] = zeros.to(torch.int8)
    order = torch.from_numpy(random.permutation(columns) // SIZE).to(torch.int32)
    if kind is Grouped.INT4_ORDER:
        state["weight_g_idx"] = order
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(dict(state), scheme)
    plain = compressor.decompress(dict(stored), scheme)["weight"].float().numpy()
    if kind is Grouped.INT4_ORDER:
        scales = state["weight_scale"].numpy()[:, order]
        levels = np.clip(np.rint(weight.numpy() / scales), -8, 7)
        words = _words((levels + 8).astype(np.uint32), 4)
        stored |= {"weight_packed": torch.from_numpy(words), "weight_g_idx": order}
        plain = (levels * scales).astype(np.float32)
    return stored, plain


def _float4(weight: torch.Tensor, kind: Grouped, random: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
    """By compressed-tensors; ModelOpt's folders have the inverse of its scale of the matrix, and other names."""
    scheme = _scheme(Grouped.CT_NVFP4 if kind is Grouped.MODELOPT else kind)
    assert scheme.weights is not None
    assert scheme.weights.group_size is not None
    assert scheme.format is not None
    groups = weight.float().reshape(len(weight), -1, scheme.weights.group_size)
    state: Tensors = {"weight": weight.float()}
    if kind is not Grouped.CT_MXFP4:
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    state["weight_scale"], _ = calculate_qparams(
        groups.amin(2), groups.amax(2), scheme.weights, global_scale=state.get("weight_global_scale")
    )
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    stored = compressor.compress(dict(state), scheme)
    plain = compressor.decompress(dict(stored), scheme)["weight"].float().numpy()
    if kind is not Grouped.CT_MXFP4:  # exactly, since the tool rounds to bfloat16
        halves = stored["weight_packed"].numpy()
        codes = np.stack((halves & 15, halves >> 4), axis=-1).reshape(weight.shape)
        scales = (stored["weight_scale"].float() / stored["weight_global_scale"]).numpy().repeat(16, 1)
        exact = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scales
        np.testing.assert_allclose(plain, exact, rtol=2**-7)
        plain = exact
    if kind is Grouped.MODELOPT:
        renamed = {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}
        stored = renamed | {"weight_scale_2": 1 / stored["weight_global_scale"].reshape(())}
        stored["input_scale"] = torch.tensor(0.5)
    return stored, plain


def _words(levels: NDArray[np.uint32], bits: int) -> NDArray[np.int32]:
    """Packs the last axis, the first of each 32 bits in the lowest ones."""
    parts = levels.reshape(*levels.shape[:-1], -1, 32 // bits)
    found = np.zeros(parts.shape[:-1], np.uint32)
    for place in range(32 // bits):
        found |= parts[..., place] << np.uint32(bits * place)
    return found.view(np.int32)


def _rounded(
    weight: torch.Tensor, kind: Grouped, groups: NDArray[np.intp]
) -> tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.int64], NDArray[np.float32]]:
    """Levels `[out, in]`, scales and zeros `[out, groups]`, and dequantised weights, where `groups` has the group of
    each input."""
    numbers, count, most = weight.numpy(), int(groups.max()) + 1, 2**kind.bits - 1
    of_groups = [numbers[:, groups == number] for number in range(count)]
    low, high = (np.stack([side(each, 1) for each in of_groups], 1) for side in (np.min, np.max))
    if kind.zeros:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = ((high - low) / most).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most).astype(np.int64)
    else:
        scales = (np.maximum(np.abs(low), np.abs(high)) * 2 / most).astype(np.float16)
        zeros = np.full(scales.shape, (most + 1) // 2, np.int64)
    wide = scales.astype(np.float32)[:, groups]
    levels = np.clip(np.rint(numbers / wide) + zeros[:, groups], 0, most)
    return levels.astype(np.uint32), scales, zeros, ((levels - zeros[:, groups]) * wide).astype(np.float32)


def _gptq(weight: torch.Tensor, kind: Grouped, random: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
    columns = weight.shape[1]
    groups = np.arange(columns) // SIZE
    if kind is Grouped.GPTQ_ORDER:
        random.shuffle(groups)
    levels, scales, zeros, plain = _rounded(weight, kind, groups)
    less = 0 if kind is Grouped.GPTQ_V2 else 1
    of_outputs = ((zeros.T - less) % 2**kind.bits).astype(np.uint32)
    arrays = {
        "qweight": _words(levels, kind.bits).T,
        "qzeros": _words(of_outputs, kind.bits),
        "scales": scales.T,
        "g_idx": groups.astype(np.int32),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, plain


def _awq(weight: torch.Tensor, kind: Grouped, random: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
    levels, scales, zeros, plain = _rounded(weight, kind, np.arange(weight.shape[1]) // SIZE)

    def words(numbers: NDArray[Any]) -> NDArray[np.int32]:
        parts = numbers.T.astype(np.uint32).reshape(numbers.shape[1], -1, 8)
        return _words(parts[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape[1], -1), 4)

    arrays = {"qweight": words(levels), "qzeros": words(zeros), "scales": scales.T}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, plain


def _float8(weight: torch.Tensor, kind: Grouped, random: np.random.Generator) -> tuple[Tensors, NDArray[np.float32]]:
    rows, columns = weight.shape
    padded = np.zeros((-(-rows // SIZE) * SIZE, -(-columns // SIZE) * SIZE), np.float32)
    padded[:rows, :columns] = weight.numpy()
    squares = padded.reshape(len(padded) // SIZE, SIZE, -1, SIZE)
    scales = (np.abs(squares).max((1, 3)) / 448).astype(np.float32)
    values = (squares / scales[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    plain = (values.astype(np.float32) * scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    own = np.ascontiguousarray(values.reshape(padded.shape)[:rows, :columns])
    stored = torch.from_numpy(own.view(np.uint8)).view(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": torch.from_numpy(scales)}, plain


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, NDArray[np.float32]]:
    """Of matrices `[experts, in, out]`. They are dequantised by transformers."""
    groups = np.ascontiguousarray(weight.float().numpy().swapaxes(1, 2)).reshape(len(weight), weight.shape[2], -1, SIZE)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    codes = (groups / np.exp2(exponents)[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    blocks = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
    scales = torch.from_numpy((exponents + 127).astype(np.uint8))
    plain: NDArray[np.float32] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy()
    return {"blocks": blocks, "scales": scales}, plain


_WRITERS = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _float8}
