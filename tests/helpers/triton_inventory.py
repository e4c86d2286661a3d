"""Every shipped Triton kernel, in every configuration it is meant for: the list that is compiled ahead of time and
checked.

Sizes are those of the most common models: hidden sizes 576 (SmolLM2) to 8192 (Llama 70B), head sizes 64 to 256.
Attention has head sizes, types and page sizes in all combinations, and its options separately. A module that imports
this one must first decide whether kernels are interpreted or compiled (`helpers.triton_interpreter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from sglang_jax.architectures.kinds.experts import ClampedGate
from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import Partials, decode_attention, plan_decode
from torch_backend.kernels.expert_product import expert_product, expert_tile, tile_table
from torch_backend.kernels.extend_attention import Sums, extend_attention, form_of
from torch_backend.kernels.extend_plan import plan_extend
from torch_backend.kernels.gated_activation import gelu_mul, rounded_gated, silu_mul
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.kernels.group_product import group_product
from torch_backend.kernels.integer_product import integer_product
from torch_backend.kernels.latent_attention import latent_attention
from torch_backend.kernels.latent_plan import plan_latent_chunks, plan_latent_decode
from torch_backend.kernels.plain_experts import (
    ExpertRows,
    Gate,
    gate_experts,
    multiply_sorted_rows,
    rows_per_expert,
    sum_experts,
    tile_rows,
)
from torch_backend.kernels.rms_norm import add_rms_norm, rms_norm, rounded_add_rms_norm, rounded_rms_norm
from torch_backend.kernels.rotate_and_write import rotate_and_write
from torch_backend.kernels.rounding import empty_rows, round_rows
from torch_backend.kernels.sample import greedy, sample
from torch_backend.kernels.scaled_product import fixed_product, scaled_product
from torch_backend.kv_pages import KVForm, KVPages
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs
from torch_backend.recurrent.triton import TritonStates

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_HIDDEN_SIZES = (576, 896, 2048, 3584, 4096, 5120, 8192)
_HEAD_DIMS = (64, 80, 96, 128, 256)
_PAGE_SIZES = (1, 16, 64)
_TOKENS = 48
_ROWS = 48
_PROMPT_TOKENS = 4096
_SHORT_CHUNK = 16  # of one sequence: so few blocks that programs split their keys
_LONGEST = 32_768
_META = torch.device("meta")
_MXFP4 = GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)
_NVFP4 = GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32)
_INTEGERS = (KVForm(torch.int8, torch.bfloat16), KVForm(torch.int8, torch.int8))


@dataclass(frozen=True, slots=True)
class ShippedKernel:
    """One launcher with one combination of values that kernels are compiled for: types, widths, head sizes, page sizes.

    - `operation`: the launcher's name, as in `rms_norm`.
    - `configuration`: the combination in words, as in `bfloat16, hidden 4096`; with `operation` it is unique.
    - `launch`: calls the launcher as the model would on that chip, with tensors without memory (device `meta`).
    - `capability`: of the first chip that it is meant for.
    """

    operation: str
    configuration: str
    launch: Callable[[Chip], object]
    capability: int = 80

    @property
    def row(self) -> str:
        """How its rows of a chip start, as in `rms_norm: bfloat16, hidden 4096: `."""
        return f"{self.operation}: {self.configuration}: "


REPRESENTATIVE = (
    "rms_norm: bfloat16, hidden 576: ",
    "add_rms_norm: bfloat16, hidden 8192: ",
    "silu_mul: bfloat16: ",
    "gelu_mul: bfloat16: ",
    "rounded_rms_norm: bfloat16, float8_e4m3fn, hidden 4096: ",
    "rounded_add_rms_norm: bfloat16, int8, hidden 8192: ",
    "rounded_add_rms_norm: bfloat16, float8_e4m3fn, hidden 8192: ",
    "rounded_gated: bfloat16, float8_e4m3fn, silu, intermediate 14336: ",
    "round_rows: bfloat16, float8_e4m3fn, 4096: ",
    "rotate_and_write: bfloat16, head_dim 128, bfloat16 pages of 16: ",
    "rotate_and_write: bfloat16, head_dim 80, float8_e4m3fn pages of 16, head norms: ",
    "greedy: vocabulary 128256: ",
    "sample: vocabulary 128256: ",
    "sample by temperature: vocabulary 128256: ",
    "decode_attention: bfloat16, head_dim 128, group 4, bfloat16 pages of 16: ",
    "decode_attention: bfloat16, head_dim 128, group 4, float8_e4m3fn pages of 16: ",
    "decode_attention: bfloat16, head_dim 64, group 8, float8_e4m3fn pages of 16, window, sinks: ",
    "decode_attention: bfloat16, head_dim 128, group 4, int8 and bfloat16 pages of 16: ",
    "latent_attention: bfloat16, 128 heads, 512 + 64, pages of 16: ",
    "latent_attention: bfloat16, 16 heads, 512 + 64, pages of 16: ",
    "latent_attention of chunks: bfloat16, 16 heads, 512 + 64, pages of 16: ",
    "latent_attention: bfloat16, 128 heads, 512 + 64, float8_e4m3fn pages of 16: ",
    "latent_attention of chunks: bfloat16, 16 heads, 512 + 64, int8 pages of 16: ",
    "latent_attention of short chunks: bfloat16, 128 heads, 512 + 64, pages of 16: ",
    "extend_attention: bfloat16, head_dim 128, group 4, bfloat16 pages of 16: ",
    "extend_attention: bfloat16, head_dim 256, group 4, float8_e4m3fn pages of 1: ",
    "extend_attention: bfloat16, head_dim 128, group 4, int8 and bfloat16 pages of 16: ",
    "extend_attention of short chunks: bfloat16, head_dim 128, group 4, bfloat16 pages of 16: ",
    "convolve: bfloat16, width 4: ",
    "scan: delta rule, key_dim 128, value_dim 128, float32 states: ",
    "scaled_product: bfloat16, int8, 16 rows, 4096 x 4096: ",
    "scaled_product: bfloat16, float8_e4m3fn, 64 rows, 4096 x 4096: ",
    "scaled_product: bfloat16, int8, 1024 rows, 4096 x 4096: ",
    "integer_product: bfloat16, 16 rows, 4096 x 4096: ",
    "group_product: bfloat16, int4 in groups of 128, 16 rows, 4096 x 4096: ",
    "group_product: bfloat16, int4 in groups of 64 with zeros, 64 rows, 4096 x 4096: ",
    "group_product: bfloat16, float4_e2m1fn in groups of 32, 16 rows, 4096 x 4096: ",
    "expert_product: bfloat16, float4_e2m1fn in groups of 32, 64 rows, 32 x 5760 x 2880, bias: ",
    "gate_experts: bfloat16, 128 rows, 128 x 2 x 768 x 2048: ",
    "gate_experts: bfloat16, 32768 rows, 128 x 2 x 768 x 2048: ",
    "sum_experts: bfloat16, 128 rows, 128 x 2048 x 768: ",
    "sum_experts: bfloat16, 32768 rows, 128 x 2048 x 768: ",
    "fixed_product: bfloat16, bfloat16, 4096 x 4096: ",
    "fixed_product: float32, float32, 4096 x 4096: ",
)
"""One configuration of every kernel, and those nearest to a limit: `operation: configuration: `."""


def shipped_kernels() -> list[ShippedKernel]:
    """All of them, each with a unique name."""
    activations = [_activation(name, dtype) for name in ("silu_mul", "gelu_mul") for dtype in _TYPES]
    # Vocabularies whose rows are aligned to 16 bytes, and not.
    samples = [*_samples(128_256), *_samples(50_257)]
    return [
        *_norms(),
        *_wide_weights(),
        *activations,
        *_roundings(),
        *_rotations(),
        *samples,
        *_attention(),
        *_latents(),
        *_convolutions(),
        *_scans(),
        *_scaled_products(),
        *_integer_products(),
        *_group_products(),
        *_expert_products(),
        *_plain_experts(),
        *_fixed_products(),
    ]


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pages(form: torch.dtype | KVForm) -> str:
    """`bfloat16 pages`, or `int8 and bfloat16 pages` of keys and values."""
    if isinstance(form, torch.dtype):
        return f"{_name(form)} pages"
    return f"{_name(form.keys)} and {_name(form.values)} pages"


def _norms() -> Iterator[ShippedKernel]:
    for dtype in _TYPES:
        for hidden in _HIDDEN_SIZES if dtype == torch.bfloat16 else (4096,):
            yield from _norms_of(dtype, hidden)


def _norms_of(dtype: torch.dtype, hidden: int) -> Iterator[ShippedKernel]:
    x, weight = _empty(dtype, _TOKENS, hidden), _empty(dtype, hidden)
    configuration = f"{_name(dtype)}, hidden {hidden}"
    yield ShippedKernel("rms_norm", configuration, lambda chip: rms_norm(x, weight, 1e-6, chip.dependent_launches))
    yield ShippedKernel(
        "add_rms_norm", configuration, lambda chip: add_rms_norm(x, x, weight, 1e-6, chip.dependent_launches)
    )


def _wide_weights() -> Iterator[ShippedKernel]:
    """Weights in float32 with bfloat16 activations, as in Gemma's norms."""
    hidden, dtype = 2304, torch.bfloat16
    x, weight = _empty(dtype, _TOKENS, hidden), _empty(torch.float32, hidden)
    configuration = f"{_name(dtype)}, hidden {hidden}, float32 weight"
    yield ShippedKernel("rms_norm", configuration, lambda chip: rms_norm(x, weight, 1e-6, chip.dependent_launches))
    yield ShippedKernel(
        "add_rms_norm", configuration, lambda chip: add_rms_norm(x, x, weight, 1e-6, chip.dependent_launches)
    )


