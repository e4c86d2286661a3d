"""Calls of attention from XLA's programs, over pages with the values of a head behind its keys: `[pages, kv_heads, 2,
page_size, head_dim]`. Numbers other than sizes are the call's constants, int64: window (or 0), the bits of two float64,
the scale and the soft cap (or 0), and whether prompts are not causal. Latent vectors have pages `[pages, 1, 1,
page_size, width]`."""

from __future__ import annotations

from sglang_jax.cpu_kernels import decode_attention, prompt_attention
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler, name_function
from sglang_jax.cpu_kernels.language import address_of, integers, load, long_integers
from sglang_jax.cpu_kernels.prompt_attention import tokens_of_item
from sglang_jax.cpu_kernels.prompt_tiles import clear_bytes
from sglang_jax.cpu_kernels.work import ELEMENTS_WORTH_SHARING, FIRST_FIELD, ITEMS
from sglang_jax.cpu_kernels.xla_call import (
    address,
    answered,
    arguments,
    begin,
    build_xla_call,
    constants,
    operand,
    part,
    result,
    run,
    size,
)

_KEYS_OF_A_PROMPT = 64
"""A lower bound of what a query of a prompt costs, in keys."""


def build_decode_call(compiler: KernelCompiler, name: str, kernel: CompiledKernel, width: int) -> CompiledKernel:
    """See `build_xla_call`, for decode attention with keys of `width` bytes.

    Operands: queries `[T, heads, head_dim]`, pages, page table `[R, columns]`, lengths `[R]`, sinks `[heads]` or `[0]`,
    and the number of decode rows, the first of all. Results: the output, as queries, and scratch `[threads, floats]`.
    Without other tokens (T is R), rows beyond the decode rows have length 0, and output 0; else the output of other
    tokens is left unset."""
    fields = len(decode_attention.FIELDS)

    def handle(frame):
        call = long_integers(frame)
        if answered(call):
            return 0
        shared = begin(fields)
        threads = _fill_decode(arguments(shared), call, width)
        return run(call, shared, threads, address_of(name))

    return build_xla_call(compiler, name, kernel, handle)


@part
def _fill_decode(words, call, width):
    queries, pages, table, lens = operand(call, 0), operand(call, 1), operand(call, 2), operand(call, 3)
    rows, kv_heads, head_dim = size(lens, 0), size(pages, 1), size(pages, 4)
    if size(queries, 0) > rows:
        rows = load(integers(address(operand(call, 5))), 0)
    scratch = result(call, 1)
    words[ITEMS] = rows * kv_heads
    words[FIRST_FIELD] = address(queries)
    _fill_pages(words, FIRST_FIELD + 1, pages, width)
    words[FIRST_FIELD + 3] = address(result(call, 0))
    words[FIRST_FIELD + 4] = address(table)
    words[FIRST_FIELD + 5] = address(lens)
    words[FIRST_FIELD + 6] = _sinks(operand(call, 4))
    words[FIRST_FIELD + 7] = address(scratch)
    words[FIRST_FIELD + 8] = size(scratch, 0)
    _fill_options(words, FIRST_FIELD + 9, call, table, pages)
    keys = 0
    for row in range(rows):
        keys += load(integers(address(lens)), row)
    return _threads(keys * kv_heads * head_dim, rows * kv_heads, size(scratch, 0))


def build_prompt_call(
    compiler: KernelCompiler, name: str, kernel: CompiledKernel, width: int, group: int
) -> CompiledKernel:
    """See `build_xla_call`, for attention of prompts with keys of `width` bytes and `group` query heads to a kv head.

    Operands: the output for decode rows, and those of decode attention, with the starts of sequences `[R + 1]` between
    lengths and sinks. Results: the output in the memory of the first operand, in which the other tokens are added, and
    0 for padding; scratch `[threads, floats]`; and memory for items, int32 `[items, 4]`."""
    fields, tokens = len(prompt_attention.FIELDS), tokens_of_item(group)

    def handle(frame):
        call = long_integers(frame)
        if answered(call):
            return 0
        shared = begin(fields)
        threads = _fill_prompts(arguments(shared), call, width, tokens)
        return run(call, shared, threads, address_of(name))

    return build_xla_call(compiler, name, kernel, handle)


