"""Matrices that stay in bfloat16 on a CPU that does not multiply bfloat16."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.cpu_kernels import bfloat16_products
from helpers.fixed_rows import differences
from helpers.gguf_files import make_tiny_gguf
from helpers.parity_cases import STEPS, prompts
from helpers.plan_driver import PlanDriver
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from helpers.torch_paged_model import TorchPagedModel
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.quantization import INT8_ROWS, Quantization
from sglang_jax.config import Device, Dtype, EngineConfig
from sglang_jax.cpu_kernels.bfloat16_tiles import EIGHTS, FOURS, SIXTEENS, FloatVectors
from sglang_jax.cpu_kernels.vectors import supported
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.quantization import matrices_in_bfloat16
from torch_backend import create_runner, devices
from torch_backend.cpu_kernels import bfloat16_matrix
from torch_backend.cpu_kernels.bfloat16_matrix import CpuBfloat16Products
from torch_backend.layers.bfloat16 import Bfloat16Matrix
from torch_backend.layers.matrix import PlainMatrix
from torch_backend.weights import weight_bytes

HERE = [
    vectors for vectors, needed in ((SIXTEENS, ("avx512bw",)), (EIGHTS, ("avx2",)), (FOURS, ())) if supported(needed)
]
ROWS = (1, 2, 3, 4, 5, 8, 9, 13, 64, 65, 130)


@pytest.mark.parametrize("vectors", HERE, ids=lambda vectors: f"{vectors.lanes}")
@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"),
    # fewer inputs than a vector has; no whole tile; more than one chunk is widened for; whole tiles and blocks
    [(8, 3, True), (154, 1000, True), (70, 1033, False), (16, 1088, False)],
)
def test_products_are_those_of_the_widened_matrix(vectors: FloatVectors, outputs: int, inputs: int, bias: bool) -> None:
    """Against float64, up to float32 sums; each row has the same bits in any batch."""
    products, generator = bfloat16_products(vectors), torch.Generator().manual_seed(inputs)
    weight = torch.randn((outputs, inputs), generator=generator).bfloat16()
    offset = torch.randn(outputs, generator=generator) if bias else None
    x = torch.randn((max(ROWS), inputs), generator=generator)
    exact = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    gate, up = exact.chunk(2, dim=-1)
    terms = functional.linear(x.abs(), weight.float().abs()).max()
    for activation, expected in (
        (None, exact),
        (Activation.SILU, functional.silu(gate) * up),
        (Activation.GELU_TANH, functional.gelu(gate, approximate="tanh") * up),
    ):

        def multiply(x: torch.Tensor, activation: Activation | None = activation) -> torch.Tensor:
            if activation is None:
                return products.multiply(x, weight, offset)
            return products.multiply_gated(x, weight, offset, activation)

        together = multiply(x)
        allowed = 2e-7 * terms * (1 if activation is None else 1 + exact.abs().max())
        assert bool((together.double() - expected).abs().max() < allowed)
        for count in ROWS:
            first = 130 - count if count % 2 else 0
            assert torch.equal(multiply(x[first : first + count]), together[first : first + count]), count


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = torch.ones((70, 77)), torch.ones((12, 77)).bfloat16()
    x[1, 76], x[69, 3] = torch.nan, torch.inf
    found = bfloat16_products().multiply(x, weight, None)
    assert bool(found[1].isnan().all())
    assert bool(found[69].isinf().all())
    assert bool((found[2:69] == 77).all())


def test_kernels_that_multiply_wrongly_are_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bfloat16_matrix, "CpuBfloat16Products", lambda *_, **__: bfloat16_products())
    assert bfloat16_matrix.bfloat16_products(None, None) is bfloat16_products()
    right = CpuBfloat16Products.multiply_gated
    monkeypatch.setattr(CpuBfloat16Products, "multiply_gated", lambda *inputs: right(*inputs) * 1.001)
    with caplog.at_level(logging.WARNING, logger="torch_backend"):
        assert bfloat16_matrix.bfloat16_products(None, None) is None
    (message,) = caplog.messages
    assert message.endswith("computes wrong results on this machine")


def test_matrices_that_can_stay(tmp_path: Path) -> None:
    """As the file stores each; not if it is quantised while it is read, multiplied by factors, or of an expert."""

    def parts(source: Path, quantization: Quantization | None = None) -> set[Part]:
        return {name.part for name in matrices_in_bfloat16(open_checkpoint(str(source)), quantization)}

    every = {Part.EMBEDDING, Part.HEAD, Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN}
    folder = make_tiny_checkpoint(tmp_path / "bfloat16", dtype="bfloat16", tie_word_embeddings=True)
    assert parts(folder) == every
    assert parts(folder, Quantization(INT8_ROWS)) == {Part.EMBEDDING, Part.HEAD}
    assert parts(make_tiny_checkpoint(tmp_path / "float32")) == set()
    assert parts(make_tiny_checkpoint(tmp_path / "float16", dtype="float16")) == set()
    experts = parts(make_tiny_checkpoint(tmp_path / "experts", "qwen3_moe", dtype="bfloat16"))
    assert experts == (every - {Part.GATE, Part.UP, Part.DOWN}) | {Part.ROUTER}
    tokenizer = make_tiny_tokenizer(tmp_path)
    for kind, expected in ((GGMLQuantizationType.BF16, every), (GGMLQuantizationType.Q8_0, set())):
        file = make_tiny_gguf(tmp_path / f"{kind.name}.gguf", make_tiny_model("llama"), tokenizer, kind=kind)
        assert parts(file) == expected, kind


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "vocab_size": 385, "mlp_bias": True}),
        ("qwen2_moe", {}),
        ("qwen3_next", {}),
        ("gemma2", {}),
    ],
)
def test_logits_are_those_of_widened_weights(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype="bfloat16", **changes)
    widened, model = TorchPagedModel(folder), TorchPagedModel(folder, bfloat16=bfloat16_products())
    own = [each for each in model.model.modules() if isinstance(each, Bfloat16Matrix)]
    assert own
    assert not [each for each in model.model.modules() if isinstance(each, PlainMatrix)]
    for found, expected in zip(model.run(prompts(), STEPS), widened.run(prompts(), STEPS), strict=True):
        assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()
    weights = {each.weight.data_ptr(): each.weight.numel() for each in own}
    # Packed for float32, a tied table is in memory twice.
    twice = own[0].weight.numel() if model.model.tied else 0
    assert weight_bytes(widened.model) - weight_bytes(model.model) == 2 * sum(weights.values()) + 4 * twice


@pytest.mark.parametrize("shards", [None, 2])
def test_equal_results(shards: int | None, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", dtype="bfloat16")
    fixed = TorchPagedModel(folder, bfloat16=bfloat16_products(), fixed=True, page_size=16, num_shards=shards)
    tokens = np.random.default_rng(0).integers(0, 384, 121).astype(np.int32)
    assert differences(fixed, [tokens[:90], tokens[90:]], 70) == 0


def test_a_processor_without_bfloat16_keeps_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default: the same greedy tokens as with float32 weights, in half the bytes; also for equal results, and after
    other weights have replaced them."""
    monkeypatch.setattr(devices, "cpu_multiplies_bfloat16", lambda: False)
    folder = make_tiny_checkpoint(tmp_path, "qwen3", dtype="bfloat16", tie_word_embeddings=True)
    prompt = np.random.default_rng(2).integers(3, 380, 37).tolist()

    def make(dtype: Dtype, **changes: Any) -> Runner:
        values = {"model_path": str(folder), "device": Device.CPU, "dtype": dtype, "max_total_tokens": 640} | changes
        config = EngineConfig.model_validate({"max_running_requests": 2, "chunked_prefill_size": 16} | values)
        return create_runner(config, open_checkpoint(str(folder)))

    def text(runner: Runner) -> list[int]:
        driver = PlanDriver(runner)
        return driver.generate(driver.admit(prompt), 20, chunk=16)

    widened = make(Dtype.FLOAT32)
    expected = text(widened)
    for changes in ({}, {"enable_deterministic_inference": True}):
        with caplog.at_level(logging.INFO):
            runner = make(Dtype.AUTO, **changes)
        assert text(runner) == expected
        report = runner.report()
        assert report.details["dtype"] == report.details["kv_cache_dtype"] == "float32"
        assert report.details["weights"] == "15 of 15 matrices in bfloat16"
        table = 384 * 64
        norms = 4 * (2 * (2 * 64 + 2 * 32) + 64)
        assert widened.report().weight_bytes - norms - 4 * table == 2 * (report.weight_bytes - norms)
        runner.load_weights(str(folder))
        assert text(runner) == expected
        runner.close()
    widened.close()
