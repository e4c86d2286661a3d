"""Products with blocked matrices in programs of XLA's CPU backend: their numbers, and where they are available."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers import gguf_blocks
from helpers.cpu_kernels import block_products, integer_products
from helpers.gguf_blocks import EXACT_KINDS, KINDS

from sglang_jax.checkpoint.encoding import BLOCKS, Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import WITH_EXACT_ACTIVATIONS, BlockType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.grouped_experts import MXFP4
from sglang_jax.checkpoint.quantization import INT8_ROWS
from sglang_jax.config import EngineConfig
from sglang_jax.cpu_kernels import compiling, vectors, xla_call
from sglang_jax.cpu_kernels.block_layout import EXACT, LARGEST, pack, random_blocks
from sglang_jax.cpu_kernels.byte_units import UNITS
from sglang_jax.cpu_kernels.integer_layout import LevelKind
from sglang_jax.cpu_kernels.language import add, floats, store, take
from sglang_jax.cpu_kernels.work import FIRST_FIELD, ITEM_COUNTER, ITEMS, SLOT_COUNTER
from sglang_jax.cpu_kernels.xla_product import build_product_call
from sglang_jax.jax_runner import block_kernels
from sglang_jax.jax_runner.block_kernels import block_product, missing_for_blocks
from sglang_jax.jax_runner.xla_targets import register
from sglang_jax.layers.block_matrix import BlockProduct
from sglang_jax.runner.this_machine import cpu_cores

NVFP4 = Encoding(GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32))
Q4, Q8 = BLOCKS[BlockType.Q4_0], BLOCKS[BlockType.Q8_0]
needs_units = pytest.mark.skipif(not vectors.supported(), reason="kernels need a processor with avx512_bf16")
UNITS_HERE = [(number, dtype) for number, dtype in ((0, "bfloat16"), (2, "float32")) if UNITS[number].found()]
every_unit = pytest.mark.parametrize(
    ("unit", "dtype"),
    [pytest.param(None, "bfloat16", marks=needs_units), *(UNITS_HERE or [(3, "float32")])],
)

MAX_ROWS = 16
Product = Callable[[np.ndarray], np.ndarray]


def product_with(blocks: Stored, unit: int | None = None, dtype: str = "bfloat16") -> Product:
    """A separate program for each number of rows, as in a runner."""
    kernel = block_product(blocks.encoding, EngineConfig().cache_folder(), unit, dtype)
    assert kernel is not None
    packed = kernel.form.pack(blocks)
    run = jax.jit(kernel.multiply)
    levels, scales = jnp.asarray(packed.levels), jnp.asarray(packed.scales)
    return lambda x: np.asarray(run(jnp.asarray(x), levels, scales))


def rows_of(count: int, inputs: int, dtype: str = "bfloat16") -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, inputs)).astype(jnp.dtype(dtype))


@every_unit
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[4], *KINDS[-2:]], ids=lambda kind: kind.name)
def test_products(kind: GGMLQuantizationType, unit: int | None, dtype: str, tmp_path: Path) -> None:
    """Against float64: sums in float32 of the weights of the matrix widened to bfloat16, or of rows rounded to int8 and
    the weights as stored. With one thread, and shared by several."""
    if unit is None and BlockType[kind.name] not in WITH_EXACT_ACTIVATIONS:
        assert block_product(BLOCKS[BlockType[kind.name]], EngineConfig().cache_folder(), unit, dtype) is None
        return
    for outputs in (112, 2048):
        blocks, weight = gguf_blocks.blocks_of(kind, outputs, 160, tmp_path)
        if unit is not None:
            weight = blocks.widened()
        form = EXACT if unit is None else UNITS[unit].form
        multiply = product_with(blocks, unit, dtype)
        for rows in (1, 2, 5, MAX_ROWS):
            x = rows_of(rows, blocks.shape[1], dtype)
            exact = form.rounded(x.astype(np.float32)).astype(np.float64) @ weight.astype(np.float64).T
            found = multiply(x)
            assert found.dtype == np.float32
            assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()


@every_unit
@pytest.mark.parametrize("kind", EXACT_KINDS, ids=lambda kind: kind.name)
def test_a_product_is_batch_invariant_and_equals_torch_s(
    kind: GGMLQuantizationType, unit: int | None, dtype: str, tmp_path: Path
) -> None:
    """Bit for bit: by itself, among few rows that are multiplied directly, among many whose weights are widened first.
    The Torch backend's is the same, rounded."""
    blocks, _ = gguf_blocks.blocks_of(kind, 2048, 160, tmp_path)
    multiply = product_with(blocks, unit, dtype)
    x = rows_of(LARGEST + 6, 160, dtype)  # more than an item takes
    together = multiply(x)
    for first, last in ((0, 1), (15, 16), (5, 7), (4, 8), (3, 8), (1, 9), (LARGEST + 1, LARGEST + 6)):
        np.testing.assert_array_equal(multiply(x[first:last]), together[first:last])
    of_torch = torch.float32 if dtype == "float32" else torch.bfloat16
    products = block_products() if unit is None else integer_products(unit, of_torch)
    other = products.matrix(blocks, None).multiply(torch.from_numpy(x.astype(np.float32)).to(of_torch))
    np.testing.assert_array_equal(other.float().numpy(), together.astype(jnp.dtype(dtype)).astype(np.float32))


