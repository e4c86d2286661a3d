"""Calls of products with matrices in blocks from XLA's programs."""

from __future__ import annotations

from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.cpu_kernels.block_layout import EXACT, LARGEST, OUTPUTS, BlockForm
from sglang_jax.cpu_kernels.block_product import FIELDS
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.integer_layout import LevelKind
from sglang_jax.cpu_kernels.language import address_of, integers, long_integers
from sglang_jax.cpu_kernels.work import ELEMENTS_WORTH_SHARING, FIRST_FIELD, ITEMS
from sglang_jax.cpu_kernels.xla_call import (
    address,
    answered,
    arguments,
    begin,
    build_xla_call,
    operand,
    part,
    result,
    run,
)
from sglang_jax.cpu_kernels.xla_call import size as size_of


def build_product_call(
    compiler: KernelCompiler, name: str, kernel: CompiledKernel, kind: LevelKind, form: BlockForm = EXACT
) -> CompiledKernel:
    """See `build_xla_call`, for a product without gate of a form and a kind of values. Operands: `x [rows, inputs]`,
    quantised values and scales of a stack of matrices, and the number of one of these, int32 `[]`. Results: the
    kernel's output, `[rows, outputs]`, and scratch `[threads, floats]` (see `block_layout`)."""
    fields, size, tiles_of_item = len(FIELDS), form.outputs, form.tiles
    levels_read = 16 // OUTPUTS if kind.bits == 4 else 1
    """Weights per element of the quantised values."""
    exact = form is EXACT
    level_bytes = OUTPUTS * BLOCK * kind.bits // 8 if exact else kind.level_bytes(size)
    scale_bytes = 2 * OUTPUTS * (2 if kind.bits == 4 else 1) if exact else kind.scale_bytes(size)
    with_scales = 1 if exact else kind.blocks_with_scales

    def handle(frame):
        call = long_integers(frame)
        if answered(call):
            return 0
        shared = begin(fields)
        words = arguments(shared)
        threads = _fill(words, call, size, tiles_of_item, levels_read)
        blocks, tiles = size_of(operand(call, 0), 1) // BLOCK, size_of(result(call, 0), 1) // size
        # The tiles of the matrices in front.
        skipped = integers(address(operand(call, 3)))[0] * tiles
        words[FIRST_FIELD + 1] += skipped * blocks * level_bytes
        words[FIRST_FIELD + 2] += skipped * (blocks // with_scales if with_scales else 1) * scale_bytes
        return run(call, shared, threads, address_of(name))

    return build_xla_call(compiler, name, kernel, handle)


@part
def _fill(words, call, size, tiles_of_item, levels_read):
    x, output, scratch = operand(call, 0), result(call, 0), result(call, 1)
    rows, inputs, outputs, slots = size_of(x, 0), size_of(x, 1), size_of(output, 1), size_of(scratch, 0)
    outputs_of_item = size * tiles_of_item
    items = (outputs + outputs_of_item - 1) // outputs_of_item * ((rows + LARGEST - 1) // LARGEST)
    words[ITEMS] = items
    words[FIRST_FIELD] = address(x)
    words[FIRST_FIELD + 1] = address(operand(call, 1))
    words[FIRST_FIELD + 2] = address(operand(call, 2))
    words[FIRST_FIELD + 4] = address(output)
    words[FIRST_FIELD + 5] = address(scratch)
    words[FIRST_FIELD + 6] = slots
    words[FIRST_FIELD + 7] = rows
    words[FIRST_FIELD + 8] = outputs
    words[FIRST_FIELD + 9] = inputs
    words[FIRST_FIELD + 11] = outputs
    return min(slots, items) if rows * outputs * inputs // levels_read >= ELEMENTS_WORTH_SHARING else 1
