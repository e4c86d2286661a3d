"""The program that XLA makes of a step: caches and weights are used in place, and never copied."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.small_configs import small_config

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.config import EngineConfig
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner.attention_kernels import cpu_attention
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.kernels.ragged_paged_attention.cpu import no_cpu_attention
from sglang_jax.layers.batch import ForwardBatch, GroupPages
from sglang_jax.layers.parameter import matmul, matmul_outputs_first
from sglang_jax.layers.part import LayerMemory, LayerStep
from sglang_jax.layers.platform import PlatformLayout
from sglang_jax.layers.sharding import MESH_AXIS, make_mesh, parallelism_of
from sglang_jax.models import AttentionImplementation, KVCaches, allocate, build_model, bytes_of_groups, kv_cache_spec
from sglang_jax.models.decoder_layer import DecoderLayer
from sglang_jax.runner import this_machine

MIB = 2**20
PAGE_SIZE = 16
NUM_PAGES = 2048

FORM: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_layers": 3,
    "num_heads": 8,
    "head_dim": 64,
    "max_position": 8192,
}
CONFIG = small_config(**FORM)


def batch_shapes(tokens: int, rows: int) -> ForwardBatch:
    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return ForwardBatch(
        tokens=int32(tokens),
        positions=int32(tokens),
        write_slots=int32(tokens),
        page_table=int32(rows, 512),
        kv_lens=int32(rows),
        query_starts=int32(rows + 1),
        num_decode=int32(),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize(("tokens", "rows"), [(2, 2), (8, 8), (64, 8)])
def test_neither_caches_nor_weights_are_copied(dtype: str, outputs_first: bool, tokens: int, rows: int) -> None:
    model = build_model(CONFIG, dtype=jnp.dtype(dtype), attention=AttentionImplementation.XLA, platform="cpu")
    load_weights(model, DummyReader(CONFIG, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
    if outputs_first:
        model.put_outputs_first()
    graph, state = nnx.split(model)
    spec = kv_cache_spec(CONFIG, jnp.dtype(dtype), NUM_PAGES, PAGE_SIZE, platform="cpu")
    kv_caches = tuple(LayerMemory(jax.ShapeDtypeStruct(shape, spec.storage)) for shape in spec.shapes)

    def step(state: nnx.State, kv_caches: KVCaches, batch: ForwardBatch) -> tuple[jax.Array, KVCaches]:
        model = nnx.merge(graph, state)
        hidden, kv_caches = model(batch, kv_caches)
        return model.logits(hidden[:rows]), kv_caches

    compiled = jax.jit(step, donate_argnums=1).lower(state, kv_caches, batch_shapes(tokens, rows)).compile()
    memory = compiled.memory_analysis()
    one_cache = np.prod(spec.shapes[0]) * spec.storage.itemsize
    largest_weight = CONFIG.vocab_size * CONFIG.hidden_size * jnp.dtype(dtype).itemsize
    assert memory.alias_size_in_bytes == len(spec.shapes) * one_cache
    assert memory.temp_size_in_bytes < 3.5 * MIB < min(one_cache, largest_weight)


def operations_on(shape: tuple[int, ...], text: str) -> Counter[str]:
    """Counts the operations of a program, by name, that read an array of a shape."""
    named = set(re.findall(rf"(%[\w.-]+) = \w+\[{','.join(map(str, shape))}\]", text))
    found = re.findall(r" = [^=]*? ([a-z-]+)\((.*?)\)", text)
    return Counter(name for name, operands in found if named & set(re.findall(r"%[\w.-]+", operands)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "rows"), [(8, 8), (64, 8)])
def test_kernels_read_pages_in_place(dtype: str, tokens: int, rows: int) -> None:
    """Pages are only written by the step, and read by kernels: no operation takes keys or values out of them."""
    kernels = partial(cpu_attention, kv_dtype=jnp.dtype(dtype), cache_folder=EngineConfig().cache_folder())
    build = partial(build_model, CONFIG, dtype=jnp.dtype(dtype), attention=AttentionImplementation.XLA, platform="cpu")
    for attention, copies in ((kernels, False), (no_cpu_attention, True)):
        model = build(cpu_attention=attention)
        load_weights(model, DummyReader(CONFIG, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
        graph, state = nnx.split(model)
        spec = kv_cache_spec(CONFIG, jnp.dtype(dtype), NUM_PAGES, PAGE_SIZE, platform="cpu")
        kv_caches = tuple(LayerMemory(jax.ShapeDtypeStruct(shape, spec.storage)) for shape in spec.shapes)
        step = jax.jit(lambda state, kv, batch, graph=graph: nnx.merge(graph, state)(batch, kv), donate_argnums=1)
        compiled = step.lower(state, kv_caches, batch_shapes(tokens, rows)).compile()
        text = compiled.as_text()
        readers = operations_on(spec.shapes[0], text)
        assert ("gather" in readers) is copies
        assert readers["custom-call"] == (0 if copies else CONFIG.num_layers * (1 if tokens == rows else 2))
        assert not readers.keys() & {"copy", "convert", "slice", "transpose"}
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == len(spec.shapes) * np.prod(spec.shapes[0]) * spec.storage.itemsize


def test_equal_layers_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of two alternating kinds."""
    plain = small_config(num_layers=4, hidden_size=48)
    layers = [
        replace(layer, mixer=replace(layer.mixer, window=8, rope=None)) if number % 2 else layer
        for number, layer in enumerate(plain.layers)
    ]
    config = replace(plain, layers=tuple(layers))
    model = build_model(config, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA, platform="cpu")
    load_weights(model, DummyReader(config, seed=0), config, make_mesh(jax.devices()[:1]))
    traced = []
    run = DecoderLayer.__call__
    monkeypatch.setattr(DecoderLayer, "__call__", lambda layer, *rest: traced.append(layer.config) or run(layer, *rest))
    spec = kv_cache_spec(config, jnp.dtype("float32"), NUM_PAGES, PAGE_SIZE, platform="cpu")
    kv_caches = tuple(LayerMemory(jax.ShapeDtypeStruct(shape, spec.storage)) for shape in spec.shapes)
    graph, state = nnx.split(model)
    batch = batch_shapes(8, 8)
    batch = replace(batch, further=(GroupPages(batch.write_slots, batch.page_table),))
    jax.eval_shape(lambda state, caches, batch: nnx.merge(graph, state)(batch, caches), state, kv_caches, batch)
    assert traced == layers[:2]