def _activation(name: str, dtype: torch.dtype) -> ShippedKernel:
    activate = {"silu_mul": silu_mul, "gelu_mul": gelu_mul}[name]
    gate_up = _empty(dtype, _TOKENS, 2 * 14_336)
    return ShippedKernel(name, _name(dtype), lambda chip: activate(gate_up, chip.dependent_launches))


def _roundings() -> Iterator[ShippedKernel]:
    """Before products of int8 and of float8."""
    for values, first in ((torch.int8, 80), (torch.float8_e4m3fn, 89)):
        for dtype in (torch.bfloat16, torch.float16) if values == torch.int8 else (torch.bfloat16,):
            for hidden in _HIDDEN_SIZES if dtype == torch.bfloat16 else (4096,):
                yield from _rounded_norms(dtype, values, hidden, first)
            for activation, sizes in ((Activation.SILU, (1536, 14_336)), (Activation.GELU_TANH, (14_336,))):
                for size in sizes:
                    yield _rounded_gate(dtype, values, activation, size, first)
            for columns in (4096, 28_672):
                yield _rounded_rows(dtype, values, columns, first)


def _rounded_norms(dtype: torch.dtype, values: torch.dtype, hidden: int, first: int) -> Iterator[ShippedKernel]:
    x, weight = _empty(dtype, _TOKENS, hidden), _empty(dtype, hidden)
    words = f"{_name(dtype)}, {_name(values)}, hidden {hidden}"

    def alone(chip: Chip) -> object:
        return rounded_rms_norm(x, weight, 1e-6, values, chip.dependent_launches)

    def after_sum(chip: Chip) -> object:
        return rounded_add_rms_norm(x, x, weight, 1e-6, values, chip.dependent_launches)

    yield ShippedKernel("rounded_rms_norm", words, alone, first)
    yield ShippedKernel("rounded_add_rms_norm", words, after_sum, first)


