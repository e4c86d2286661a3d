"""Matrices kept in the blocks of a GGUF file: their numbers, their products, and which format serves which batch
size."""

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
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from helpers import gguf_blocks
from helpers.cpu_kernels import block_products, integer_products
from helpers.fixed_rows import differences
from helpers.gguf_blocks import EXACT_KINDS, KINDS, make_mixed_gguf, opened, stored
from helpers.gguf_files import make_tiny_gguf
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from helpers.torch_paged_model import TorchPagedModel
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.encoding import BLOCKS, Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.quantization import INT8_ROWS
from sglang_jax.config import AttentionBackend, EngineConfig
from sglang_jax.cpu_kernels import vectors
from sglang_jax.cpu_kernels.block_layout import random_blocks
from sglang_jax.cpu_kernels.byte_units import UNITS
from sglang_jax.cpu_kernels.integer_layout import rounded_rows
from sglang_jax.cpu_kernels.vectors import supported
from sglang_jax.errors import ConfigError
from sglang_jax.runner.quantization import only_blocks
from torch_backend import building
from torch_backend.attention.native import NativeAttention
from torch_backend.building import _block_matrices
from torch_backend.cpu_kernels.block_matrix import BlockMatrix, BlockProducts
from torch_backend.kernel_choice import Kernels
from torch_backend.layers import matrix_by_size
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.layout import PackedLayout
from torch_backend.layers.matrix import JoinedMatrix, PlainMatrix, QuantisedMatrix, TwoFormMatrix
from torch_backend.layers.matrix_by_size import MatrixBySize, MatrixShape, Product, set_limits
from torch_backend.models import Transformer
from torch_backend.native_operations import NativeOperations
from torch_backend.native_sampler import NativeSampler
from torch_backend.weights import bytes_in_blocks, load_weights, weight_bytes

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_exact_kind = pytest.mark.parametrize("kind", EXACT_KINDS, ids=lambda kind: kind.name)

UNITS_HERE = [
    pytest.param(number, dtype, id=f"{number}-{dtype}".replace("torch.", ""))
    for number, unit in enumerate(UNITS)
    for dtype in ((torch.bfloat16,), (torch.float32,), (torch.bfloat16, torch.float32), (torch.float32,))[number]
    if unit.found()
]
IN_GROUPS = [
    Encoding(GroupType(Levels.INT4, 64, Scales.FLOAT16, zeros=True)),
    Encoding(GroupType(Levels.INT4, 128, Scales.BFLOAT16)),
    Encoding(GroupType(Levels.INT8, 32, Scales.FLOAT32, zeros=True)),
    Encoding(GroupType(Levels.FLOAT4_E2M1, 64, Scales.POWER_OF_TWO)),
    Encoding(GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32)),
]
needs_units = pytest.mark.skipif(not supported(), reason="kernels need a processor with avx512_bf16")


def blocks_of(kind: GGMLQuantizationType, outputs: int, inputs: int, folder: Path) -> tuple[Stored, torch.Tensor]:
    """Blocks, and the matrix as the gguf package dequantises it, in bfloat16."""
    blocks, weight = gguf_blocks.blocks_of(kind, outputs, inputs, folder)
    return blocks, torch.from_numpy(weight.astype(np.float32)).bfloat16()


@every_kind
@pytest.mark.parametrize(("architecture", "interleaved"), [("llama", False), ("qwen2", False), ("qwen2", True)])
def test_blocks_are_the_numbers_that_the_reader_widens(
    kind: GGMLQuantizationType, architecture: str, interleaved: bool, tmp_path: Path
) -> None:
    """Llama's files have the query rows in another order than the model, as do models whose rotary pairs are
    adjacent."""
    block = GGML_QUANT_SIZES[kind][0]
    parameters, name = opened(tmp_path, stored(kind, 24, 5 * block), kind, architecture, interleaved)
    for index in (None, (slice(12, 24), slice(0, 5 * block)), (slice(0, 24), slice(block, 4 * block))):
        assert parameters.encoding(name, index) is not None
        blocks = parameters.read_stored(name, index)
        expected = parameters.read(name, index)
        assert blocks.shape == expected.shape
        np.testing.assert_array_equal(blocks.widened(), expected)
    assert parameters.encoding(name, (slice(0, 24), slice(16, 5 * block))) is None


