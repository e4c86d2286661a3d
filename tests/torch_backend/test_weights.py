"""Checkpoints into models: values, types, errors, and matrices packed for the CPU."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cpu_kernels import bfloat16_products
from helpers.parity_cases import STEPS, prompts
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from helpers.torch_paged_model import TorchPagedModel
from torch.nn import functional

from sglang_jax.checkpoint import ModelConfig, open_checkpoint
from sglang_jax.checkpoint.quantization import INT8_ROWS, Quantization
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.errors import CheckpointError
from torch_backend.attention.native import NativeAttention
from torch_backend.layers import packed
from torch_backend.layers.matrix import PlainMatrix
from torch_backend.layers.packed import PackedMatrix, packing_works
from torch_backend.models import Transformer, build_model
from torch_backend.native_operations import NativeOperations
from torch_backend.weights import load_weights, weight_bytes


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    return build_model(
        config,
        dtype=dtype,
        device=torch.device("cpu"),
        operations=NativeOperations(),
        attention=NativeAttention(),
    )


def opened(folder: Path) -> tuple[TensorReader, ModelConfig]:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.reader is not None
    return checkpoint.reader, checkpoint.config


@pytest.fixture
def fresh_check() -> None:
    """Clears the cached result of `packing_works`."""
    packing_works.cache_clear()
    yield
    packing_works.cache_clear()


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_rounded_to_the_models_dtype(stored: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reader, config = opened(make_tiny_checkpoint(tmp_path, "qwen2", dtype=stored))
    model = build(config, dtype)
    load_weights(model, reader, config, pack=False)
    state = make_tiny_model("qwen2").to(getattr(torch, stored)).state_dict()
    layer, prefix = model.decoder_layers[1], "model.layers.1"
    fused = [state[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    biases = [state[f"{prefix}.self_attn.{name}_proj.bias"] for name in "qkv"]
    gate_up = [state[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    for found, expected in (
        (model.embeddings[0].matrix.weight, state["model.embed_tokens.weight"]),
        (model.head.linears[0].matrix.weight, state["lm_head.weight"]),
        (model.final_norm.weight, state["model.norm.weight"]),
        (layer.attention_norm.weight, state[f"{prefix}.input_layernorm.weight"]),
        (layer.attention.qkv.matrix.weight, torch.cat(fused)),
        (layer.attention.qkv.matrix.bias, torch.cat(biases)),
        (layer.attention.output.matrix.weight, state[f"{prefix}.self_attn.o_proj.weight"]),
        (layer.feed_forward_norm.weight, state[f"{prefix}.post_attention_layernorm.weight"]),
        (layer.feed_forward.gate_up.matrix.weight, torch.cat(gate_up)),
        (layer.feed_forward.down.matrix.weight, state[f"{prefix}.mlp.down_proj.weight"]),
    ):
        assert found is not None
        assert torch.equal(found, expected.to(dtype))
        assert not found.requires_grad


def test_every_parameter_gets_a_value(tmp_path: Path) -> None:
    reader, config = opened(make_tiny_checkpoint(tmp_path, "qwen3", attention_bias=True))
    model = build(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_weights(model, reader, config, pack=False)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_faults_are_named_before_tensors_are_read(tmp_path: Path) -> None:
    reader, config = opened(make_tiny_checkpoint(tmp_path, "llama"))
    config = config.with_layers(
        lambda layer: replace(
            layer,
            mixer=replace(layer.mixer, bias=True),
            feed_forward=replace(layer.feed_forward, size=96),
        )
    )
    model = build(config)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, reader, config)
    assert "missing: model.layers.1.self_attn.q_proj.bias (64,)" in str(caught.value)
    assert "misshapen: model.layers.0.mlp.up_proj.weight is (128, 64)" in str(caught.value)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"quantization": Quantization(INT8_ROWS)}),
        ("llama", {"bfloat16": bfloat16_products()}),
        ("qwen2_moe", {"fixed": True}),
        ("qwen3_next", {}),
        ("deepseek_v2", {}),
    ],
    ids=["int8", "bfloat16", "experts", "recurrent", "latent"],
)
def test_a_model_is_freed_without_the_garbage_collector(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """A running engine's model is kept from the garbage collector, so replaced weights would stay in memory."""
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype="bfloat16")
    model = TorchPagedModel(folder, **options)
    model.run(prompts(), STEPS)
    modules = [weakref.ref(each) for each in model.model.modules()]
    gc.disable()
    try:
        del model
        assert not [each() for each in modules if each() is not None]
    finally:
        gc.enable()