def test_the_bytes_of_a_token_equal_those_of_the_caches() -> None:
    for dtype in (jnp.bfloat16, jnp.float32):
        for platform in ("cpu", "tpu"):
            spec = kv_cache_spec(CONFIG, jnp.dtype(dtype), 8, PAGE_SIZE, platform=platform)
            caches = allocate(spec, make_mesh(jax.devices()[:1]))
            pages = bytes_of_groups(CONFIG, jnp.dtype(dtype), PAGE_SIZE)
            assert sum(array.nbytes for array in jax.tree.leaves(caches)) == 8 * sum(pages)


@pytest.mark.parametrize(("platform", "lanes"), [("cpu", 576), ("tpu", 640)])
@pytest.mark.parametrize("devices", [1, 4])
def test_each_device_has_the_latent_vectors_of_all_tokens(platform: str, lanes: int, devices: int) -> None:
    sizes = {"num_heads": 8, "latent": 512, "query_latent": None, "key_dim": 128, "rotary_dim": 64, "value_dim": 128}
    latent = LatentAttentionConfig(**sizes, scale=0.1, rope=None, norm=CONFIG.final_norm)
    config = CONFIG.with_layers(lambda layer: replace(layer, mixer=latent))
    found = bytes_of_groups(config, jnp.dtype("bfloat16"), PAGE_SIZE, platform=platform, devices=devices)
    assert found == (3 * PAGE_SIZE * lanes * 2,)


def test_a_single_bfloat16_row_is_multiplied_like_many() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((64, 2, 24)), jnp.bfloat16)
    expected = np.tensordot(np.asarray(x, np.float64), np.asarray(kernel, np.float64), axes=1)
    for rows in (1, 2, 5):
        product = matmul(x[:rows], kernel)
        assert product.shape == (rows, 2, 24)
        assert product.dtype == jnp.float32
        np.testing.assert_allclose(product, expected[:rows], rtol=1e-5, atol=1e-4)


def test_sines_and_cosines_are_computed_once_a_step() -> None:
    model = build_model(CONFIG, dtype=jnp.dtype("bfloat16"), attention=AttentionImplementation.XLA, platform="cpu")
    load_weights(model, DummyReader(CONFIG, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
    graph, state = nnx.split(model)
    spec = kv_cache_spec(CONFIG, jnp.dtype("bfloat16"), NUM_PAGES, PAGE_SIZE, platform="cpu")
    kv_caches = tuple(LayerMemory(jax.ShapeDtypeStruct(shape, spec.storage)) for shape in spec.shapes)
    step = jax.jit(lambda state, kv, batch: nnx.merge(graph, state)(batch, kv))
    compiled = step.lower(state, kv_caches, batch_shapes(64, 8)).compile().as_text()
    assert (compiled.count(" cosine("), compiled.count(" sine(")) == (1, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 32, 33, 70])
@pytest.mark.parametrize("of_outputs", [False, True])
def test_products_with_outputs_first_give_the_same_numbers(dtype: str, rows: int, of_outputs: bool) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 3, 32)), dtype)
    kernel = jnp.asarray(rng.standard_normal((2, 24, 3, 32)), dtype)
    expected = np.einsum("tij,abij->tab", np.asarray(x, np.float64), np.asarray(kernel, np.float64))
    product = jax.jit(partial(matmul_outputs_first, of_outputs=of_outputs))(x, kernel)
    assert product.dtype == jnp.float32
    np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 32])