def _rounded_gate(
    dtype: torch.dtype, values: torch.dtype, activation: Activation, size: int, first: int
) -> ShippedKernel:
    gate_up = _empty(dtype, _TOKENS, 2 * size)

    def launch(chip: Chip) -> object:
        return rounded_gated(gate_up, activation, values, chip.dependent_launches)

    words = f"{_name(dtype)}, {_name(values)}, {activation.value}, intermediate {size}"
    return ShippedKernel("rounded_gated", words, launch, first)


def _rounded_rows(dtype: torch.dtype, values: torch.dtype, columns: int, first: int) -> ShippedKernel:
    x = _empty(dtype, _TOKENS, columns)

    def launch(chip: Chip) -> object:
        return round_rows(x, values, chip.dependent_launches)

    return ShippedKernel("round_rows", f"{_name(dtype)}, {_name(values)}, {columns}", launch, first)


def _rotations() -> Iterator[ShippedKernel]:
    for dtype in _TYPES:
        for pages in (dtype, torch.float8_e4m3fn):
            for head_dim in _HEAD_DIMS if dtype == torch.bfloat16 else (128,):
                for has_norms in (False, True):
                    yield _rotation(dtype, pages, head_dim, has_norms, page_size=16)
    for page_size in _PAGE_SIZES:
        if page_size != 16:
            yield _rotation(torch.bfloat16, torch.bfloat16, 128, False, page_size)
    for form in _INTEGERS:
        yield _rotation(torch.bfloat16, form, 128, False, page_size=16)
        yield _rotation(torch.bfloat16, form, 256, True, page_size=16)


