"""The TPU kernels compiled for real TPUs by libtpu's compiler: every variant, in place, within the chip's memory."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tpu_ahead_of_time import (
    TOPOLOGIES,
    AnyKernel,
    ConvolutionKernel,
    ExpertKernel,
    FilterKernel,
    GroupKernel,
    Kernel,
    Outcome,
    StateKernel,
    compile_kernels,
)

LLAMA_8B = Kernel()
QWEN3_32B = Kernel(heads=64, page_size=128)

LLAMA_8B_MIXED = replace(LLAMA_8B, tokens=512, rows=16)
QWEN3_32B_MIXED = replace(QWEN3_32B, tokens=512, rows=16)

KERNELS = [
    LLAMA_8B,
    LLAMA_8B_MIXED,
    Kernel(heads=4, kv_heads=1, tokens=256, rows=256, columns=2048),
    Kernel(heads=32, storage="int8", scales=True, page_size=32, window=1000, tokens=256, rows=8),
]

MORE = [
    Kernel(heads=9, kv_heads=3, head_dim=64, page_size=16, tokens=64, rows=8),
    QWEN3_32B,
    QWEN3_32B_MIXED,
    Kernel(heads=1, kv_heads=1, tokens=1, rows=1),
    Kernel(heads=28, kv_heads=4, tokens=256, rows=8),
    Kernel(heads=3, kv_heads=1, head_dim=80, page_size=256, tokens=64, rows=8, columns=8),
    Kernel(heads=6, kv_heads=2, head_dim=96, storage="float32", tokens=64, rows=8),
    Kernel(heads=8, kv_heads=1, head_dim=256, soft_cap=50.0, window=4096, tokens=256, rows=8),
    Kernel(heads=64, head_dim=64, window=128, sinks=True, tokens=256, rows=8),
    Kernel(storage="float8_e4m3fn", scales=True, tokens=256, rows=8),
    Kernel(storage="float8_e5m2", scales=True, page_size=16),
    # Latent vectors of DeepSeek, of 16 heads and of all; keys and values of the same width.
    Kernel(heads=16, kv_heads=1, head_dim=576, value_dim=512, tokens=512, rows=16),
    Kernel(heads=128, kv_heads=1, head_dim=576, value_dim=512),
    Kernel(heads=16, kv_heads=1, head_dim=640, tokens=512, rows=16),
    replace(LLAMA_8B, fixed=True),
    Kernel(storage="int8", scales=True, page_size=32, window=1000, tokens=256, rows=8, fixed=True),
    Kernel(heads=16, kv_heads=1, head_dim=576, value_dim=512, tokens=256, rows=16, fixed=True),
]


TOO_LARGE = Kernel(kv_heads=32, tokens=64, rows=8, blocks=(16, 64))
"""Four buffers for 4096 keys of 32 heads take 256 MiB."""


QWEN3_5 = StateKernel()
MAMBA2 = StateKernel(heads=24, groups=1, value_dim=64, delta=False)

STATES = [
    QWEN3_5,
    replace(QWEN3_5, tokens=512, rows=16),
    replace(MAMBA2, tokens=512, rows=16),
]

MORE_STATES = [
    MAMBA2,
    StateKernel(heads=48, states="bfloat16", tokens=256, rows=256, slots=600),
    StateKernel(heads=48, states="bfloat16", tokens=2048, rows=64),
    StateKernel(
        heads=128, groups=8, value_dim=64, delta=False, tokens=2048, rows=256, slots=300
    ),  # Granite 4, Nemotron-H
    StateKernel(heads=24, groups=1, key_dim=256, value_dim=64, delta=False, tokens=512, rows=64),  # Falcon-H1
    StateKernel(heads=32, groups=2, key_dim=256, value_dim=128, delta=False, tokens=512, rows=64),
    replace(QWEN3_5, fixed=True),
    replace(MAMBA2, tokens=512, rows=16, fixed=True),
]


CONVOLUTION = ConvolutionKernel()

CONVOLUTIONS = [CONVOLUTION, ConvolutionKernel(channels=8448, bias=True, tokens=512, rows=20, slots=600)]

MORE_CONVOLUTIONS = [
    ConvolutionKernel(channels=1024, tokens=1, rows=1, slots=9),
    ConvolutionKernel(channels=10240, tokens=2048, rows=256, slots=600),
    ConvolutionKernel(channels=2048, width=3, tokens=256, rows=64),  # LFM2
    ConvolutionKernel(channels=1536, storage="float32", bias=True, tokens=72, rows=8),
    replace(CONVOLUTION, fixed=True),
]


FILTERS = [FilterKernel(), FilterKernel(lines=1, vocab_size=151_936)]
MORE_FILTERS = [FilterKernel(lines=256), FilterKernel(lines=64, vocab_size=262_144), FilterKernel(vocab_size=50_257)]


GROUPS = [
    GroupKernel(),
    GroupKernel(group=32, zeros=True, inputs=1376, outputs=300, rows=17),
    GroupKernel(rows=16, inputs=4096 + 256, outputs=300, zeros=True),
    GroupKernel(levels="int8", rows=200, inputs=1024),
    GroupKernel(levels="float4", group=32, rows=16, inputs=2880, outputs=768, experts=4),
]
MORE_GROUPS = [
    *(
        GroupKernel(rows, group=group, levels=levels, zeros=zeros)
        for group in (32, 64, 128)
        for levels, zeros in (("int4", False), ("int4", True), ("int8", True), ("float8_e4m3fn", False))
        for rows in ((128, 512) if group == 32 else (128,))
    ),
    GroupKernel(inputs=14336, outputs=4096, group=32),
    GroupKernel(inputs=14336, outputs=4096, rows=2048, scales="float32"),
    GroupKernel(inputs=25600, outputs=5120, levels="int8", rows=512),
    GroupKernel(levels="float4", group=32),
    GroupKernel(levels="int8", group=16),
    GroupKernel(rows=128, inputs=2048, outputs=768, experts=128),
    GroupKernel(rows=16, inputs=768, outputs=2048, zeros=True, experts=128),
    GroupKernel(rows=16, inputs=7168, outputs=512, levels="float8_e4m3fn", scales="float32", experts=32),
    GroupKernel(rows=32, inputs=3584, outputs=128, levels="float8_e4m3fn", experts=256),
    GroupKernel(rows=16, inputs=64, outputs=7168, group=64, levels="float8_e4m3fn", experts=256),
    GroupKernel(rows=16, inputs=32, outputs=7168, group=32, levels="float8_e4m3fn", experts=256),
]


EXPERTS = [
    ExpertKernel(),
    ExpertKernel(tokens=512, hidden=2880, columns=2880, own=4, experts=32, chosen=4, biases=True),  # gpt-oss
]
MORE_EXPERTS = [
    ExpertKernel(tokens=2048),
    ExpertKernel(dtype="int8"),
    ExpertKernel(tokens=256, hidden=4096, columns=1536, own=16, experts=128),  # Qwen3-235B-A22B
    ExpertKernel(tokens=512, hidden=7168, columns=2048, own=8, experts=256),  # DeepSeek-V3
    ExpertKernel(tokens=1, hidden=4096, columns=448, own=8, experts=8, chosen=2),  # Mixtral on 32 devices
]


def check_experts(kernels: list[ExpertKernel], outcomes: list[Outcome]) -> None:
    """Weights are not copied, and tokens are not copied for each of their experts."""
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        rows = kernel.tokens * kernel.chosen + 128 * kernel.own
        assert outcome.temporary < rows * (4 * kernel.columns + 128), kernel


def check_groups(kernels: list[GroupKernel], outcomes: list[Outcome]) -> None:
    """Weights are not widened, nor copied, in memory."""
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        assert outcome.temporary < max(kernel.experts, 1) * kernel.inputs * kernel.outputs // 4, kernel


def check_filters(kernels: list[FilterKernel], outcomes: list[Outcome]) -> None:
    """Lines are padded to whole programs and columns, and there is no other copy of them."""
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        assert outcome.temporary < 4 * 8 * -(-kernel.lines // 8) * (kernel.vocab_size + 4096) + 2**20, kernel


def check_convolutions(kernels: list[ConvolutionKernel], outcomes: list[Outcome]) -> None:
    """Pools are updated in place, and not copied; tokens have at most float32 inputs and outputs."""
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        pool = math.prod(kernel.pool) * {"float32": 4, "bfloat16": 2}[kernel.storage]
        assert outcome.in_place == pool, kernel
        tokens = (kernel.tokens + 32) * 4 * math.prod(kernel.pool[2:])
        assert outcome.temporary < max(3 * tokens, pool // 2), kernel


def check_states(kernels: list[StateKernel], outcomes: list[Outcome]) -> None:
    """Pools are updated in place, and not copied."""
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        pool = math.prod(kernel.pool) * {"float32": 4, "bfloat16": 2}[kernel.states]
        assert outcome.in_place == pool, kernel
        # Queries, keys, values and outputs, one head at a time, and decays, which take a whole lane each.
        tokens = kernel.tokens + 64
        inputs = 4 * tokens * kernel.heads * (2 * kernel.key_dim + 2 * max(kernel.value_dim, 128) + 128)
        assert outcome.temporary < max(2 * inputs, pool // 2), kernel


def check(kernels: list[Kernel], outcomes: list[Outcome]) -> None:
    for kernel, outcome in zip(kernels, outcomes, strict=True):
        assert outcome.error is None, (kernel, outcome.error)
        parts = 1 if kernel.value_dim is not None else 2
        parts_and_lanes = 128 if 2 * kernel.head_dim <= 128 else parts * -(-kernel.head_dim // 128) * 128
        itemsize = {"float32": 4, "bfloat16": 2}.get(kernel.storage, 1)
        pages = 256 * kernel.kv_heads * kernel.page_size * parts_and_lanes * itemsize
        assert outcome.in_place == pages, kernel
        assert outcome.temporary < pages, kernel


ON_V6E: list[AnyKernel] = [*STATES, *KERNELS, *CONVOLUTIONS, *FILTERS, *GROUPS, *EXPERTS, TOO_LARGE]


@pytest.fixture(scope="module")
def on_v6e() -> list[Outcome]:
    return compile_kernels("v6e", ON_V6E)


def of(kernels: Sequence[AnyKernel], outcomes: list[Outcome]) -> list[Outcome]:
    """The outcomes of some of `ON_V6E`."""
    first = ON_V6E.index(kernels[0])
    return outcomes[first : first + len(kernels)]


@pytest.mark.slow
def test_kernels_compile(on_v6e: list[Outcome]) -> None:
    check(KERNELS, of(KERNELS, on_v6e))


@pytest.mark.slow
def test_kernels_of_states_compile(on_v6e: list[Outcome]) -> None:
    check_states(STATES, of(STATES, on_v6e))


@pytest.mark.slow
def test_kernels_of_convolutions_compile(on_v6e: list[Outcome]) -> None:
    check_convolutions(CONVOLUTIONS, of(CONVOLUTIONS, on_v6e))


@pytest.mark.slow
def test_kernels_of_filters_compile(on_v6e: list[Outcome]) -> None:
    check_filters(FILTERS, of(FILTERS, on_v6e))


@pytest.mark.slow
def test_experts_compile(on_v6e: list[Outcome]) -> None:
    check_experts(EXPERTS, of(EXPERTS, on_v6e))


@pytest.mark.slow
def test_products_in_groups_compile(on_v6e: list[Outcome]) -> None:
    check_groups(GROUPS, of(GROUPS, on_v6e))


def test_blocks_that_do_not_fit_are_refused(on_v6e: list[Outcome]) -> None:
    assert on_v6e[-1].error is not None
    assert "vmem" in on_v6e[-1].error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "kernel"),
    [
        pytest.param("v5e", LLAMA_8B_MIXED, marks=pytest.mark.soak, id="v5e"),
        pytest.param("tpu7x", QWEN3_32B_MIXED, id="tpu7x"),
    ],
)
def test_a_mixed_step_compiles_for_other_chips(chip: str, kernel: Kernel) -> None:
    """It runs every kernel."""
    mixed = [kernel, STATES[1], CONVOLUTIONS[1], FILTERS[0], *GROUPS, *EXPERTS]
    attention, states, convolution, filters, *further = compile_kernels(chip, mixed)
    check([kernel], [attention])
    check_states([STATES[1]], [states])
    check_convolutions([CONVOLUTIONS[1]], [convolution])
    check_filters([FILTERS[0]], [filters])
    check_groups(GROUPS, further[: len(GROUPS)])
    check_experts(EXPERTS, further[len(GROUPS) :])


SHARED = {"paged_attention_decode", "paged_attention_prefill", "kv_write_runs", "state_rows", "state_chunks"}
ALONE = {"kv_write", "convolution_rows", "convolution_chunks"}
"""Kernels of a mixed step whose programs two cores share, and which one core runs: two of its programs may write
into one tile, or a program waits for the previous one's copies."""


