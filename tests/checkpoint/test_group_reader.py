"""Folders with weights in groups: read as their tools dequantise them, whole, as shards, and as blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.grouped_checkpoints import SIZE, Grouped, config_of, make_grouped_checkpoint
from helpers.quantized_checkpoints import Tensors, set_quantization, tensors_of, write_plain_twin, write_tensors
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint import ParameterReader, open_checkpoint
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.quantization import INT4_GROUPS, Quantization
from sglang_jax.checkpoint.reader import Index
from sglang_jax.errors import CheckpointError

DOWN = "model.layers.1.mlp.experts.down_proj"
LAYER = "model.layers.1.mlp.up_proj"
HEADS = {Part.QUERY, Part.KEY, Part.VALUE}


def parameters(folder: Path) -> ParameterReader:
    opened = open_checkpoint(str(folder))
    assert opened.reader is not None
    return ParameterReader(opened.reader, opened.config)


def some_part(part: Part, shape: tuple[int, ...], random: np.random.Generator) -> Index:
    """Some rows, all where they make up heads, and some whole groups of columns."""
    first, last = np.sort(random.choice(shape[-2] + 1, 2, replace=False))
    groups = np.sort(random.choice(shape[-1] // SIZE + 1, 2, replace=False)) * SIZE
    rows = slice(None) if part in HEADS else slice(int(first), int(last))
    return (*[slice(None)] * (len(shape) - 2), rows, slice(int(groups[0]), int(groups[1])))


def expected_kind(kind: Grouped) -> GroupType | None:
    if kind in (Grouped.INT4_ORDER, Grouped.GPTQ_ORDER):
        return None
    if kind in (Grouped.CT_NVFP4, Grouped.MODELOPT):
        return GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32)
    if kind in (Grouped.MXFP4, Grouped.CT_MXFP4):
        return GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)
    levels = Levels.FLOAT8_E4M3 if "FP8" in kind.name else {4: Levels.INT4, 8: Levels.INT8}[kind.bits]
    half = kind.name.startswith(("GPTQ", "AWQ"))
    size = 128 if kind is Grouped.INT4_ROWS else SIZE
    return GroupType(levels, size, Scales.FLOAT16 if half else Scales.FLOAT32, kind.zeros)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [(each, kind) for each in ("qwen3", "qwen3_moe") for kind in Grouped if kind is not Grouped.MXFP4]
    + [("gpt_oss", Grouped.MXFP4)],
)
def test_every_layout_is_read(architecture: str, kind: Grouped, tmp_path: Path) -> None:
    """All parameters equal those of the unquantised twin: whole, as shards at any rows and groups, as blocks, and as
    parts that cut through groups."""
    widths = {"intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32}
    weights = make_grouped_checkpoint(tmp_path / "a", architecture, kind, **widths)
    quantised, plain = parameters(tmp_path / "a"), parameters(write_plain_twin(tmp_path / "a", weights, tmp_path / "b"))
    random, in_blocks = np.random.default_rng(0), 0
    for name, spec in manifest_of(plain.config).specs.items():
        parts = [None]
        if len(spec.shape) > 1:
            cut = (*[slice(None)] * (len(spec.shape) - 1), slice(8, spec.shape[-1] - 8))  # through groups
            parts += [some_part(name.part, spec.shape, random), cut]
        for index in parts:
            expected = plain.read(name, index)
            np.testing.assert_allclose(quantised.read(name, index), expected, rtol=2e-6, atol=1e-9, err_msg=str(name))
            encoding = quantised.encoding(name, index)
            if encoding is None:
                continue
            in_blocks += 1
            stored = quantised.read_stored(name, index)
            assert stored.shape == expected.shape
            np.testing.assert_allclose(stored.widened(), expected, rtol=2e-6, atol=2e-6, err_msg=str(name))
            wanted = expected_kind(kind)
            if wanted is not None and spec.shape[-1] % wanted.weights == 0:
                assert encoding == Encoding(wanted)
    assert bool(in_blocks) == (expected_kind(kind) is not None)


@pytest.mark.parametrize("kind", [Grouped.GPTQ_ZEROS, Grouped.INT8, Grouped.FP8, None])
def test_parts_that_cut_groups_are_read_in_smaller_ones(
    kind: Grouped | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which repeat scales and zeros. Without a kind, groups are made while the matrix is read."""
    monkeypatch.setattr("helpers.grouped_checkpoints.SIZE", 128)
    widths = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 384, "num_hidden_layers": 2}
    if kind is None:
        config = parameters(make_tiny_checkpoint(tmp_path / "a", "qwen3", **widths)).config
        reader = ParameterReader(DummyReader(config, seed=0), config, Quantization(INT4_GROUPS))
    else:
        make_grouped_checkpoint(tmp_path / "a", "qwen3", kind, **widths)
        reader = parameters(tmp_path / "a")
    name = ParameterName(Part.DOWN, layer=1)
    whole, encoding = reader.read(name), reader.encoding(name)
    assert encoding is not None
    assert encoding.block == 128
    for size, first, last in ((64, 64, 192), (32, 96, 128), (32, 160, 384), (128, 128, 256), (64, 0, 384)):
        smaller = encoding.for_inputs(size)
        index = (slice(8, 40), slice(first, last))
        found = Stored(smaller, reader.read_arrays(name, smaller.roles, index, group=size))
        assert smaller.block == size
        np.testing.assert_allclose(found.widened(), whole[index], rtol=2e-6, atol=2e-6)