def _rotation(
    dtype: torch.dtype, pages: torch.dtype | KVForm, head_dim: int, has_norms: bool, page_size: int
) -> ShippedKernel:
    heads, kv_heads = 32, 8

    def launch(chip: Chip) -> object:
        half = _empty(torch.float32, _TOKENS, head_dim // 2)
        weight = _empty(dtype, head_dim)
        return rotate_and_write(
            _empty(dtype, _TOKENS, (heads + 2 * kv_heads) * head_dim),
            Rotation(half, half),
            HeadNorms(weight, weight, 1e-6) if has_norms else None,
            KVPages.allocate(2, kv_heads, page_size, head_dim, pages, _META),
            _empty(torch.int64, _TOKENS),
            chip.dependent_launches,
        )

    norms = ", head norms" if has_norms else ""
    configuration = f"{_name(dtype)}, head_dim {head_dim}, {_pages(pages)} of {page_size}{norms}"
    return ShippedKernel("rotate_and_write", configuration, launch)


def _samples(vocab: int) -> Iterator[ShippedKernel]:
    logits = _empty(torch.float32, _TOKENS, vocab)
    reals, words, seeds = _empty(torch.float32, _TOKENS), _empty(torch.int32, _TOKENS), _empty(torch.int32, _TOKENS, 2)
    configuration = f"vocabulary {vocab}"
    yield ShippedKernel("greedy", configuration, lambda _: greedy(logits))
    for operation, cut in (("sample", True), ("sample by temperature", False)):
        yield ShippedKernel(
            operation,
            configuration,
            lambda _, cut=cut: sample(logits, reals, words, reals, reals, seeds=seeds, positions=words, cut=cut),
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """The parameters that attention's kernels are compiled for."""

    head_dim: int = 128
    group: int = 4
    queries: torch.dtype = torch.bfloat16
    pages: torch.dtype | KVForm = torch.bfloat16
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kv_heads: int = 8

    @property
    def name(self) -> str:
        heads = f"head_dim {self.head_dim}, group {self.group}"
        named = f"{_name(self.queries)}, {heads}, {_pages(self.pages)} of {self.page_size}"
        options = {"window": self.window is not None, "soft cap": self.soft_cap is not None, "sinks": self.sinks}
        return ", ".join([named, *(name for name, given in options.items() if given)])

    @property
    def options(self) -> AttentionOptions:
        sinks = torch.empty(self.group * self.kv_heads, dtype=torch.float32, device=_META) if self.sinks else None
        return AttentionOptions(self.head_dim**-0.5, self.window, self.soft_cap, sinks)

    def tensors(self, tokens: int) -> tuple[torch.Tensor, KVPages, torch.Tensor, torch.Tensor]:
        """Queries, pages, page table and lengths."""
        queries = torch.empty(tokens, self.kv_heads * self.group, self.head_dim, dtype=self.queries, device=_META)
        kv = KVPages.allocate(2, self.kv_heads, self.page_size, self.head_dim, self.pages, _META)
        page_table = torch.empty(_ROWS, _LONGEST // self.page_size, dtype=torch.int32, device=_META)
        return queries, kv, page_table, torch.empty(_ROWS, dtype=torch.int32, device=_META)


def _attention() -> list[ShippedKernel]:
    """Decode and extend for every shape."""
    return [
        ShippedKernel(operation, shape.name, partial(launch, shape))
        for shape in _shapes()
        for operation, launch in (
            ("decode_attention", _decode),
            ("extend_attention", partial(_extend, _PROMPT_TOKENS)),
            ("extend_attention of short chunks", partial(_extend, _SHORT_CHUNK)),
        )
        # Page sizes change how keys are found, in the same way in all kernels.
        if shape.page_size == 16 or operation != "extend_attention of short chunks"
    ]


def _shapes() -> Iterator[_Shape]:
    float8 = torch.float8_e4m3fn
    for head_dim in (64, 80, 96, 128, 256):
        for pages in (torch.bfloat16, float8):
            for page_size in (1, 16, 64):
                yield _Shape(head_dim, pages=pages, page_size=page_size)
    for group in (1, 3, 8, 16):
        yield _Shape(group=group)
    half = _Shape(queries=torch.float16, pages=torch.float16)
    yield from (half, replace(half, pages=float8))
    yield _Shape(queries=torch.float32, pages=torch.float32)
    for pages in (torch.bfloat16, float8):
        yield _Shape(pages=pages, window=4096)  # Mistral
        yield _Shape(64, group=8, pages=pages, window=128, sinks=True)  # gpt-oss
        yield _Shape(64, group=8, pages=pages, sinks=True)
        yield _Shape(256, group=2, pages=pages, window=4096, soft_cap=50.0)  # Gemma 2
        yield _Shape(256, group=2, pages=pages, soft_cap=50.0)
    for form in _INTEGERS:
        yield from (_Shape(head_dim, pages=form) for head_dim in (64, 128, 256))
        yield _Shape(pages=form, page_size=1)
        yield _Shape(64, group=8, pages=form, window=128, sinks=True)
        yield _Shape(256, group=2, pages=form, window=4096, soft_cap=50.0)


def _decode(shape: _Shape, chip: Chip) -> None:
    queries, kv, page_table, kv_lens = shape.tensors(_ROWS)
    plan = plan_decode(kv_lens, _ROWS, _LONGEST, shape.kv_heads, shape.window)
    partials = Partials.allocate(plan, queries)
    output = torch.empty_like(queries)
    decode_attention(queries, kv, page_table, kv_lens, shape.options, plan, partials, output, chip)


def _extend(tokens: int, shape: _Shape, chip: Chip) -> None:
    queries, kv, page_table, kv_lens = shape.tensors(tokens)
    rows = 1 if tokens == _SHORT_CHUNK else _ROWS
    starts = torch.empty(rows + 1, dtype=torch.int32, device=_META)
    form = form_of(queries, kv, shape.options, chip)
    plan = plan_extend(starts, kv_lens, 0, tokens, _LONGEST, form, chip)
    sums, output = Sums.allocate(plan, queries.device), torch.empty_like(queries)
    extend_attention(queries, kv, page_table, kv_lens, starts, 0, shape.options, plan, sums, output, chip)


def _latents() -> Iterator[ShippedKernel]:
    """Heads on one device of DeepSeek-V3 (128 to 8), GLM-4.7-Flash (20) and MiniCPM3 (40 over smaller vectors)."""
    bfloat16 = torch.bfloat16
    for heads in (128, 64, 32, 16, 8):
        yield from _latent_attention(heads, 512, 64, bfloat16)
    yield from _latent_attention(20, 512, 64, bfloat16)
    yield from _latent_attention(40, 256, 32, bfloat16)
    for dtype in (torch.float16, torch.float32):
        for heads in (16, 128):
            yield from _latent_attention(heads, 512, 64, dtype)
    for page_size in (1, 64):
        yield from _latent_attention(128, 512, 64, bfloat16, page_size)
    for pages in (torch.int8, torch.float8_e4m3fn):
        for heads in (16, 128):
            yield from _latent_attention(heads, 512, 64, bfloat16, pages=pages)


def _latent_attention(
    heads: int, latent: int, rotary: int, dtype: torch.dtype, page_size: int = 16, pages: torch.dtype | None = None
) -> Iterator[ShippedKernel]:
    """Of decode rows, and of prompts: short chunks are cut into splits, and long ones are not."""

    def launch(tokens: int, rows: int, chip: Chip, *, decode: bool) -> None:
        queries, output = _empty(dtype, tokens, heads, latent + rotary), _empty(dtype, tokens, heads, latent)
        kv = KVPages.allocate(2, 1, page_size, latent + rotary, stored, _META, shared=True, parts=(latent, rotary))
        kv_lens, starts = (torch.empty(count, dtype=torch.int32, device=_META) for count in (rows, rows + 1))
        page_table = torch.empty(rows, _LONGEST // page_size, dtype=torch.int32, device=_META)
        sizes = (_LONGEST, heads, latent, stored, chip)
        if decode:
            plan = plan_latent_decode(kv_lens, rows, *sizes)
        else:
            plan = plan_latent_chunks(starts, kv_lens, 0, tokens, *sizes)
        latent_attention(queries, kv, page_table, kv_lens, AttentionOptions(0.1), plan, output, chip)

    stored = pages or dtype
    in_pages = "pages" if pages is None else _pages(pages)
    words = f"{_name(dtype)}, {heads} heads, {latent} + {rotary}, {in_pages} of {page_size}"
    yield ShippedKernel("latent_attention", words, partial(launch, _ROWS, _ROWS, decode=True))
    yield ShippedKernel("latent_attention of chunks", words, partial(launch, _PROMPT_TOKENS, 1, decode=False))
    if page_size == 16 and dtype == torch.bfloat16 and pages is None:
        yield ShippedKernel("latent_attention of short chunks", words, partial(launch, _SHORT_CHUNK, 1, decode=False))


def _state_rows() -> StateRows:
    """Rows of a step with chunks and decode rows, whose sizes do not matter."""
    numbers = _empty(torch.int64, _ROWS)
    return StateRows(
        begin=numbers,
        fresh=_empty(torch.bool, _ROWS),
        own=numbers,
        sequences=_empty(torch.int64, _PROMPT_TOKENS),
        offsets=_empty(torch.int64, _PROMPT_TOKENS),
        query_starts=_empty(torch.int32, _ROWS + 1),
        num_decode=_ROWS // 2,
    )


def _convolutions() -> Iterator[ShippedKernel]:
    """Inputs are a part of the output of a layer's first product. LFM2's have width 3 and no separate part."""
    for dtype in _TYPES:
        for width in (3, 4) if dtype == torch.bfloat16 else (4,):
            for bias in (False, True) if dtype == torch.bfloat16 and width == 4 else (False,):
                words = f"{_name(dtype)}, width {width}" + (", bias" if bias else "")
                yield ShippedKernel("convolve", words, partial(_convolve, dtype, width, bias))


def _convolve(dtype: torch.dtype, width: int, bias: bool, _: Chip) -> None:
    channels = 8192
    x = _empty(dtype, _PROMPT_TOKENS, 3 * channels)[:, channels : 2 * channels]
    weight, pool = _empty(dtype, channels, width), _empty(dtype, _ROWS, width - 1, channels)
    step = TritonStates().prepare(_state_rows())
    step.convolve(x, weight, _empty(dtype, channels) if bias else None, pool)


def _scans() -> Iterator[ShippedKernel]:
    """Heads of Qwen3.5 and Qwen3-Next; of Mamba-2, Nemotron-H and Granite 4; of Falcon-H1."""
    for key_dim, value_dim, delta in ((128, 128, True), (128, 64, False), (256, 64, False), (256, 128, False)):
        for states in (torch.float32, torch.bfloat16):
            rule = "delta rule, " if delta else ""
            words = f"{rule}key_dim {key_dim}, value_dim {value_dim}, {_name(states)} states"
            yield ShippedKernel("scan", words, partial(_scan, key_dim, value_dim, delta, states))


def _scan(key_dim: int, value_dim: int, delta: bool, states: torch.dtype, _: Chip) -> None:
    heads, groups = 32, 16 if delta else 1

    def numbers(*shape: int) -> torch.Tensor:
        return _empty(torch.float32, _PROMPT_TOKENS, *shape)

    keys, values = numbers(groups, key_dim), numbers(heads, value_dim)
    inputs = ScanInputs(keys, keys, values, numbers(heads), numbers(heads) if delta else None)
    TritonStates().prepare(_state_rows()).scan(inputs, _empty(states, _ROWS, heads, key_dim, value_dim))


def _scaled_products() -> Iterator[ShippedKernel]:
    """Each number of rows has its own tile, or another number of splits; many outputs have no split."""
    for values in (torch.int8, torch.float8_e4m3fn):
        for rows in (16, 32, 64, 96, 1024):
            yield _scaled_product(torch.bfloat16, values, rows, 4096, False)
        for rows in (16, 1024):
            yield _scaled_product(torch.float16, values, rows, 4096, False)
        yield _scaled_product(torch.bfloat16, values, 16, 28_672, True)


def _scaled_product(dtype: torch.dtype, values: torch.dtype, rows: int, outputs: int, has_bias: bool) -> ShippedKernel:
    inputs = 4096
    bias = _empty(dtype, outputs) if has_bias else None

    def launch(chip: Chip) -> object:
        x, scales = _empty(dtype, rows, inputs), _empty(torch.float32, outputs)
        return scaled_product(x, _empty(values, outputs, inputs), scales, bias, chip)

    words = f"{_name(dtype)}, {_name(values)}, {rows} rows, {outputs} x {inputs}" + (", bias" if has_bias else "")
    return ShippedKernel("scaled_product", words, launch)


def _integer_products() -> Iterator[ShippedKernel]:
    """With 1024 rows, the kernel after torch's product, which scales."""
    for dtype in (torch.bfloat16, torch.float16):
        for rows in (16, 32, 64, 1024) if dtype == torch.bfloat16 else (16,):
            yield _integer_product(dtype, rows, 4096, False)
    yield _integer_product(torch.bfloat16, 16, 28_672, True)


def _integer_product(dtype: torch.dtype, rows: int, outputs: int, has_bias: bool) -> ShippedKernel:
    inputs = 4096
    bias = _empty(dtype, outputs) if has_bias else None

    def launch(chip: Chip) -> object:
        x, scales = empty_rows(_empty(dtype, rows, inputs), inputs, torch.int8), _empty(torch.float32, outputs)
        return integer_product(x, _empty(torch.int8, outputs, inputs), scales, bias, chip)

    words = f"{_name(dtype)}, {rows} rows, {outputs} x {inputs}" + (", bias" if has_bias else "")
    return ShippedKernel("integer_product", words, launch)


def _group_products() -> Iterator[ShippedKernel]:
    """Each number of rows has its own tile, or another number of splits."""
    integers, scales = Levels.INT4, Scales.BFLOAT16
    kinds = [
        *(GroupType(integers, size, scales, zeros) for size in (32, 64, 128) for zeros in (False, True)),
        GroupType(Levels.INT8, 128, scales),
        GroupType(Levels.INT8, 32, scales, zeros=True),
        GroupType(Levels.FLOAT8_E4M3, 128, Scales.FLOAT32),
        _MXFP4,
    ]
    for kind in kinds:
        for rows in (16, 32, 64, 1024):
            yield _group_product(torch.bfloat16, kind, rows, 4096, False)
    for rows in (16, 64):
        yield _group_product(torch.bfloat16, _NVFP4, rows, 4096, False)
    yield _group_product(torch.float16, _MXFP4, 16, 4096, False)
    with_zeros = GroupType(integers, 128, Scales.FLOAT16, zeros=True)
    for rows in (16, 64):
        yield _group_product(torch.float16, with_zeros, rows, 4096, False)
    yield _group_product(torch.bfloat16, with_zeros, 16, 28_672, True)


def _group_product(dtype: torch.dtype, kind: GroupType, rows: int, outputs: int, has_bias: bool) -> ShippedKernel:
    inputs = 4096
    bias = _empty(dtype, outputs) if has_bias else None

    def launch(chip: Chip) -> object:
        return group_product(_empty(dtype, rows, inputs), _grouped(kind, outputs, inputs), bias, chip)

    words = f"{_name(dtype)}, {kind.value}, {rows} rows, {outputs} x {inputs}" + (", bias" if has_bias else "")
    return ShippedKernel("group_product", words, launch)


def _grouped(kind: GroupType, outputs: int, inputs: int) -> GroupedWeights:
    small, groups = kind.levels.bits == 4, (inputs // kind.weights, outputs)
    stored = {Levels.INT8: torch.int8, Levels.FLOAT8_E4M3: torch.float8_e4m3fn}.get(kind.levels, torch.int16)
    levels = _empty(stored, outputs, -(-inputs // 256) * 64 if small else inputs)
    zeros = _empty(torch.uint8 if small else torch.int8, *groups) if kind.zeros else None
    scales = torch.uint8 if kind.scales is Scales.POWER_OF_TWO else vars(torch)[kind.scales.value]
    return GroupedWeights(levels, _empty(scales, *groups), zeros, kind.weights, kind.levels is Levels.FLOAT4_E2M1)


def _expert_products() -> Iterator[ShippedKernel]:
    """Of gpt-oss, and of Qwen3 with 128 experts, of which a token chooses 8."""
    for tokens in (16, 128, 256, 1024):
        yield _expert_product(torch.bfloat16, _MXFP4, tokens * 4, (32, 5760, 2880), True)
    kinds = [
        *(GroupType(Levels.INT4, 128, Scales.BFLOAT16, zeros) for zeros in (False, True)),
        GroupType(Levels.INT8, 128, Scales.BFLOAT16),
        GroupType(Levels.FLOAT8_E4M3, 128, Scales.FLOAT32),
    ]
    for kind in kinds:
        for tokens in (16, 4096):
            yield _expert_product(torch.bfloat16, kind, tokens * 8, (128, 1536, 2048), False)


def _expert_product(
    dtype: torch.dtype, kind: GroupType, rows: int, shape: tuple[int, int, int], has_bias: bool
) -> ShippedKernel:
    experts, outputs, inputs = shape

    def launch(chip: Chip) -> object:
        weights, sizes = _grouped(kind, experts * outputs, inputs), _empty(torch.int32, experts)
        table = tile_table(sizes, rows, expert_tile(rows, experts, weights, chip).rows, chip)
        bias = _empty(dtype, experts, outputs) if has_bias else None
        return expert_product(_empty(dtype, rows, inputs), weights, bias, table, experts, chip)

    words = f"{_name(dtype)}, {kind.value}, {rows} rows, {experts} x {outputs} x {inputs}"
    return ShippedKernel("expert_product", words + (", bias" if has_bias else ""), launch)


def _plain_experts() -> Iterator[ShippedKernel]:
    """Of Qwen3 with 128 experts, of which a token chooses 8; of gpt-oss, divided among 8 devices; and of odd sizes,
    whose rows cannot be copied in 16 bytes."""
    qwen, gpt_oss, odd = (128, 2048, 768), (32, 2880, 360), (32, 2050, 361)
    for tokens in (16, 256, 512, 4096):
        yield from _plain_expert_products(torch.bfloat16, tokens, 8, qwen)
        yield from _plain_expert_products(torch.bfloat16, tokens, 4, gpt_oss, clamped=True)
    for tokens in (16, 4096):
        yield from _plain_expert_products(torch.float16, tokens, 8, qwen)
        yield from _plain_expert_products(torch.bfloat16, tokens, 4, odd)
    yield from _plain_expert_products(torch.float32, 16, 8, qwen)
    for tokens in (16, 4096):
        yield _sorted_rows(torch.bfloat16, tokens * 8, (128, 1536, 2048))


def _sorted_rows(dtype: torch.dtype, rows: int, shape: tuple[int, int, int]) -> ShippedKernel:
    """Only the product, for experts of which the other product is another kernel's."""
    experts, outputs, inputs = shape
    weights = _empty(dtype, *shape)
    per_expert = rows_per_expert(rows, weights)
    tiles = min(experts, rows) + max(rows - experts, 0) // tile_rows(per_expert, dtype)
    own = ExpertRows(_empty(torch.int32, tiles, 3), None, 1, per_expert)

    def launch(chip: Chip) -> object:
        return multiply_sorted_rows(_empty(dtype, rows, inputs), weights, None, own, chip)

    return ShippedKernel(
        "multiply_sorted_rows", f"{_name(dtype)}, {rows} rows, {experts} x {outputs} x {inputs}", launch
    )


def _plain_expert_products(
    dtype: torch.dtype, tokens: int, chosen: int, shape: tuple[int, int, int], *, clamped: bool = False
) -> Iterator[ShippedKernel]:
    """Both of them. Those with a clamped gate have biases, too."""
    experts, hidden, inner = shape
    rows = tokens * chosen
    gate = Gate(Activation.SILU, ClampedGate(1.702, 7.0) if clamped else None)
    gate_up, down = _empty(dtype, experts, 2 * inner, hidden), _empty(dtype, experts, hidden, inner)
    biases = [_empty(dtype, *each.shape[:2]) if clamped else None for each in (gate_up, down)]
    per_expert = rows_per_expert(rows, gate_up)
    tiles = min(experts, rows) + max(rows - experts, 0) // tile_rows(per_expert, dtype)
    own = ExpertRows(_empty(torch.int32, tiles, 3), _empty(torch.int64, rows), chosen, per_expert)

    def launch_gate(chip: Chip) -> object:
        return gate_experts(_empty(dtype, tokens, hidden), gate_up, biases[0], own, gate, chip)

    def launch_sum(chip: Chip) -> object:
        scores = _empty(torch.float32, tokens, chosen)
        return sum_experts(_empty(dtype, rows, inner), down, biases[1], own, scores, dtype, chip)

    words, end = f"{_name(dtype)}, {rows} rows, {experts}", ", clamped, bias" if clamped else ""
    yield ShippedKernel("gate_experts", f"{words} x 2 x {inner} x {hidden}{end}", launch_gate)
    yield ShippedKernel("sum_experts", f"{words} x {hidden} x {inner}{', bias' if clamped else ''}", launch_sum)


def _fixed_products() -> Iterator[ShippedKernel]:
    """One tile for each dtype of inputs, for any number of rows."""
    for dtype in _TYPES:
        for values in (dtype, torch.int8, torch.float8_e4m3fn):
            yield _fixed_product(dtype, values, 4096, False)
    for values in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        yield _fixed_product(torch.bfloat16, values, 28_672, True)


def _fixed_product(dtype: torch.dtype, values: torch.dtype, outputs: int, has_bias: bool) -> ShippedKernel:
    inputs = 4096
    bias = _empty(dtype, outputs) if has_bias else None

    def launch(chip: Chip) -> object:
        scales = None if values == dtype else _empty(torch.float32, outputs)
        return fixed_product(_empty(dtype, _ROWS, inputs), _empty(values, outputs, inputs), scales, bias, chip)

    words = f"{_name(dtype)}, {_name(values)}, {outputs} x {inputs}" + (", bias" if has_bias else "")
    return ShippedKernel("fixed_product", words, launch)
