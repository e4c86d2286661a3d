"""Compiles products with matrices in blocks, registers them with XLA's CPU backend, and compares their results."""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.cpu_kernels.block_layout import EXACT, BlockForm, PackedBlocks, random_blocks
from sglang_jax.cpu_kernels.integer_layout import kind_of
from sglang_jax.errors import how_to_install
from sglang_jax.jax_runner.xla_targets import register
from sglang_jax.layers.block_matrix import BlockProduct
from sglang_jax.runner.this_machine import cpu_cores, cpu_multiplies_bfloat16_tiles

logger = logging.getLogger(__name__)

_MAX_ROWS, _MAX_ROWS_WITH_TILES = 32, 4
"""Maximum rows of a step that uses blocks, and the same on CPUs with bfloat16 tiles (AMX). All products of SmolLM2-135M
take 11 ms of processor time instead of 38 at one row, 25 instead of 46 at 8, 41 instead of 60 at 16 and 69 instead of
90 at 32 (Zen 4, busy). With AMX, bfloat16 products take a third of that time; blocks were not measured there."""

_ROWS_TRIED = (1, 3, 11)


def missing_for_blocks(device: jax.Device, dtype: jnp.dtype, tp_size: int, *, rounded: bool) -> str | None:
    """What products with blocks need and do not have; None if nothing. `rounded`: activations are rounded to int8."""
    if device.platform != "cpu":
        return f"a CPU, the device is a {device.platform}: choose --device cpu"
    if tp_size > 1:
        return f"tp_size 1, got tp_size {tp_size}"
    if find_spec("numba") is None:
        return f"numba, which is not installed: {how_to_install('jax', 'cpu')}"
    if rounded:
        return None
    if dtype != jnp.bfloat16:
        return f"--dtype bfloat16 or --cpu-activations int8, got {dtype.name}"
    from sglang_jax.cpu_kernels import vectors  # imported here, since only blocks need numba

    if not vectors.supported():
        return "a CPU with avx512_bf16, which this one has not, or --cpu-activations int8"
    return None


def max_rows() -> int:
    """Maximum rows of a step that uses blocks on this CPU. Unlike on Torch, it is not measured at each start: programs
    are built before weights are loaded, and must be found again in the compilation cache."""
    return _MAX_ROWS_WITH_TILES if cpu_multiplies_bfloat16_tiles() else _MAX_ROWS


@functools.cache
def block_product(
    encoding: Encoding, cache_folder: Path | None, unit: int | None = None, dtype: str = "bfloat16"
) -> BlockProduct | None:
    """The product with matrices of an encoding, compiled, or loaded from `cache_folder` if given. None, with a log
    line, if it cannot be compiled, if this jaxlib does not accept it, or if its results are wrong.

    `unit`: an index of `byte_units.UNITS`, whose instructions multiply rows rounded to int8; None: rows of bfloat16 are
    multiplied as they are. `dtype`: of rows, bfloat16 or float32."""
    from numba.core.errors import NumbaError

    from sglang_jax.cpu_kernels.byte_units import UNITS

    form = EXACT if unit is None else UNITS[unit].form
    if not form.serves(encoding.values):
        return None
    try:
        target, form = _register(encoding, cache_folder, unit, jnp.dtype(dtype).itemsize)
        product = BlockProduct(encoding, target, len(cpu_cores()), max_rows(), form)
        wrong = _largest_error(product, dtype)
    except (NumbaError, OSError, RuntimeError) as error:  # LLVM and XLA raise RuntimeError
        name = encoding.values.value
        logger.warning("%s matrices are dequantised: XLA cannot call their kernel (%s)", name, error)
        return None
    if not wrong <= 1e-4:
        logger.warning(
            "%s matrices are dequantised: the kernel of their product computes wrong results on this machine",
            encoding.values.value,
        )
        return None
    return product


def unit_for_rounded() -> int:
    """The instructions of this processor for rows rounded to int8 (see `block_product`); the log names them."""
    from sglang_jax.cpu_kernels.byte_units import UNITS, best_unit  # imported here, since only blocks need numba

    unit = best_unit()
    logger.info("Matrices in blocks multiply activations rounded to int8, with %s", UNITS[unit].name)
    return unit


def _register(encoding: Encoding, cache_folder: Path | None, unit: int | None, width: int) -> tuple[str, BlockForm]:
    """Registers a kernel, for rows with `width` bytes per value, with XLA. Returns its name, which contains the version
    of the kernels, since programs in JAX's compilation cache call it by that name, and its form."""
    from sglang_jax.cpu_kernels.block_product import build_block_product
    from sglang_jax.cpu_kernels.byte_units import UNITS
    from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler, version_of_kernels
    from sglang_jax.cpu_kernels.integer_product import build_integer_product
    from sglang_jax.cpu_kernels.xla_product import build_product_call

    form = EXACT if unit is None else UNITS[unit].form
    kind, stored = kind_of(encoding.values), encoding.values.value.replace(" ", "_")
    name = f"block_product_{unit}_{form.name}_{stored}_{width}_{version_of_kernels()}"

    def build() -> CompiledKernel:
        compiler = KernelCompiler(None) if cache_folder is None else KernelCompiler.keeping(cache_folder)
        if unit is None:
            kernel = build_block_product(compiler, kind.bits, gated=False, width=4)
        else:
            kernel = build_integer_product(compiler, unit, kind, gated=False, width=width, output_width=4)
        return build_product_call(compiler, name, kernel, kind, form)

    register(name, build)
    return name, form


def _largest_error(product: BlockProduct, dtype: str) -> float:
    """The largest error of products with a small matrix, against float64, relative to the largest result."""
    blocks = random_blocks(product.encoding, outputs=256, inputs=160)
    # Integers are multiplied without rounding the weights before.
    weights = _rounded(blocks) if product.form is EXACT else blocks.widened().astype(np.float64)
    packed = product.form.pack(blocks)
    errors = []
    for rows in _ROWS_TRIED:
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, blocks.shape[1])), dtype)
        exact = product.form.rounded(np.asarray(x, np.float32)).astype(np.float64) @ weights.T
        errors.append(np.abs(_run(product, x, packed) - exact).max() / np.abs(exact).max())
    return float(np.max(errors))  # NaN if any is


def _rounded(blocks: Stored) -> np.ndarray:
    return np.asarray(blocks.widened().astype(jnp.bfloat16), np.float64)


def _run(product: BlockProduct, x: jax.Array, packed: PackedBlocks) -> np.ndarray:
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.jit(product.multiply)(x, jnp.asarray(packed.levels), jnp.asarray(packed.scales)))
