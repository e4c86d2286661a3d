"""Calls of products with matrices in blocks from XLA's programs."""

from __future__ import annotations

from sglang_jax.cpu_kernels.block_layout import EXACT, LARGEST, OUTPUTS, BlockForm
from sglang_jax.cpu_kernels.block_product import FIELDS
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.language import address_of, long_integers
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
    size,
)


def build_product_call(
    compiler: KernelCompiler, name: str, kernel: CompiledKernel, bits: int, form: BlockForm = EXACT
) -> CompiledKernel:
    """See `build_xla_call`, for a product without gate of a form and values of `bits` bits. Operands: `x [rows,
    inputs]`, quantised values, scales. Results: the kernel's output, `[rows, outputs]`, and scratch `[threads, floats]`
    (see `block_layout`)."""
    fields, outputs_of_item = len(FIELDS), form.outputs * form.tiles
    levels_read = 16 // OUTPUTS if bits == 4 else 1
    """Weights per element of the quantised values."""

    def handle(frame):
        call = long_integers(frame)
        if answered(call):
            return 0
        shared = begin(fields)
        threads = _fill(arguments(shared), call, outputs_of_item, levels_read)
        return run(call, shared, threads, address_of(name))

    return build_xla_call(compiler, name, kernel, handle)


@part
def _fill(words, call, outputs_of_item, levels_read):
    x, output, scratch = operand(call, 0), result(call, 0), result(call, 1)
    rows, inputs, outputs, slots = size(x, 0), size(x, 1), size(output, 1), size(scratch, 0)
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