def test_weights_are_the_left_operand_for_few_rows(rows: int) -> None:
    """The operand that XLA's CPU backend reads without a copy; a simplification of the program must not swap them."""
    shapes = jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16), jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
    compiled = jax.jit(matmul_outputs_first).lower(*shapes).compile().as_text()
    assert f"f32[256,{rows}]" in compiled
    assert "bf16[64,256]" not in compiled


def test_few_rows_are_not_transposed_within_a_feed_forward_layer() -> None:
    model = build_model(CONFIG, dtype=jnp.dtype("bfloat16"), attention=AttentionImplementation.XLA, platform="cpu")
    load_weights(model, DummyReader(CONFIG, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
    model.put_outputs_first()
    layer = model.layers[0].feed_forward
    step, memory = LayerStep(batch_shapes(32, 32)), LayerMemory()
    lowered = jax.jit(lambda x: layer(x, step, memory)[0]).lower(jnp.zeros((32, CONFIG.hidden_size)))
    compiled = lowered.compile().as_text()
    assert "-> bf16[1024,32] {" in compiled
    assert "-> bf16[32,1024] {" not in compiled


def test_matrices_with_outputs_first_equal_the_checkpoints_and_give_the_same_numbers() -> None:
    for tied in (True, False):
        config = small_config(**FORM | {"tie_word_embeddings": tied, "attention_bias": True, "num_layers": 1})
        model = build_model(config, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA, platform="cpu")
        reader = DummyReader(config, seed=0)
        load_weights(model, reader, config, make_mesh(jax.devices()[:1]))
        hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, config.hidden_size)), jnp.float32)
        projected, logits = model.layers[0].attention.qkv(hidden), model.logits(hidden)
        model.put_outputs_first()
        np.testing.assert_allclose(model.layers[0].attention.qkv(hidden), projected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(model.logits(hidden), logits, rtol=1e-5, atol=1e-5)
        down = model.layers[0].feed_forward.down.matrix.kernel
        np.testing.assert_array_equal(down.get_value(), reader.read("model.layers.0.mlp.down_proj.weight", ()))
        assert [str(axis) for axis in down.axes] == ["hidden", "intermediate"]
        assert model.has_own_head is not tied


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_of_embeddings_has_whole_tiles_on_tpus(tied: bool) -> None:
    """Rows are the same. One that is the head stays as it is, and so does each on other platforms."""
    config = small_config(**FORM | {"tie_word_embeddings": tied, "num_layers": 1, "hidden_size": 160})
    tokens = jnp.array([3, 0, config.vocab_size - 1])
    for platform, width in (("tpu", 160 if tied else 256), ("gpu", 160)):
        model = build_model(
            config, dtype=jnp.dtype("bfloat16"), attention=AttentionImplementation.XLA, platform=platform
        )
        shapes = nnx.clone(model)
        shapes.repack()
        load_weights(model, DummyReader(config, seed=0), config, make_mesh(jax.devices()[:1]))
        expected = model.embedding(tokens)
        model.repack()
        assert model.embedding.table.shape == shapes.embedding.table.shape == (config.vocab_size, width)
        assert np.array_equal(model.embedding(tokens), expected)


def test_repacked_matrices_hold_the_same_numbers() -> None:
    config = small_config(**FORM | {"attention_bias": True, "num_layers": 1})
    model = build_model(config, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA, platform="cpu")
    load_weights(model, DummyReader(config, seed=0), config, make_mesh(jax.devices()[:1]))
    layer = model.layers[0]

    def feed_forward(x: jax.Array) -> jax.Array:
        return layer.feed_forward(x, LayerStep(batch_shapes(3, 3)), LayerMemory())[0]

    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((3, config.hidden_size)), jnp.float32)
    projected, fed = layer.attention.qkv(hidden), feed_forward(hidden)
    attended = layer.attention.output(projected[:, :, 0].repeat(8 // projected.shape[1], axis=1))
    model.put_in_matrices()
    np.testing.assert_allclose(layer.attention.qkv(hidden), projected, rtol=1e-5, atol=1e-5)
    heads = projected[:, :, 0].repeat(8 // projected.shape[1], axis=1)
    np.testing.assert_allclose(layer.attention.output(heads), attended, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(feed_forward(hidden), fed, rtol=1e-5, atol=1e-5)
    kernels = {
        "qkv": layer.attention.qkv.matrix.kernel,
        "output": layer.attention.output.matrix.kernel,
        "gate_up": layer.feed_forward.gate_up.matrix.kernel,
        "down": layer.feed_forward.down.matrix.kernel,
    }
    axes = {name: [str(axis) for axis in kernel.axes] for name, kernel in kernels.items()}
    assert axes == {
        "qkv": ["hidden", "kv_heads"],
        "output": ["heads", "hidden"],
        "gate_up": ["gate_or_up", "hidden", "intermediate"],
        "down": ["intermediate", "hidden"],
    }
    assert all(len(kernel.axes) == kernel.get_value().ndim for kernel in kernels.values())


def test_a_bfloat16_model_rounds_only_where_products_and_the_cache_do() -> None:
    """Compared with a model of the same weights that computes in float32, hidden states are closer than with a rounding
    after each operation."""

    def hidden_states(dtype: str, *, wide: bool) -> np.ndarray:
        model = build_model(CONFIG, dtype=jnp.dtype(dtype), attention=AttentionImplementation.XLA, platform="cpu")
        assert model.form.wide_activations
        model.form = replace(model.form, wide_activations=wide)
        load_weights(model, DummyReader(CONFIG, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), nnx.state(model)))
        kv_caches = allocate(kv_cache_spec(CONFIG, jnp.dtype(dtype), 8, PAGE_SIZE, platform="cpu"), mesh)
        hidden, _ = jax.jit(lambda batch, kv: model(batch, kv))(batch, kv_caches)
        assert hidden.dtype == (jnp.float32 if wide else jnp.dtype(dtype))
        return np.asarray(hidden, np.float64)

    mesh = make_mesh(jax.devices()[:1])
    places = jnp.arange(32, dtype=jnp.int32)
    batch = ForwardBatch(
        tokens=places * 7 + 3,
        positions=places,
        write_slots=places + PAGE_SIZE,
        page_table=jnp.array([[1, 2]], jnp.int32),
        kv_lens=jnp.array([32], jnp.int32),
        query_starts=jnp.array([0, 32], jnp.int32),
        num_decode=jnp.int32(0),
    )
    exact = hidden_states("float32", wide=True)
    errors = {wide: np.abs(hidden_states("bfloat16", wide=wide) - exact).mean() for wide in (True, False)}
    assert 0 < errors[True] < 0.8 * errors[False]


@pytest.mark.parametrize(("features", "expected"), [("flags : fpu amx_bf16", True), ("flags : avx512_bf16", False)])
def test_outputs_come_first_only_on_a_cpu_with_tiles(
    features: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(features + "\n")
    monkeypatch.setattr(this_machine, "_CPU_FEATURES", tmp_path / "cpuinfo")
    assert PlatformLayout.of("cpu").outputs_first is expected
    assert not PlatformLayout.of("tpu").outputs_first
    assert not PlatformLayout.of("gpu").outputs_first
    assert not PlatformLayout.of("tpu").wide_activations
    assert [PlatformLayout.of(platform).matrices for platform in ("tpu", "cpu", "gpu")] == [True, False, False]


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        build_model(CONFIG, dtype=jnp.dtype("float16"), attention=AttentionImplementation.XLA)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    model = build_model(CONFIG, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA)
    other = small_config(**FORM | {"num_layers": 2, "intermediate_size": 512})
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, DummyReader(other, seed=0), CONFIG, make_mesh(jax.devices()[:1]))
    assert "missing: model.layers.2.mlp.down_proj.weight (256, 1024)" in str(caught.value)
    assert "misshapen: model.layers.1.mlp.gate_proj.weight is (512, 256)" in str(caught.value)


def test_the_mesh_divides_every_axis_as_the_host_counts() -> None:
    shape = {"data": 1, "tensor": 2, "expert": 4}
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    over = parallelism_of(mesh)
    assert over == Parallelism(8, 4)
    numbers = np.arange(8).reshape(tuple(shape.values()))
    for axis in Axis:
        names = MESH_AXIS[axis]
        assert over.parts(axis) == math.prod(shape[name] for name in names), axis
        for device, place in zip(numbers.flat, np.ndindex(numbers.shape), strict=True):
            of_mesh = [(shape[name], at) for name, at in zip(shape, place, strict=True) if name in names]
            sizes, at = zip(*of_mesh, strict=True) if of_mesh else ((1,), (0,))
            assert over.place(axis, int(device)) == np.ravel_multi_index(at, sizes), axis


def test_meshes() -> None:
    devices = jax.devices()[:1]
    assert make_mesh(devices).shape == {"data": 1, "tensor": 1, "expert": 1}
    with pytest.raises(ValueError, match="1 devices cannot be divided into data 2 x expert 1"):
        make_mesh(devices, data=2)