class TestPacking:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("rows", [1, 3, 64])
    @pytest.mark.parametrize("bias", [False, True])
    def test_products_equal_plain_ones(self, dtype: torch.dtype, rows: int, bias: bool) -> None:
        if not packing_works(dtype):  # only on a processor without bfloat16
            assert dtype == torch.bfloat16
            assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
            return
        generator = torch.Generator().manual_seed(1)
        weight, x, factors = (
            torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 96), (rows, 96), (rows, 40))
        )
        offset = torch.randn(40, generator=generator).to(dtype) if bias else None
        matrix = PackedMatrix(weight, offset)
        exact = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        silu = matrix.multiply_then_silu(x)
        for found, expected in (
            (matrix.multiply(x), exact),
            (silu, functional.silu(exact)),
            (matrix.multiply_then_scale(x, factors), exact * factors.double()),
        ):
            assert found.dtype == dtype
            assert found.shape == (rows, 40)
            allowed = 0.51 * torch.finfo(dtype).eps * expected.abs() + 1e-4
            assert bool(((found.double() - expected).abs() <= allowed).all())

    @pytest.mark.parametrize("tied", [False, True])
    def test_matrices_are_held_once_except_tied_embeddings(self, tied: bool, tmp_path: Path) -> None:
        reader, config = opened(make_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=tied))
        model = build(config)
        load_weights(model, reader, config)
        held = {name for name, parameter in model.named_parameters() if parameter.ndim > 1 and not parameter.is_meta}
        assert held == {"embeddings_of_shards.0.matrix.weight"}
        of_matrices = [each.weight.is_meta for each in model.modules() if isinstance(each, PlainMatrix)]
        assert of_matrices.count(False) == 1 + tied  # the table, and a head that shares it
        both_layers = 2 * 4 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64)
        assert weight_bytes(model) == weight_bytes(build(config)) == both_layers + 4 * (2 * 384 * 64 + 64)

    @pytest.mark.parametrize("architecture", ["llama", "qwen2"])
    def test_logits_are_those_of_plain_matrices(
        self, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = make_tiny_checkpoint(tmp_path, architecture, mlp_bias=True)
        packed_logits = TorchPagedModel(folder).run(prompts(), STEPS)
        monkeypatch.setattr("torch_backend.weights.packing_works", lambda dtype: False)
        model = TorchPagedModel(folder)
        assert not model.model.decoder_layers[0].feed_forward.gate_up.matrix.weight.is_meta
        for found, expected in zip(packed_logits, model.run(prompts(), STEPS), strict=True):
            assert np.abs(found - expected).max() < 2e-5

    @pytest.mark.usefixtures("fresh_check")
    def test_a_torch_that_cannot_pack_is_logged_once(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def missing(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedMatrix:
            raise AttributeError("no such operator")

        monkeypatch.setattr(packed, "PackedMatrix", missing)
        with caplog.at_level(logging.INFO, logger="torch_backend"):
            assert not packing_works(torch.bfloat16)
            assert not packing_works(torch.bfloat16)
        (record,) = caplog.records
        assert "cannot pack" in record.getMessage()

    @pytest.mark.usefixtures("fresh_check")
    def test_a_torch_that_multiplies_wrongly_does_not_pack(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = PackedMatrix.multiply_then_silu
        monkeypatch.setattr(PackedMatrix, "multiply_then_silu", lambda matrix, x: right(matrix, x) * 1.2)
        with caplog.at_level(logging.WARNING, logger="torch_backend"):
            assert not packing_works(torch.float32)
        assert "computes wrong products" in caplog.text