SMALL = Kernel(heads=2, kv_heads=1, tokens=512, rows=32, columns=8)
SMALL_STATES = StateKernel(heads=18, groups=18, tokens=128, rows=4, slots=8)
SMALL_CONVOLUTION = ConvolutionKernel(channels=1024, tokens=64, rows=4, slots=8)
"""Of all kernels, but quick to compile: writing a schedule takes as long as making it."""


def schedules(folder: Path) -> dict[str, str]:
    """The compiler's schedules, by kernel."""
    found = {}
    for path in folder.glob("*-final_bundles.txt"):
        name = re.fullmatch(r"\d+-(\w+?)(\.\d+)*-\d+-final_bundles.txt", path.name)
        if name is not None and name[1] in SHARED | ALONE:
            found[name[1]] = path.read_text()
    return found


@pytest.mark.slow
def test_two_cores_of_a_device_share_programs(tmp_path: Path) -> None:
    """In the schedule the cores meet before a kernel that both run; the second core skips the others."""
    mixed = [SMALL, SMALL_STATES, SMALL_CONVOLUTION]
    assert {outcome.error for outcome in compile_kernels("v5p", mixed, tmp_path)} == {None}
    found = schedules(tmp_path)
    assert found.keys() == SHARED | ALONE
    assert {name for name, text in found.items() if "BarrierMegacore" in text} == SHARED
    assert not any(CHECK in text for text in found.values())


