"""8-bit matrices on both backends: the model equals one with the quantiser's dequantised weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.cpu_kernels import integer_products
from helpers.gguf_blocks import make_mixed_gguf
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, prompts
from helpers.quantized_checkpoints import (
    IGNORED,
    Quantised,
    make_quantised_checkpoint,
    quantise,
    scheme_of,
    tensors_of,
    write_plain_twin,
    write_tensors,
)
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader, open_checkpoint
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT4_GROUPS, INT8_ROWS, Quantization
from sglang_jax.checkpoint.reader import Role
from sglang_jax.config import EngineConfig, LoadFormat, WeightQuantization
from sglang_jax.cpu_kernels.byte_units import UNITS, best_unit
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.jax_runner.block_kernels import block_product
from sglang_jax.jax_runner.loading import load_rank as load_on_jax
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.layers.block_matrix import BlockMatrix, BlockProduct
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, build_model, parameters
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.quantization import describe_matrices, encodings_of, kept_encodings, quantization_of
from torch_backend import weights as torch_weights
from torch_backend.cpu_kernels.block_matrix import BlockProducts
from torch_backend.layers.expert_matrices import BlockExperts
from torch_backend.loading import load_rank as load_on_torch

ROUNDING = 1e-5
"""Of float32 products, whose scales come before or after them, as a fraction of the largest logit."""


def assert_alike(found: list[NDArray[np.float32]], expected: list[NDArray[np.float32]]) -> None:
    largest = max(np.abs(logits).max() for logits in expected)
    for logits, others in zip(found, expected, strict=True):
        assert np.abs(logits - others).max() < ROUNDING * largest


def bytes_of_jax(model: PagedModel) -> Mapping[str, int]:
    """Bytes by type."""
    sizes: dict[str, int] = {}
    for array in jax.tree.leaves(model.state):
        sizes[array.dtype.name] = sizes.get(array.dtype.name, 0) + array.nbytes
    return sizes


def bytes_of_torch(model: TorchPagedModel) -> Mapping[str, int]:
    """Bytes by type."""
    sizes: dict[str, int] = {}
    for parameter in model.model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + parameter.nbytes
    return sizes


@pytest.mark.parametrize(
    ("architecture", "kind", "ignored", "widened"),
    [
        ("qwen3", Quantised.FP8_CHANNEL, (r"re:.*layers\.1\.self_attn\.k_proj$",), r"layers\.1\.self_attn\.[qv]_proj"),
        ("phi3", Quantised.INT8_W8A16, (r"re:.*layers\.0\.",), "$^"),  # fused tensors; a plain layer
        ("qwen3_moe", Quantised.MODELOPT, (), "$^"),
        ("qwen2_moe", Quantised.INT8_W8A8, (), "shared_expert_gate"),  # biases, a shared expert
        ("deepseek_v3", Quantised.FP8_CHANNEL, (), "kv_b_proj"),  # latent attention
    ],
)
def test_products_equal_those_of_the_dequantised_weights(
    architecture: str, kind: Quantised, ignored: tuple[str, ...], widened: str, tmp_path: Path
) -> None:
    """And the matrices of layers are kept in 8 bits, each once, except those that are joined with plain ones."""
    if kind is Quantised.MODELOPT:
        weights = make_quantised_checkpoint(tmp_path / "quantised", architecture, kind)
    else:
        make_tiny_checkpoint(tmp_path / "quantised", architecture)
        weights = quantise(tmp_path / "quantised", [scheme_of(kind)], (*IGNORED, *ignored))
    folders = tmp_path / "quantised", write_plain_twin(tmp_path / "quantised", weights, tmp_path / "plain")
    encoded = open_checkpoint(str(folders[0])).reader
    assert encoded is not None
    kept = [name for name in encoded.names() if encoded.encoding(name) and not re.search(widened, name)]
    bytes_stored = sum(int(np.prod(encoded.shape(name))) for name in kept)
    stored = "int8" if "int8" in kind.value else "float8_e4m3fn"
    for build, sizes in ((PagedModel, bytes_of_jax), (TorchPagedModel, bytes_of_torch)):
        quantised, plain = (build(folder) for folder in folders)
        assert sizes(quantised)[stored] == bytes_stored
        assert_alike(quantised.run(prompts(), STEPS), plain.run(prompts(), STEPS))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("falcon_h1", {}),
        ("qwen3_5_text", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {}),
        ("gemma2", {"tie_word_embeddings": True}),
    ],
)
def test_both_backends_quantise_to_the_same_values_while_loading(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Multipliers of rows, joined products, stacked experts with biases, heads shared with embeddings."""
    folder = make_tiny_checkpoint(tmp_path, architecture, **changes)
    quantization = Quantization(INT8_ROWS)
    models = PagedModel(folder, quantization=quantization), TorchPagedModel(folder, quantization=quantization)
    assert bytes_of_jax(models[0])["int8"] == bytes_of_torch(models[1])["int8"] > 0
    found, others = (model.run(prompts(), STEPS) for model in models)
    largest = max(np.abs(logits).max() for logits in others)
    for logits, wanted in zip(found, others, strict=True):
        assert np.abs(logits - wanted).max() < 2e-4 * largest