@needs_units
@every_exact_kind
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 11, 64])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_products_are_rounded_once(kind: GGMLQuantizationType, rows: int, bias: bool, tmp_path: Path) -> None:
    """Against float64, rounded once: within half a step, plus float32 sums."""
    blocks, weight = blocks_of(kind, 104, 160, tmp_path)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((rows, 160), generator=generator).bfloat16()
    offset = torch.randn(104, generator=generator).bfloat16() if bias else None
    matrix = block_products().matrix(blocks, offset)
    exact = functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    check_rounded_once(matrix.multiply(x), exact)
    gate, up = exact.chunk(2, dim=-1)
    for activation, activated in (
        (Activation.SILU, functional.silu(gate)),
        (Activation.GELU_TANH, functional.gelu(gate, approximate="tanh")),
    ):
        found = matrix.multiply_gated(x, activation)
        assert found.shape == (rows, 52)
        error = (found.double() - activated * up).abs()
        assert bool((error <= 1.02 * torch.finfo(torch.bfloat16).eps * (activated * up).abs() + 1e-4).all())


def check_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.shape == exact.shape
    allowed = 0.51 * torch.finfo(found.dtype).eps * exact.abs() + 1e-5 * (1 + exact.abs().max())
    assert bool(((found.double() - exact).abs() <= allowed).all())