@part
def _fill_prompts(words, call, width, tokens):
    queries, pages, table, lens = operand(call, 1), operand(call, 2), operand(call, 3), operand(call, 4)
    starts, output, scratch = integers(address(operand(call, 5))), result(call, 0), result(call, 1)
    rows, kv_heads, count = size(lens, 0), size(pages, 1), size(queries, 0)
    row_bytes = 4 * size(queries, 1) * size(queries, 2)
    first = load(integers(address(operand(call, 7))), 0)
    end = load(starts, rows)
    clear_bytes(address(output) + end * row_bytes, (count - end) * row_bytes)
    blocks = _find_blocks(integers(address(result(call, 2))), first, rows, starts, integers(address(lens)), tokens, 0)
    _give_all_heads(integers(address(result(call, 2))), blocks, kv_heads)
    words[ITEMS] = blocks * kv_heads
    words[FIRST_FIELD] = address(queries)
    _fill_pages(words, FIRST_FIELD + 1, pages, width)
    words[FIRST_FIELD + 3] = address(output)
    words[FIRST_FIELD + 4] = address(table)
    words[FIRST_FIELD + 5] = address(lens)
    words[FIRST_FIELD + 6] = address(operand(call, 5))
    words[FIRST_FIELD + 7] = _sinks(operand(call, 6))
    words[FIRST_FIELD + 8] = address(result(call, 2))
    words[FIRST_FIELD + 9] = address(scratch)
    words[FIRST_FIELD + 10] = size(scratch, 0)
    _fill_options(words, FIRST_FIELD + 11, call, table, pages)
    words[FIRST_FIELD + 21] = constants(call)[3]
    elements = (end - load(starts, first)) * size(queries, 1) * size(queries, 2) * _KEYS_OF_A_PROMPT
    return _threads(elements, blocks * kv_heads, size(scratch, 0))


def build_latent_call(
    compiler: KernelCompiler, names: tuple[str, ...], kernels: tuple[CompiledKernel, ...], groups: tuple[int, ...]
) -> CompiledKernel:
    """See `build_xla_call`, for attention of all sequences over latent vectors, with one or two kernels, of `groups`
    heads of an item: the last one for steps with too few items for all threads.

    Operands: queries `[T, heads, width]`, pages, page table `[R, columns]`, lengths `[R]`, starts of sequences
    `[R + 1]`, and int32 `[R]`, not 0 for sequences that are left out. Results: the output `[T, heads, latent]`, 0 for
    padding and for what is left out; scratch `[threads, floats]`; and memory for items, int32 `[items, 4]`."""
    fields, first, last = len(prompt_attention.FIELDS), names[0], names[-1]
    group, few = groups[0], groups[-1]
    tokens, few_tokens = tokens_of_item(group), tokens_of_item(few)

    def handle(frame):
        call = long_integers(frame)
        if answered(call):
            return 0
        shared = begin(fields)
        words = arguments(shared)
        threads = _fill_latents(words, call, group, tokens)
        if words[ITEMS] >= size(result(call, 1), 0):
            return run(call, shared, threads, address_of(first))
        threads = _fill_latents(words, call, few, few_tokens)
        return run(call, shared, threads, address_of(last))

    name_function(last, kernels[-1].address)
    built = build_xla_call(compiler, first, kernels[0], handle)
    return CompiledKernel(built.address, (built, kernels))