def test_kernels_multiply_int8_matrices_by_rows_rounded_to_int8(tmp_path: Path) -> None:
    """Those of a checkpoint, and those quantised while loading: in the layout of the kernels, each once; logits differ
    by what rounding costs. Other inputs than multiples of 32 are widened in each product as without kernels."""
    make_tiny_checkpoint(tmp_path / "int8", "qwen2", hidden_size=64, intermediate_size=84)
    weights = quantise(tmp_path / "int8", [scheme_of(Quantised.INT8_W8A8)], IGNORED)
    plain = write_plain_twin(tmp_path / "int8", weights, tmp_path / "plain")
    unit = best_unit()
    by_kernels = partial(block_product, cache_folder=EngineConfig().cache_folder(), unit=unit, dtype="float32")
    for folder, quantization in (
        (tmp_path / "int8", None),
        (plain, Quantization(INT8_ROWS)),
        (plain, Quantization(INT4_GROUPS)),
    ):
        in_groups = quantization == Quantization(INT4_GROUPS)
        # Without kernels, those in groups are rounded, and then widened.
        expected = TorchPagedModel(plain, quantization=quantization if in_groups else None).run(prompts(), STEPS)
        on_jax = PagedModel(folder, quantization=quantization, block_products=by_kernels)
        on_torch = TorchPagedModel(
            folder, quantization=quantization, block_matrices=integer_products(unit, torch.float32)
        )
        kinds = [type(each).__name__ for _, each in nnx.iter_modules(on_jax.model)]
        assert kinds.count("BlockMatrix") == 2 * 3
        assert kinds.count("PlainMatrix" if in_groups else "ScaledMatrix") == (3 if in_groups else 2)  # down, head
        names = [type(each).__name__ for each in on_torch.model.modules()]
        assert names.count("QuantisedMatrix") == 2 * 2 + 2 * 2  # gate and up fill no tiles together
        assert names.count("ScaledMatrix") == (0 if in_groups else 2)
        found = on_jax.run(prompts(), STEPS), on_torch.run(prompts(), STEPS)
        for logits, wanted in zip((*found[0], *found[1]), expected * 2, strict=True):
            assert np.linalg.norm(logits - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gpt_oss", Grouped.MXFP4), ("qwen3_moe", Grouped.GPTQ_ZEROS), ("qwen3_moe", Grouped.MODELOPT)],
    ids=["mxfp4", "gptq", "nvfp4"],
)
def test_experts_stay_in_groups_on_a_cpu(architecture: str, kind: Grouped, tmp_path: Path) -> None:
    """Each expert's matrices are there once, for kernels; logits differ by what rounding activations costs. Without
    kernels they are widened when they are loaded."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    weights = make_grouped_checkpoint(tmp_path / "grouped", architecture, kind, **sizes)
    folders = tmp_path / "grouped", write_plain_twin(tmp_path / "grouped", weights, tmp_path / "plain")
    unit = best_unit()
    products = partial(block_product, cache_folder=EngineConfig().cache_folder(), unit=unit, dtype="float32")
    expected = TorchPagedModel(folders[1]).run(prompts(), STEPS)
    assert_alike(TorchPagedModel(folders[0]).run(prompts(), STEPS), expected)
    on_jax = PagedModel(folders[0], block_products=products)
    on_torch = TorchPagedModel(folders[0], block_matrices=integer_products(unit, torch.float32))
    layers = on_jax.model.config.num_layers
    for each in on_jax.model.layers:
        assert all(isinstance(stack, BlockMatrix) for stack in (each.feed_forward.gate, each.feed_forward.down))
    assert sum(isinstance(each, BlockExperts) for each in on_torch.model.modules()) == 2 * layers
    for model in (on_jax, on_torch):
        found = model.run(prompts(), STEPS)
        for logits, wanted in zip(found, expected, strict=True):
            assert np.linalg.norm(logits - wanted) < 0.03 * np.linalg.norm(wanted)


def test_projections_of_latent_vectors_stay_plain(tmp_path: Path) -> None:
    config = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "deepseek_v3"))).config
    specs = manifest_of(config).specs.values()
    taken = {spec.name.part for spec in specs if Quantization(INT8_ROWS).of(spec)}
    assert taken >= {Part.QUERY_LATENT, Part.QUERY_UP, Part.QUERY_ROTATED, Part.LATENT, Part.KEY_ROTATED, Part.OUTPUT}
    assert not taken & {Part.KEY_UP, Part.VALUE_UP, Part.ROUTER}


@pytest.mark.parametrize("encoding", [INT8_ROWS, FLOAT8_ROWS], ids=["int8", "fp8"])
def test_a_part_of_a_matrix_is_quantised_as_within_the_whole(encoding: Any) -> None:
    """Each weight within half a step of its value; so are a row of zeros and one of numbers near the smallest."""
    config = small_config(num_layers=1)
    reader = DummyReader(config, seed=0)
    parameters = ParameterReader(reader, config, Quantization(encoding))
    plain = ParameterReader(reader, config)
    random = np.random.default_rng(0)
    names = [name for name in manifest_of(config).specs if parameters.encoding(name) is not None]
    assert {name.part for name in names} == {
        *(Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN)
    }
    for name in names:
        rows, columns = plain.spec(name).shape
        stored, numbers = parameters.read_stored(name), plain.read(name)
        scales = stored.arrays[Role.SCALES][:, None]
        step = scales if encoding is INT8_ROWS else np.maximum(np.abs(numbers) / 8, scales * 2.0**-9)
        assert (np.abs(stored.widened() - numbers) <= step / 2 * 1.0001).all()
        first, last = sorted(random.choice(columns + 1, 2, replace=False).tolist())
        part = parameters.read_stored(name, (slice(0, rows), slice(first, last)))
        np.testing.assert_array_equal(part.widened(), stored.widened()[:, first:last])
    rows = np.array([[0.0, 0.0], [1e-44, -1e-44], [3e38, -1.0]], np.float32)
    found = Quantization(encoding).arrays(rows, (Role.VALUES, Role.SCALES))
    widened = found[Role.VALUES].astype(np.float32) * found[Role.SCALES][:, None]
    assert np.isfinite(widened).all()
    assert not widened[:2].any()


def test_groups_are_quantised_as_within_the_whole() -> None:
    """With at most the square error of scales that cut nothing, and never an error above those of the largest number's
    own rounding. Parts that cut through groups are the same numbers without an encoding."""
    config = small_config(num_layers=1, hidden_size=160, intermediate_size=192)
    parameters = ParameterReader(DummyReader(config, seed=0), config, Quantization(INT4_GROUPS))
    plain = ParameterReader(DummyReader(config, seed=0), config)
    sizes = {}
    for name in (each for each in manifest_of(config).specs if parameters.encoding(each) is not None):
        stored, numbers = parameters.read_stored(name), plain.read(name).astype(np.float32)
        sizes[name.part] = size = stored.encoding.block
        widened, groups = stored.widened(), numbers.reshape(len(numbers), -1, size)
        np.testing.assert_array_equal(parameters.read(name), widened)
        largest = np.abs(groups).max(-1, keepdims=True)
        uncut = np.rint(groups / largest * 7) * largest / 7
        errors = np.square(widened.reshape(groups.shape) - groups).sum(-1)
        assert (errors <= 1.03 * np.square(uncut - groups).sum(-1)).all()  # scales are rounded to bfloat16
        assert errors.sum() < 0.95 * np.square(uncut - groups).sum()
        some = (slice(0, len(numbers)), slice(size, numbers.shape[1]))
        np.testing.assert_array_equal(parameters.read_stored(name, some).widened(), widened[:, size:])
        cut = (slice(0, len(numbers)), slice(8, 40))
        assert parameters.encoding(name, cut) is None
        np.testing.assert_array_equal(parameters.read(name, cut), widened[:, 8:40])
    assert sizes == {
        **dict.fromkeys((Part.QUERY, Part.KEY, Part.VALUE, Part.GATE, Part.UP), 32),
        Part.DOWN: 64,
        Part.OUTPUT: sizes[Part.OUTPUT],
    }


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.FP8_CHANNEL)
    config = EngineConfig(model_path=str(tmp_path), quantization=WeightQuantization.INT8)
    with pytest.raises(ConfigError, match=r"quantization int8: .* is quantised already: remove the option"):
        quantization_of(config, open_checkpoint(str(tmp_path)))


def test_products_of_bfloat16_are_rounded_once_or_twice(tmp_path: Path) -> None:
    """Weights are not: both backends compute with the values, which bfloat16 has exactly."""
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.INT8_W8A16)
    exact = PagedModel(tmp_path).run(prompts(), STEPS)
    largest = max(np.abs(logits).max() for logits in exact)
    for model in (PagedModel(tmp_path, dtype="bfloat16"), TorchPagedModel(tmp_path, dtype=torch.bfloat16)):
        for logits, wanted in zip(model.run(prompts(), STEPS), exact, strict=True):
            assert np.abs(np.asarray(logits, np.float32) - wanted).max() < 0.03 * largest


def test_numbers_that_are_not_finite_are_not_quantised(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3")
    tensors = tensors_of(tmp_path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    write_tensors(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: numbers that are not finite"):
        PagedModel(tmp_path, quantization=Quantization(INT8_ROWS))


def test_random_weights_are_stored_like_those_of_the_folder(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3_moe", Quantised.FP8_CHANNEL)
    stored, random = (
        open_checkpoint(str(tmp_path), load_format) for load_format in (LoadFormat.AUTO, LoadFormat.DUMMY)
    )
    encodings = [kept_encodings(each.config, encodings_of(each, None)) for each in (stored, random)]
    assert encodings[0] == encodings[1]
    model = build_model(
        random.config,
        dtype=jnp.dtype(jnp.float32),
        attention=AttentionImplementation.XLA,
        encodings=encodings[1].get,
    )
    load_weights(model, random.reader, random.config, make_mesh(jax.devices()[:1]))
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("backend", [PagedModel, TorchPagedModel])
def test_embeddings_are_widened_and_so_is_a_head_tied_to_them(backend: Any, tmp_path: Path) -> None:
    """Whatever the folder says about a head that it does not have."""
    make_tiny_checkpoint(tmp_path / "quantised", "qwen3", tie_word_embeddings=True)
    weights = quantise(tmp_path / "quantised", [scheme_of(Quantised.FP8_CHANNEL, "Linear", "Embedding")])
    plain = write_plain_twin(tmp_path / "quantised", weights, tmp_path / "plain")
    found, expected = (backend(folder).run(prompts(), STEPS) for folder in (tmp_path / "quantised", plain))
    assert_alike(found, expected)


def test_the_reported_type_is_that_of_the_loaded_matrices(tmp_path: Path) -> None:
    """Not of the stored ones: matrices that a layer joins with others of another type are widened."""
    make_tiny_checkpoint(tmp_path, "qwen3")
    schemes = [scheme_of(Quantised.FP8_CHANNEL, r"re:.*(q|up)_proj$"), scheme_of(Quantised.INT8_W8A8, "Linear")]
    quantise(tmp_path, schemes, ("lm_head",))
    models = PagedModel(tmp_path), TorchPagedModel(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    jax_model = build_model(
        checkpoint.config,
        dtype=jnp.dtype(jnp.float32),
        attention=AttentionImplementation.XLA,
        encodings=encodings_of(checkpoint, None),
    )
    kept = parameters.matrices_as_stored(jax_model)
    assert kept == torch_weights.matrices_as_stored(models[1].model, checkpoint.config)
    assert {name.part for name in kept} == {Part.OUTPUT, Part.DOWN}
    assert describe_matrices(checkpoint.config, kept) == "4 of 15 matrices in int8"
    assert describe_matrices(checkpoint.config, {}) is None


def test_matrices_in_blocks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their types, and with the head where it is the table of embeddings. No kernel is compiled for this."""
    monkeypatch.setattr(BlockProducts, "work", lambda *_, **__: True)
    form = UNITS[best_unit()].form
    file = make_mixed_gguf(tmp_path, tied=True)
    checkpoint = open_checkpoint(str(file))
    jax_model = build_model(
        checkpoint.config,
        dtype=jnp.dtype(jnp.bfloat16),
        attention=AttentionImplementation.XLA,
        encodings=encodings_of(checkpoint, None),
        block_products=lambda encoding: BlockProduct(encoding, "none", 1, 64, form),
    )
    torch_model = TorchPagedModel(file, dtype=torch.bfloat16, load=False, block_matrices=integer_products()).model
    for kept in (
        parameters.matrices_as_stored(jax_model),
        torch_weights.matrices_as_stored(torch_model, checkpoint.config),
    ):
        assert describe_matrices(checkpoint.config, kept) == "15 of 15 matrices in Q4_K, Q5_K and Q6_K"