@pytest.mark.parametrize(
    "encoding", [BLOCKS[BlockType.Q4_K], BLOCKS[BlockType.Q6_K], Q8, INT8_ROWS, Encoding(MXFP4), NVFP4]
)
def test_one_of_several_matrices_has_the_product_of_all(encoding: Encoding) -> None:
    """Bit for bit, in its columns, wherever scales are for some blocks together, or for a row."""
    unit, dtype = (UNITS_HERE or [(3, "float32")])[0]
    kernel = block_product(encoding, EngineConfig().cache_folder(), unit, dtype)
    assert kernel is not None
    outputs = 2 * kernel.form.outputs
    sizes = [(outputs, 512), (outputs + 1, 512), (outputs, 512 + 16)]
    assert [kernel.serves_stacks(*each) for each in sizes] == [True, False, False]  # whole tiles and blocks
    blocks = random_blocks(encoding, 3 * outputs, 512)
    packed, x = kernel.form.pack(blocks), jnp.asarray(rows_of(3, 512, dtype))
    levels, scales = jnp.asarray(packed.levels), jnp.asarray(packed.scales)
    multiply = jax.jit(kernel.multiply_one, static_argnums=4)
    found = [multiply(x, levels, scales, jnp.int32(number), outputs) for number in range(3)]
    np.testing.assert_array_equal(np.concatenate(found, axis=1), jax.jit(kernel.multiply)(x, levels, scales))


@needs_units
def test_nan_and_infinity_are_preserved() -> None:
    multiply = product_with(random_blocks(Q4, 8, 64))
    x = np.ones((6, 64), jnp.bfloat16)
    x[1, 3], x[4, 60] = np.nan, np.inf
    found = multiply(x)
    assert np.isnan(found[1]).all()
    assert not np.isfinite(found[4]).any()
    assert np.isfinite(found[[0, 2, 3, 5]]).all()


@needs_units
def test_concurrent_products_do_not_disturb_each_other() -> None:
    """Concurrent programs, each with products that XLA may compute at the same time, on threads that all share."""
    kernel = block_product(Q8, EngineConfig().cache_folder())
    assert kernel is not None
    packed = pack(random_blocks(Q8, 1024, 128))
    levels, scales = jnp.asarray(packed.levels), jnp.asarray(packed.scales)

    @jax.jit
    def many(x: jax.Array) -> jax.Array:
        return jnp.stack([kernel.multiply(x[first : first + 2], levels, scales) for first in range(0, 32, 2)])

    @jax.jit
    def one(x: jax.Array) -> jax.Array:
        return kernel.multiply(x, levels, scales)

    inputs = [jnp.asarray(rows_of(32, 128) * jnp.bfloat16(scale)) for scale in range(1, 5)]
    expected = [np.concatenate([np.asarray(one(x[first : first + 2])) for first in range(0, 32, 2)]) for x in inputs]
    for _ in range(20):
        for found, wanted in zip([many(x) for x in inputs], expected, strict=True):
            np.testing.assert_array_equal(np.asarray(found).reshape(32, -1), wanted)


