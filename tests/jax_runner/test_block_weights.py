"""Models that keep matrices in the blocks of a GGUF file: which matrices, and that a runner gives the same outputs."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType
from helpers.gguf_blocks import make_mixed_gguf
from helpers.gguf_files import make_tiny_gguf
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.paged_model import PagedModel
from helpers.plan_driver import PlanDriver
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.encoding import BLOCKS, Encoding
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.config import Dtype, EngineConfig
from sglang_jax.cpu_kernels import vectors
from sglang_jax.cpu_kernels.byte_units import UNITS, best_unit
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.jax_runner.block_kernels import block_product
from sglang_jax.jax_runner.loading import load_rank
from sglang_jax.layers.block_matrix import BlockMatrix, BlockProduct
from sglang_jax.layers.matrix import JoinedMatrix
from sglang_jax.runner.plan import PromptLogprobs
from sglang_jax.runner.quantization import keeps_blocks

needs_units = pytest.mark.skipif(not vectors.supported(), reason="kernels need a processor with avx512_bf16")


def tiny_gguf(folder: Path, kind: GGMLQuantizationType, architecture: str = "llama", **changes: object) -> Path:
    model = make_tiny_model(architecture, hidden_size=128, intermediate_size=256, **changes)
    return make_tiny_gguf(folder / "model.gguf", model, make_tiny_tokenizer(folder), architecture, kind)


def products(encoding: Encoding, max_rows: int = 4) -> BlockProduct | None:
    product = block_product(encoding, cache_folder=EngineConfig().cache_folder())
    return None if product is None else replace(product, max_rows=max_rows)


@needs_units
@pytest.mark.parametrize(
    ("architecture", "kind", "tied", "max_rows"),
    [
        ("llama", GGMLQuantizationType.Q4_0, True, 4),  # only decode steps
        ("qwen2", GGMLQuantizationType.Q4_1, False, 48),  # with biases; prompts too
    ],
)
def test_a_model_with_blocks_has_the_same_logits_as_a_widened_one(
    architecture: str, kind: GGMLQuantizationType, tied: bool, max_rows: int, tmp_path: Path
) -> None:
    """For every row, whichever form serves it; both forms have the same weights, and sums in float32."""
    file = tiny_gguf(tmp_path, kind, architecture, tie_word_embeddings=tied)
    tokens = np.random.default_rng(0).integers(0, 300, (4, 12)).astype(np.int32)
    steps = [{0: 8, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1}]
    expected = PagedModel(file, dtype="bfloat16").run(tokens, steps)
    model = PagedModel(file, dtype="bfloat16", block_products=partial(products, max_rows=max_rows))
    found = model.run(tokens, steps)
    errors = [np.abs(logits - wanted) for logits, wanted in zip(found, expected, strict=True)]
    assert max(each.max() for each in errors) < 0.03 * max(np.abs(wanted).max() for wanted in expected)
    # In both layers: queries with keys and values, output, gate with up, down; and the head.
    assert model.program({0: 1}).as_text().count("custom_call @block_product_") == 2 * 4 + 1
    assert model.program({0: 8}).as_text().count("custom_call @block_product_") == (9 if max_rows == 48 else 0)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_a_model_in_blocks_has_no_widened_copy(tied: bool, tmp_path: Path) -> None:
    """Its matrices, the head and the table of embeddings take the bytes of the file; rows of the table are those of the
    widened one, bit for bit; logits differ by what rounding activations to int8 costs. 378 tokens fill no
    tiles."""
    file = tiny_gguf(tmp_path, GGMLQuantizationType.Q4_1, tie_word_embeddings=tied, vocab_size=378)
    widened = PagedModel(file, dtype="bfloat16", page_size=16)
    in_blocks = partial(block_product, cache_folder=EngineConfig().cache_folder(), unit=best_unit())
    blocks = PagedModel(file, dtype="bfloat16", page_size=16, block_products=in_blocks)
    layers, weights = 2, 128 * (256 + 128 + 3 * 256)
    held = sum(each.nbytes for each in jax.tree.leaves(nnx.state(blocks.model)))
    tables = 384 if tied else 2 * 384
    assert held == (layers * weights + tables * 128) * 20 // 32 + (2 * layers + 1) * 128 * 2
    ids = jnp.array([0, 1, 15, 16, 17, 376, 377], jnp.int32)
    np.testing.assert_array_equal(*(np.asarray(jax.jit(each.model.embedding)(ids)) for each in (blocks, widened)))
    tokens = np.random.default_rng(0).integers(0, 378, (4, 50)).astype(np.int32)
    steps = [{0: 40, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert found.shape == wanted.shape
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_a_model_with_matrices_of_several_types_stays_in_blocks(tmp_path: Path) -> None:
    """Queries, keys and values, or gate and up, are joined although their blocks differ. Rows of a table of Q6_K are
    those of the widened one."""
    file = make_mixed_gguf(tmp_path, tied=True, up=GGMLQuantizationType.Q4_K)
    widened = PagedModel(file, dtype="bfloat16", page_size=16)
    in_blocks = partial(block_product, cache_folder=EngineConfig().cache_folder(), unit=best_unit())
    blocks = PagedModel(file, dtype="bfloat16", page_size=16, block_products=in_blocks)
    joined = [each for _, each in nnx.iter_modules(blocks.model) if isinstance(each, JoinedMatrix)]
    assert [len(each.matrices) for each in joined] == [3, 2] * 2
    held = sum(each.nbytes for each in jax.tree.leaves(nnx.state(blocks.model)))
    assert held < 1.03 * sum(each.num_bytes for each in open_gguf(file).tensors.values())
    ids = jnp.array([0, 1, 15, 16, 17, 376, 377], jnp.int32)
    np.testing.assert_array_equal(*(np.asarray(jax.jit(each.model.embedding)(ids)) for each in (blocks, widened)))
    tokens = np.random.default_rng(0).integers(0, 378, (4, 50)).astype(np.int32)
    steps = [{0: 40, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_a_model_in_groups_has_the_logits_of_the_widened_one(tmp_path: Path) -> None:
    """Its matrices stay in groups; logits differ by what rounding activations to int8 costs."""
    make_grouped_checkpoint(tmp_path, "qwen3", Grouped.GPTQ_ZEROS)
    widened = PagedModel(tmp_path, dtype="bfloat16")
    in_blocks = partial(block_product, cache_folder=EngineConfig().cache_folder(), unit=best_unit())
    blocks = PagedModel(tmp_path, dtype="bfloat16", block_products=in_blocks)
    assert sum(isinstance(each, BlockMatrix) for _, each in nnx.iter_modules(blocks.model)) == 4 * 2
    tokens = np.random.default_rng(0).integers(0, 300, (4, 50)).astype(np.int32)
    steps = [{0: 40, 1: 3}, {0: 1, 1: 1, 2: 1, 3: 1}]
    for found, wanted in zip(blocks.run(tokens, steps), widened.run(tokens, steps), strict=True):
        assert 0 < np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("unit", [number for number, unit in enumerate(UNITS) if unit.found()])
def test_xla_calls_the_kernel_of_every_processor(unit: int) -> None:
    """The trial's blocks have some scales that are too small for float16's exponent."""
    assert block_product(BLOCKS[BlockType.Q8_0], EngineConfig().cache_folder(), unit=unit, dtype="float32") is not None


def test_no_blocks_are_kept_where_they_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_jax"):
        assert keeps_blocks(needed=2**20, room=2**23)
        assert not keeps_blocks(needed=2**20 + 1, room=2**23)
    assert caplog.messages[1].endswith("keeping both takes 1 MiB, more than an eighth of 8")


@needs_units
def test_a_scale_that_float16_cannot_hold_is_an_error(tmp_path: Path) -> None:
    """Q4_0's minimum weight is eight times its scale."""
    model = make_tiny_model("llama", hidden_size=128, intermediate_size=256)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = 16e4
    file = make_tiny_gguf(tmp_path / "x.gguf", model, make_tiny_tokenizer(tmp_path), kind=GGMLQuantizationType.Q4_0)
    with pytest.raises(CheckpointError, match=r"Q4_0 has the scale 20000, and kernels .* at most 8188"):
        PagedModel(file, dtype="bfloat16", block_products=products)