@needs_units
@every_exact_kind
def test_a_product_is_batch_invariant(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Bit for bit: by itself, in a small batch that is multiplied directly, and in a large one whose weights are
    widened first."""
    blocks, _ = blocks_of(kind, 2048, 160, tmp_path)
    matrix = block_products().matrix(blocks, None)
    x = torch.randn((64, 160), generator=torch.Generator().manual_seed(2)).bfloat16()
    together = matrix.multiply(x)
    gated = matrix.multiply_gated(x, Activation.SILU)
    for first, last in ((0, 1), (63, 64), (5, 7), (9, 12), (20, 24), (30, 35), (40, 57)):
        assert torch.equal(matrix.multiply(x[first:last]), together[first:last])
        assert torch.equal(matrix.multiply_gated(x[first:last], Activation.SILU), gated[first:last])


@pytest.mark.parametrize(("unit", "dtype"), UNITS_HERE)
def test_products_of_rows_rounded_to_int8(unit: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against float64 products of the rounded rows, rounded once; with rows as they are, the error is about that of
    rounding to 255 numbers. Bit for bit the same in any batch. With each group of instructions of this processor."""
    generator = torch.Generator().manual_seed(3)
    first = UNITS_HERE[0].values == (unit, dtype)
    some = (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, *KINDS[-2:])
    for kind in (*(KINDS if first else some), INT8_ROWS, *(IN_GROUPS if first else IN_GROUPS[:1])):
        outputs = 2080 if kind is GGMLQuantizationType.Q4_1 else 96
        if isinstance(kind, Encoding):
            blocks = random_blocks(kind, outputs, 160)
        else:
            blocks, _ = blocks_of(kind, outputs, 160, tmp_path)
        (outputs, inputs), bias = blocks.shape, kind is GGMLQuantizationType.Q4_1
        x = torch.randn((64, inputs), generator=generator).to(dtype)
        x[5, 32:64] = 0
        offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
        weight = torch.from_numpy(blocks.widened()).double()
        rounded = torch.from_numpy(rounded_rows(x.float().numpy())).double()
        matrix = integer_products(unit, dtype).matrix(blocks, offset)
        exact = functional.linear(rounded, weight, None if offset is None else offset.double())
        found = matrix.multiply(x)
        check_rounded_once(found, exact)
        unrounded = functional.linear(x.double(), weight)
        assert float((functional.linear(rounded, weight) - unrounded).norm() / unrounded.norm()) < 0.01
        batches = ((0, 1), (5, 7), (9, 12), (20, 24), (30, 39), (40, 57))
        for first_row, last in batches:
            assert torch.equal(matrix.multiply(x[first_row:last]), found[first_row:last])
        if kind not in EXACT_KINDS:
            continue
        gate, up = exact.chunk(2, dim=-1)
        gated = matrix.multiply_gated(x, Activation.SILU)
        error, size = (gated.double() - functional.silu(gate) * up).abs(), (functional.silu(gate) * up).abs()
        # The errors of float32 sums whose terms cancel.
        terms = 4 * torch.finfo(torch.float32).eps * functional.linear(rounded.abs(), weight.abs())
        of_gate, of_up = terms.chunk(2, dim=-1)
        of_sums = of_gate * up.abs() + of_up * functional.silu(gate).abs() + (1e-4 if dtype is torch.bfloat16 else 1e-6)
        assert bool((error <= 1.02 * torch.finfo(dtype).eps * size + of_sums).all())
        for first_row, last in batches:
            assert torch.equal(matrix.multiply_gated(x[first_row:last], Activation.SILU), gated[first_row:last])


@pytest.mark.parametrize("products", [pytest.param("exact", marks=needs_units), "int8"])
def test_nan_and_infinity_are_reported(products: str, tmp_path: Path) -> None:
    blocks, _ = blocks_of(GGMLQuantizationType.Q4_1, 16, 64, tmp_path)
    matrix = (block_products() if products == "exact" else integer_products()).matrix(blocks, None)
    x = torch.ones((6, 64)).bfloat16()
    x[1, 3], x[4, 60] = torch.nan, torch.inf
    found = matrix.multiply(x)
    assert bool(found[1].isnan().all())
    assert not bool(found[4].isfinite().any())
    assert bool(found[[0, 2, 3, 5]].isfinite().all())


def test_rows_too_small_for_a_scale_are_zeros(tmp_path: Path) -> None:
    """The quotients of such rows would be infinite, which has no integer; offsets would multiply the sum of these."""
    blocks, _ = blocks_of(GGMLQuantizationType.Q4_1, 16, 64, tmp_path)
    x = torch.tensor([[1e-38], [-1e-40], [3e-37], [1e-36]]).repeat(1, 64).bfloat16()
    x[:, 7] = 0  # else the sums of what processors return would wrap around to 0
    found = integer_products().matrix(blocks, None).multiply(x)
    assert bool((found[:3] == 0).all())
    exact = x.double() @ torch.from_numpy(blocks.widened()).double().T
    torch.testing.assert_close(found[3].double(), exact[3], rtol=0.02, atol=1e-36)


@needs_units
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_model_with_blocks_has_the_logits_of_the_widened_one(tied: bool, tmp_path: Path) -> None:
    """For every row, whichever format serves it: both formats have the same weights, and sums in float32."""
    model = make_tiny_model("llama", hidden_size=128, intermediate_size=256, tie_word_embeddings=tied)
    file = make_tiny_gguf(tmp_path / "model.gguf", model, make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.Q4_1)
    checkpoint = open_checkpoint(str(file))
    widened = TorchPagedModel(file, dtype=torch.bfloat16)
    plain = weight_bytes(TorchPagedModel(file, dtype=torch.bfloat16, load=False).model)
    blocks = TorchPagedModel(file, dtype=torch.bfloat16, load=False, block_matrices=block_products())
    kept = [module for module in blocks.model.modules() if isinstance(module, TwoFormMatrix)]
    # per layer: queries with keys and values, output, gate with up, down; and the head
    assert len(kept) == 4 * len(checkpoint.config.layers) + 1
    assert weight_bytes(blocks.model) - plain == sum(each.weight.numel() for each in kept) * 20 // 32
    assert bytes_in_blocks(blocks.model) == weight_bytes(blocks.model) - plain
    form = load_weights(blocks.model, checkpoint.reader, checkpoint.config)
    assert isinstance(form, PackedLayout)
    limited = form.products
    assert len(limited) == len(kept)
    tokens = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, (4, 12)).astype(np.int32)
    steps = [{0: 8, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1}]
    expected = widened.run(tokens, steps)
    for limit in (0, 3, 64):
        for each in limited:
            each.limit = limit
        for found, wanted in zip(blocks.run(tokens, steps), expected, strict=True):
            assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_model_with_matrices_of_several_types_stays_in_blocks(tmp_path: Path) -> None:
    """Queries, keys and values, or gate and up, are joined although their blocks differ."""
    file = make_mixed_gguf(tmp_path, tied=True, up=GGMLQuantizationType.Q4_K)
    checkpoint = open_checkpoint(str(file))
    assert only_blocks(checkpoint)
    widened = TorchPagedModel(file, dtype=torch.bfloat16, page_size=16)
    blocks = TorchPagedModel(file, dtype=torch.bfloat16, page_size=16, block_matrices=integer_products())
    modules = list(blocks.model.modules())
    assert not [each for each in modules if isinstance(each, PlainMatrix)]
    joined = [each for each in modules if isinstance(each, JoinedMatrix)]
    assert [len(each.matrices) for each in joined] == [3, 2] * 2
    assert weight_bytes(blocks.model) < 1.03 * sum(each.num_bytes for each in open_gguf(file).tensors.values())
    ids = torch.tensor([0, 1, 15, 16, 17, 376, 377], dtype=torch.int32)
    assert torch.equal(blocks.model.embeddings[0](ids), widened.model.embeddings[0](ids))
    tokens = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, (4, 90)).astype(np.int32)
    steps = [{0: 80, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_a_model_in_groups_has_the_logits_of_the_widened_one(tmp_path: Path) -> None:
    """Its matrices stay in groups; logits differ by what rounding activations to int8 costs."""
    make_grouped_checkpoint(tmp_path, "qwen3", Grouped.AWQ)
    widened = TorchPagedModel(tmp_path, dtype=torch.bfloat16, page_size=16)
    blocks = TorchPagedModel(tmp_path, dtype=torch.bfloat16, page_size=16, block_matrices=integer_products())
    kept = [each for each in blocks.model.modules() if isinstance(each, QuantisedMatrix)]
    assert len(kept) == 4 * 2
    tokens = np.random.default_rng(0).integers(0, 300, (4, 90)).astype(np.int32)
    steps = [{0: 80, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert 0 < np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_model_in_blocks_has_no_widened_copy(tied: bool, tmp_path: Path) -> None:
    """Its matrices, the head and the table of embeddings take the bytes of the file; rows of the table are those of the
    widened one, bit for bit; logits differ by what rounding activations to int8 costs. 378 tokens fill no tiles."""
    model = make_tiny_model("llama", hidden_size=128, intermediate_size=256, tie_word_embeddings=tied, vocab_size=378)
    tokenizer = make_tiny_tokenizer(tmp_path)
    file = make_tiny_gguf(tmp_path / "model.gguf", model, tokenizer, kind=GGMLQuantizationType.Q4_1)
    config = open_checkpoint(str(file)).config
    widened = TorchPagedModel(file, dtype=torch.bfloat16, page_size=16)
    blocks = TorchPagedModel(file, dtype=torch.bfloat16, page_size=16, block_matrices=integer_products())
    assert not [each for each in blocks.model.modules() if isinstance(each, PlainMatrix)]
    kept = {each: each.shape for each in blocks.model.modules() if isinstance(each, QuantisedMatrix)}
    assert len(kept) == 4 * len(config.layers) + (1 if tied else 2)
    norms = (2 * len(config.layers) + 1) * 128 * 2
    assert weight_bytes(blocks.model) == sum(rows * width for rows, width in kept.values()) * 20 // 32 + norms
    ids = torch.tensor([0, 1, 15, 16, 17, 376, 377], dtype=torch.int32)
    assert torch.equal(blocks.model.embeddings[0](ids), widened.model.embeddings[0](ids))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 90)).astype(np.int32)
    steps = [{0: 80, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)
    # A running engine's model is kept from the garbage collector, so it must be freed without it.
    freed = [weakref.ref(each) for each in kept]
    gc.disable()
    try:
        del blocks, kept
        assert not [each for each in freed if each() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("products", [pytest.param("exact", marks=needs_units), "int8"])
def test_equal_results_with_blocks(products: str, tmp_path: Path) -> None:
    """Logits do not depend on the step, nor on 64 rows, the most that a kernel takes."""
    model = make_tiny_model("llama", hidden_size=128, intermediate_size=256)
    file = make_tiny_gguf(tmp_path / "model.gguf", model, make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.Q4_1)
    matrices = block_products() if products == "exact" else integer_products()
    options = {"dtype": torch.bfloat16, "block_matrices": matrices, "fixed": True, "page_size": 16}
    fixed = TorchPagedModel(file, **options)
    sequences = [
        np.random.default_rng(row).integers(0, 384, length).astype(np.int32) for row, length in enumerate((90, 31))
    ]
    assert differences(fixed, sequences, 70) == 0


@needs_units
def test_kernels_that_multiply_wrongly_are_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = BlockMatrix.multiply
    for name, wrong in (("value", 1.02), ("NaN", float("nan"))):
        monkeypatch.setattr(BlockMatrix, "multiply", lambda matrix, x, by=wrong: right(matrix, x) * by)
        products = BlockProducts(block_products().compiler)
        with caplog.at_level(logging.WARNING, logger="torch_backend"):
            assert not products.work(BLOCKS[BlockType.Q4_0], gated=False), name
            assert not products.work(BLOCKS[BlockType.Q4_0], gated=False)
        (message,) = caplog.messages
        assert message.endswith("wrong results on this machine")
        caplog.clear()


def test_a_processor_without_the_instructions_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process when asked for instructions that the processor lacks."""
    for features, expected in (
        ("", False),
        ("+avx512bw,+avx512f,-avx512bf16", False),
        ("+avx512bf16,+avx512bw", True),
    ):
        monkeypatch.setattr(vectors.config, "CPU_FEATURES", features)
        assert supported() is expected


class Clock:
    """A fake clock of processor time for products."""

    def __init__(self) -> None:
        self.now = 0.0

    def product(self, fixed: float, by_row: float) -> Product:
        """Takes a fixed time plus a time per row; its result identifies it."""

        def multiply(x: torch.Tensor) -> torch.Tensor:
            self.now += fixed + by_row * len(x)
            return x.new_full((len(x), 1), fixed)

        return multiply


@pytest.mark.parametrize(
    ("small_batch", "large_batch", "expected"), [((1, 1), (20, 0), 16), ((1, 0), (2, 0), 64), ((5, 0), (4, 0), 0)]
)
def test_the_quicker_format_serves(
    small_batch: tuple[float, float], large_batch: tuple[float, float], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, form = Clock(), MatrixShape(outputs=1024, inputs=2**12, encoding=BLOCKS[BlockType.Q4_0], gated=False)
    monkeypatch.setattr(matrix_by_size.time, "thread_time", lambda: clock.now)
    products = [
        MatrixBySize(form, clock.product(*small_batch), clock.product(*large_batch), torch.bfloat16) for _ in range(5)
    ]
    threads = torch.get_num_threads()
    assert set_limits(products) == {form: expected}
    assert torch.get_num_threads() == threads
    for rows in (1, expected, expected + 1, 65):
        served = small_batch if rows <= expected else large_batch
        assert all(float(each.multiply(torch.ones(rows, 1)).sum()) == rows * served[0] for each in products)


def test_blocks_are_kept_if_asked_and_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("llama", hidden_size=128, intermediate_size=256)
    file = make_tiny_gguf(tmp_path / "model.gguf", model, make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.Q4_1)
    plain = Kernels(NativeAttention(), AttentionBackend.NATIVE, NativeOperations(), NativeSampler())
    able = replace(plain, block_matrices=block_products())
    rounding = replace(plain, block_matrices=integer_products())

    def kept(
        asked: bool, folder: Path, kernels: Kernels, grouped: bool = False, **options: Any
    ) -> BlockMatrices | None:
        options = {"cpu_activations": "exact"} | options
        config = EngineConfig(model_path=str(folder), keep_gguf_blocks=asked, **options)

        def build(**options: Any) -> Transformer:
            return TorchPagedModel(folder, dtype=torch.bfloat16, load=False, **options).model

        return _block_matrices(config, open_checkpoint(str(folder)), build, kernels, grouped=grouped)

    assert kept(False, file, able) is None
    if supported():
        assert kept(True, file, able) is able.block_matrices
        monkeypatch.setattr(building, "available_memory", lambda _: 2**20)
        assert kept(True, file, able) is None
    for options in ({}, {"cpu_activations": "int8", "dtype": "float32"}, {"cpu_activations": "int8"}):
        wanted = {"cpu_activations": "auto"} | options
        assert kept(False, file, rounding, **wanted) is rounding.block_matrices
        with pytest.raises(ConfigError, match="needs a CPU, numba, and activations in bfloat16"):
            kept(not options, file, plain, **wanted)
        with pytest.raises(ConfigError, match="needs a CPU, numba"):
            kept(True, file, plain, True, **wanted)
    assert kept(False, file, plain, cpu_activations="auto") is None
    folder = make_tiny_checkpoint(tmp_path / "tensors", "llama")
    assert kept(False, folder, rounding, cpu_activations="auto", quantization="int8") is rounding.block_matrices
    for other in ({"dtype": "float32"}, {"enable_deterministic_inference": True}, {"quantization": "fp8"}):
        assert kept(False, file, rounding, cpu_activations="auto", **other) is None
    assert kept(False, folder, rounding, cpu_activations="auto") is None
    for options, types in (
        ({"cpu_activations": "int8"}, "Q4_0, Q4_1, .*MXFP4, int8 or grouped int4"),
        ({"cpu_activations": "auto", "dtype": "float32"}, "Q4_0, Q4_1 or Q8_0"),
    ):
        with pytest.raises(ConfigError, match=f"tensors has no {types} matrices"):
            kept("dtype" in options, folder, able, **options)