CHECK = "BoundsCheck"
"""How an out-of-bounds address is reported, with the copy or load."""


FIXED = (SHARED | ALONE) - {"paged_attention_decode", "state_chunks", "convolution_rows"}
"""Kernels of results that do not depend on the step."""


@pytest.mark.soak
@pytest.mark.parametrize(("fixed", "kernels"), [(False, SHARED | ALONE), (True, FIXED)])
def test_debugging_compiles_checks_in(fixed: bool, kernels: set[str], tmp_path: Path) -> None:
    checked = [replace(kernel, checked=True, fixed=fixed) for kernel in (SMALL, SMALL_STATES, SMALL_CONVOLUTION)]
    assert {outcome.error for outcome in compile_kernels("v6e", checked, tmp_path)} == {None}
    found = schedules(tmp_path)
    assert found.keys() == kernels
    assert {name for name, text in found.items() if CHECK not in text} == set()


@pytest.mark.soak
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_variant_compiles(chip: str) -> None:
    kernels = KERNELS + MORE
    check(kernels, compile_kernels(chip, kernels))


@pytest.mark.soak
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_every_variant_of_states_compiles(chip: str) -> None:
    kernels = STATES + MORE_STATES
    check_states(kernels, compile_kernels(chip, kernels))
    convolutions = CONVOLUTIONS + MORE_CONVOLUTIONS
    check_convolutions(convolutions, compile_kernels(chip, convolutions))