def options(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model_path": str(folder),
        "dtype": Dtype.BFLOAT16,
        "keep_gguf_blocks": True,
        "cpu_activations": "exact",
        "max_total_tokens": 640,
        "max_running_requests": 2,
        "chunked_prefill_size": 32,
        "skip_warmup": True,
    }
    return EngineConfig.model_validate(values | changes)


@needs_units
def test_a_runner_with_blocks(tmp_path: Path) -> None:
    """Its programs find their kernels when they come from the compilation cache too."""
    file = tiny_gguf(tmp_path, GGMLQuantizationType.Q8_0, tie_word_embeddings=False)
    prompt = np.random.default_rng(2).integers(3, 380, 11).tolist()
    found = []
    for _ in range(2):
        runner = load_rank(options(file, compilation_cache_dir=tmp_path / "compiled"), open_checkpoint(str(file)))
        driver = PlanDriver(runner)
        request = driver.admit(prompt)
        wanted = PromptLogprobs(0, 0, np.array(prompt[1:], np.int32))
        driver.step([(request, 10)], prompt_logprobs=[wanted])
        bytes_held = runner.report().weight_bytes
        found.append((request.prompt_logprobs[0].logprobs.tolist(), driver.generate(request, 6)))
        runner.close()
    assert found[0] == found[1]
    hidden, inner, layers, vocab = 128, 256, 2, 384
    weights = vocab * hidden + layers * (hidden * (2 * hidden + 2 * hidden // 2) + 3 * hidden * inner)
    plain = 2 * (weights + vocab * hidden + (2 * layers + 1) * hidden)
    assert bytes_held == plain + BLOCKS[BlockType.Q8_0].nbytes(weights // 32, 32)


def test_blocks_are_refused_for_checkpoints_and_machines_without_support(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_gguf(tmp_path, GGMLQuantizationType.Q8_0)
    with pytest.raises(
        ConfigError, match="keep_gguf_blocks needs --dtype bfloat16 or --cpu-activations int8, got float32"
    ):
        load_rank(options(file, dtype=Dtype.FLOAT32), open_checkpoint(str(file)))
    folder = make_tiny_checkpoint(tmp_path / "tensors", "llama")
    monkeypatch.setattr(vectors, "supported", lambda: True)
    with pytest.raises(ConfigError, match=r"keep_gguf_blocks: .*tensors has no Q4_0, Q4_1 or Q8_0 matrices"):
        load_rank(options(folder), open_checkpoint(str(folder)))