def _biases(tensors: Tensors, number: float) -> None:
    for name in [name for name in tensors if name.endswith(".qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
    tensors[f"{LAYER}.bias"][3] = number


def test_biases_of_zeros_that_a_tool_writes_for_every_layer_are_not_read(tmp_path: Path) -> None:
    """AutoGPTQ wrote them until 2024. Biases that the model has are read."""
    for architecture in ("qwen3", "qwen2"):
        folder = tmp_path / architecture
        make_grouped_checkpoint(folder, architecture, Grouped.GPTQ)
        tensors = tensors_of(folder)
        biases = {name: torch.ones_like(each) for name, each in tensors.items() if name.endswith(".bias")}
        _biases(tensors, 0)
        write_tensors(folder, tensors | biases)
        reader = parameters(folder)
        for name in manifest_of(reader.config).specs:
            found = reader.read(name)
            assert name.kind is not ParameterKind.BIAS or (found == 1).all()


def read_all(folder: Path) -> None:
    reader = parameters(folder)
    for name in manifest_of(reader.config).specs:
        reader.read(name)


Change = Callable[[Tensors], object]


def _zero(tensors: Tensors) -> None:
    tensors[f"{LAYER}.qzeros"][0, 0] ^= 1


def _order(tensors: Tensors) -> None:
    tensors[f"{LAYER}.g_idx"][[0, 40]] = tensors[f"{LAYER}.g_idx"][[40, 0]]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Grouped.GPTQ, lambda t: t.pop(f"{LAYER}.scales"), f"missing: {LAYER}.scales"),
        (Grouped.GPTQ, _zero, "its quantization_config says that groups are symmetric, with the zero 8"),
        (Grouped.GPTQ, _order, "set it to true"),
        (Grouped.GPTQ, lambda t: _biases(t, 0.5), f"{LAYER}.bias has the number 0.5, and the model has no bias there"),
        (Grouped.GPTQ, lambda t: t.update({f"{LAYER}.weight": torch.ones(96, 64)}), f"extra: {LAYER}.weight of"),
        (Grouped.AWQ, lambda t: t.update({f"{LAYER}.weight": torch.ones(96, 64)}), f"extra: {LAYER}.weight of"),
        (Grouped.INT4, lambda t: t.update({f"{LAYER}.weight": torch.ones(96, 64)}), f"extra: {LAYER}.weight of"),
        (
            Grouped.INT4,
            lambda t: t.update({f"{LAYER}.weight_zero_point": torch.ones(12, 2, dtype=torch.int32)}),
            f"extra: {LAYER}.weight_zero_point of",
        ),
        (
            Grouped.INT4,
            lambda t: t.update({f"{LAYER}.weight_g_idx": torch.arange(64, dtype=torch.int32) // 32}),
            f"extra: {LAYER}.weight_g_idx of",
        ),
        (Grouped.GPTQ_ORDER, lambda t: t[f"{LAYER}.g_idx"].fill_(2), "has groups from 2 to 2, the matrix has 2"),
        (Grouped.AWQ, lambda t: t[f"{LAYER}.scales"].fill_(torch.inf), "has the scale inf: the checkpoint is damaged"),
        (Grouped.AWQ, lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"][:1]}), r"misshapen: .*qzeros"),
        (Grouped.INT4, lambda t: t[f"{LAYER}.weight_shape"].fill_(64), r"weight_shape is \[64, 64\], the config"),
        (Grouped.INT4, lambda t: t.pop(f"{LAYER}.weight_scale"), f"missing: {LAYER}.weight_scale"),
        (
            Grouped.FP8,
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].float()}),
            "mistyped: .*up_proj.weight",
        ),
        (Grouped.CT_MXFP4, lambda t: t.pop(f"{LAYER}.weight_scale"), f"missing: {LAYER}.weight_scale"),
        (Grouped.CT_MXFP4, lambda t: t[f"{LAYER}.weight_scale"].fill_(255), "has the scale nan"),
        (Grouped.CT_NVFP4, lambda t: t.pop(f"{LAYER}.weight_global_scale"), f"missing: {LAYER}.weight_global_scale"),
        (Grouped.CT_NVFP4, lambda t: t[f"{LAYER}.weight_global_scale"].fill_(0), "is 0, it must be positive and fin"),
        (
            Grouped.MODELOPT,
            lambda t: t.update({f"{LAYER}.weight_scale": t[f"{LAYER}.weight_scale"].float()}),
            f"mistyped: {LAYER}.weight_scale is stored as float32, it must be float8_e4m3fn",
        ),
        (Grouped.MXFP4, lambda t: t.pop(f"{DOWN}_scales"), f"missing: {DOWN}_scales"),
        (Grouped.MXFP4, lambda t: t[f"{DOWN}_scales"].fill_(255), f"{DOWN}_scales has a scale that is not a number"),
        (
            Grouped.MXFP4,
            lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].flatten(2)}),
            rf"{DOWN}_blocks is \(.*\), it must have four axes, the last of 16",
        ),
        (
            Grouped.MXFP4,
            lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"].char()}),
            f"mistyped: {DOWN}_blocks is stored as int8, it must be uint8",
        ),
        (Grouped.MXFP4, lambda t: t.update({DOWN: torch.ones(4, 96, 64)}), f"extra: {DOWN}_blocks"),
    ],
)
def test_tensors_that_are_not_as_the_config_says_are_named(
    kind: Grouped, change: Change, message: str, tmp_path: Path
) -> None:
    make_grouped_checkpoint(tmp_path, "gpt_oss" if kind is Grouped.MXFP4 else "qwen3", kind, intermediate_size=96)
    tensors = tensors_of(tmp_path)
    change(tensors)
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Grouped.GPTQ, {"bits": 3}, "bits 3 of quantised weights is not supported; supported: 4, 8"),
        (Grouped.GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (Grouped.GPTQ, {"group_size": 0}, "group_size 0"),
        (Grouped.GPTQ, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (Grouped.AWQ, {"version": "gemv"}, "version 'gemv'"),
        (Grouped.AWQ, {"zero_point": False}, "zero_point False"),
        (Grouped.FP8, {"weight_block_size": [128, 64]}, r"weight_block_size \[128, 64\]"),
        (Grouped.FP8, {"weight_block_size": None, "activation_scheme": None}, "activation_scheme None"),
        (Grouped.GPTQ, {"quant_method": "bitsandbytes"}, "weights quantised by 'bitsandbytes' are not supported"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    kind: Grouped, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_grouped_checkpoint(tmp_path, "qwen3", kind)
    set_quantization(tmp_path, config_of(kind) | fields)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))