@pytest.mark.soak
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_variant_of_filters_compiles(chip: str) -> None:
    """Except for vocabularies that do not fit into the vector memory of a v4, which are searched without the kernel."""
    kernels = FILTERS + MORE_FILTERS
    outcomes = compile_kernels(chip, kernels)
    refused = [kernel for kernel, outcome in zip(kernels, outcomes, strict=True) if outcome.error == "it does not fit"]
    assert refused == ([kernel for kernel in kernels if kernel.vocab_size > 140_000] if chip == "v4" else [])
    fitting = [pair for pair in zip(kernels, outcomes, strict=True) if pair[0] not in refused]
    check_filters(*map(list, zip(*fitting, strict=True)))


@pytest.mark.soak
@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
def test_every_variant_of_groups_compiles(chip: str) -> None:
    kernels = GROUPS + MORE_GROUPS
    check_groups(kernels, compile_kernels(chip, kernels))


@pytest.mark.soak
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_every_variant_of_experts_compiles(chip: str) -> None:
    """Except on a v4, whose vector memory has no room for many tokens, nor for much of wide matrices."""
    kernels = EXPERTS + MORE_EXPERTS
    outcomes = compile_kernels(chip, kernels)
    found = [
        (kernel, each) for kernel, each in zip(kernels, outcomes, strict=True) if "do not fit" not in (each.error or "")
    ]
    assert len(found) == (len(kernels) - 4 if chip == "v4" else len(kernels))
    check_experts(*map(list, zip(*found, strict=True)))