@pytest.mark.parametrize("arrange", ["put_in_matrices", "put_outputs_first"])
def test_scales_follow_the_layout_of_their_matrices(arrange: str) -> None:
    config = small_config(num_layers=1, attention_bias=True)
    reader, quantization = DummyReader(config, seed=0), Quantization(INT8_ROWS)
    model = build_model(
        config,
        dtype=jnp.dtype(jnp.float32),
        attention=AttentionImplementation.XLA,
        encodings=ParameterReader(reader, config, quantization).encoding,
    )
    load_weights(model, reader, config, make_mesh(jax.devices()[:1]), quantization)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, config.hidden_size)), jnp.float32)
    layer = model.layers[0]

    def products() -> list[jax.Array]:
        fused, gate_up = layer.attention.qkv(hidden), layer.feed_forward.gate_up(hidden)
        return [fused, gate_up, layer.feed_forward.down(gate_up[:, 0])]

    before = products()
    getattr(model, arrange)()
    for found, expected in zip(products(), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("backend", "load"), [("jax", load_on_jax), ("torch", load_on_torch)])
def test_a_runner_quantises_as_requested_and_reports_it(
    backend: str, load: Callable[..., Runner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its draft model stays as it is stored, in weights and in the type of its keys and values."""
    make_tiny_checkpoint(tmp_path, "qwen3")
    checkpoint = open_checkpoint(str(tmp_path))
    common = {
        "model_path": str(tmp_path),
        "dtype": "float32",
        "speculative_algorithm": "draft",
        "speculative_draft_model_path": str(tmp_path),
        "max_total_tokens": 64,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
        "skip_warmup": True,
    }
    reports = []
    int8 = {"quantization": "int8"}
    for changes in ({}, int8 | {"kv_cache_dtype": "int8"}, int8 | {"cpu_activations": "int8"}):
        with caplog.at_level(logging.INFO):
            runner = load(EngineConfig.model_validate(common | changes), checkpoint)
        reports.append(runner.report())
        runner.close()
    plain, quantised, rounds = reports
    assert "weights" not in plain.details
    assert quantised.details["weights"] == rounds.details["weights"] == "14 of 15 matrices in int8"
    assert sum("14 of 15 matrices in int8" in message for message in caplog.messages) == 2
    quantization, layers = Quantization(INT8_ROWS), checkpoint.config.kv_attention
    shapes = [spec.shape for spec in manifest_of(checkpoint.config).specs.values() if quantization.of(spec)]
    saved = sum(3 * rows * columns - 4 * rows for rows, columns in shapes)
    # JAX has one scale for the keys of each kv head, and one for its values; Torch has one for each token.
    of_heads = sum(2 * 4 * attention.num_kv_heads for attention in layers) if backend == "jax" else 0
    assert plain.weight_bytes - quantised.weight_bytes == saved - of_heads
    head_dim, of_token = layers[0].head_dim, 4 if backend == "torch" else 0
    each = plain.kv_bytes // (2 * 4 * head_dim)
    assert quantised.kv_bytes == each * (4 * head_dim + head_dim + of_token)