def test_xla_s_threads_share_the_work_and_all_finish() -> None:
    """The kernel writes which thread did an item. The first thread waits until a second one has an item too, and that
    one is slow."""

    def write_slots(work):
        slot = take(work, SLOT_COUNTER)
        output = floats(work[FIRST_FIELD + 4])
        while True:
            item = take(work, ITEM_COUNTER)
            if item >= work[ITEMS]:
                return
            spins = 0
            while (slot == 1 or add(work, ITEM_COUNTER, 0) < 2) and spins < (1_000_000 if slot == 1 else 1_000_000_000):
                spins += add(work, ITEM_COUNTER, 0) * 0 + 1
            for at in range(item * 32, item * 32 + 32):
                store(output, at, np.float32(slot + 1))

    compiler, target = compiling.KernelCompiler(None), "write_slots"
    function = build_product_call(compiler, target, compiler(write_slots), LevelKind(8))
    register(target, lambda: function)
    kernel = BlockProduct(Q8, target, threads=2, max_rows=1)
    packed = pack(random_blocks(Q8, 1024, 64))
    x, levels, scales = jnp.zeros((1, 64), jnp.bfloat16), jnp.asarray(packed.levels), jnp.asarray(packed.scales)
    run = jax.jit(kernel.multiply)
    kept = []  # so that no result reuses the memory of one before
    for _ in range(6):  # either thread may be the first
        kept.append(run(x, levels, scales))
        found = set(np.array(kept[-1]).flat)  # copied at once, so that later writes are missing
        assert found in ([{1, 2}] if len(cpu_cores()) > 1 else [{1}, {1, 2}])


@pytest.fixture
def unloaded_kernels(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a process that has no kernels yet."""
    monkeypatch.setattr(compiling, "version_of_kernels", lambda: f"test{id(monkeypatch)}")
    return monkeypatch


@needs_units
@pytest.mark.parametrize("wrong", [1.02, float("nan")], ids=["value", "NaN"])
def test_kernels_with_wrong_products_are_not_used(
    wrong: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = BlockProduct.multiply
    monkeypatch.setattr(BlockProduct, "multiply", lambda *arguments: right(*arguments) * wrong)
    with caplog.at_level(logging.WARNING, logger="sglang_jax"):
        assert block_product.__wrapped__(Q4, EngineConfig().cache_folder()) is None
    (message,) = caplog.messages
    assert message.endswith("wrong results on this machine")


@needs_units
def test_kernels_are_not_used_with_a_jaxlib_with_other_offsets(
    unloaded_kernels: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """XLA requests the version of the header before it calls."""
    unloaded_kernels.setattr(xla_call, "VERSION", (xla_call.VERSION[0] + 1, 0))
    with caplog.at_level(logging.WARNING, logger="sglang_jax"):
        assert block_product.__wrapped__(Q4, None) is None
    (message,) = caplog.messages
    assert message.startswith("Q4_0 matrices are dequantised: XLA cannot call their kernel (")
    assert "version" in message


def test_unsupported_uses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = jax.devices("cpu")[0]
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)

    class Tpu:
        platform = "tpu"

    def missing(device: Any, dtype: jnp.dtype, tp_size: int = 1, *, rounded: bool = False) -> str:
        found = missing_for_blocks(device, dtype, tp_size, rounded=rounded)
        assert found is not None
        return found

    assert missing(Tpu(), bfloat16) == "a CPU, the device is a tpu: choose --device cpu"
    assert missing(cpu, bfloat16, 2, rounded=True) == "tp_size 1, got tp_size 2"
    assert missing(cpu, float32) == "--dtype bfloat16 or --cpu-activations int8, got float32"
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", "+avx2")
    assert missing_for_blocks(cpu, float32, 1, rounded=True) is None
    assert missing(cpu, bfloat16).startswith("a CPU with avx512_bf16, which this one has not")
    monkeypatch.setattr(block_kernels, "find_spec", lambda name: None)
    assert re.match(r"numba, .*pip install -e '\.\[jax,cpu\]'", missing(cpu, bfloat16, rounded=True))