@part
def _fill_latents(words, call, group, tokens):
    queries, pages, table, lens = operand(call, 0), operand(call, 1), operand(call, 2), operand(call, 3)
    starts, output, scratch = integers(address(operand(call, 4))), result(call, 0), result(call, 1)
    rows, heads, parts = size(lens, 0), size(queries, 1), size(queries, 1) // group
    clear_bytes(address(output), 4 * size(output, 0) * heads * size(output, 2))
    items, left_out = integers(address(result(call, 2))), address(operand(call, 5))
    blocks = _find_blocks(items, 0, rows, starts, integers(address(lens)), tokens, left_out)
    _give_all_heads(items, blocks, parts)
    words[ITEMS] = blocks * parts
    words[FIRST_FIELD] = address(queries)
    words[FIRST_FIELD + 1] = address(pages)
    words[FIRST_FIELD + 2] = address(pages)
    words[FIRST_FIELD + 3] = address(output)
    words[FIRST_FIELD + 4] = address(table)
    words[FIRST_FIELD + 5] = address(lens)
    words[FIRST_FIELD + 6] = address(operand(call, 4))
    words[FIRST_FIELD + 8] = address(result(call, 2))
    words[FIRST_FIELD + 9] = address(scratch)
    words[FIRST_FIELD + 10] = size(scratch, 0)
    words[FIRST_FIELD + 11] = size(table, 1)
    words[FIRST_FIELD + 12] = parts
    words[FIRST_FIELD + 13] = size(pages, 3)
    words[FIRST_FIELD + 14] = size(pages, 3)
    words[FIRST_FIELD + 16] = constants(call)[1]
    elements = load(starts, rows) * heads * size(queries, 2) * _KEYS_OF_A_PROMPT
    return _threads(elements, blocks * parts, size(scratch, 0))


@part
def _find_blocks(items, first, rows, starts, lens, tokens, left_out):
    """Writes an item for every `tokens` tokens of the sequences from index `first` on, those that see the most keys
    first, so that threads end at about the same time. Returns their number. In place of a kv head, an item has the
    number of its products. `left_out`: the address of a number for each sequence, not 0 for one that gets no item; or
    0. Sequences of length 0 are padding."""
    count = 0
    for sequence in range(first, rows):
        if load(lens, sequence) == 0 or (left_out != 0 and load(integers(left_out), sequence) != 0):
            continue
        queries = load(starts, sequence + 1) - load(starts, sequence)
        for block in range((queries + tokens - 1) // tokens):
            token = (queries - 1) // tokens * tokens - block * tokens
            last = min(token + tokens, queries)
            products = (last - token) * (load(lens, sequence) - queries + last)
            place = count
            while place > 0 and load(items, 4 * place - 3) < products:
                _move(items, place, place - 1)
                place -= 1
            items[4 * place], items[4 * place + 1] = sequence, products
            items[4 * place + 2], items[4 * place + 3] = token, last
            count += 1
    return count


@part
def _give_all_heads(items, blocks, kv_heads):
    """Replaces each item by one for every kv head."""
    for number in range(blocks * kv_heads):
        place = blocks * kv_heads - 1 - number
        _move(items, place, place // kv_heads)
        items[4 * place + 1] = place % kv_heads


@part
def _move(items, place, source):
    for word in range(4):
        items[4 * place + word] = items[4 * source + word]


@part
def _fill_pages(words, at, pages, width):
    """The addresses of keys and values."""
    words[at] = address(pages)
    words[at + 1] = address(pages) + size(pages, 3) * size(pages, 4) * width


@part
def _fill_options(words, at, call, table, pages):
    """What both kernels take last."""
    numbers = constants(call)
    words[at] = size(table, 1)
    words[at + 1] = size(pages, 1)
    words[at + 2] = size(pages, 3)
    words[at + 3] = 2 * size(pages, 3)
    words[at + 4] = numbers[0]
    words[at + 5] = numbers[1]
    words[at + 6] = numbers[2]


@part
def _sinks(sinks):
    return address(sinks) if size(sinks, 0) > 0 else 0


@part
def _threads(elements, items, slots):
    return max(min(items, slots), 1) if elements >= ELEMENTS_WORTH_SHARING else 1
