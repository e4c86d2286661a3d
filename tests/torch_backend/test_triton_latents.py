"""Attention over latent vectors by the Triton kernel, in the interpreter against numpy in float64: shuffled pages, NaN
in every unused slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.latent_steps import LATENTS, LatentStep, expanded_in_float64
from helpers.torch_latents import attend_step, check_errors, torch_step
from helpers.triton_attention import AMPERE, HOPPER
from helpers.triton_interpreter import shuffled_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.triton import TritonAttention
from torch_backend.kernels import latent_plan
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.latent_attention import latent_attention
from torch_backend.kernels.latent_plan import LatentPlan, latent_tile, plan_latent_chunks, plan_latent_decode
from torch_backend.kv_pages import KVPages

assert helpers.triton_interpreter  # imported for its side effects

SPLIT = 256
CPU = torch.device("cpu")
PARTS = LATENTS.latent, LATENTS.rotary_dim
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Fraction of the largest output. Absorbed queries are rounded too."""


def attend(
    step: LatentStep,
    config: LatentAttentionConfig,
    dtype: torch.dtype = torch.float32,
    chip: Chip = HOPPER,
    kv: KVPages | None = None,
) -> torch.Tensor:
    return attend_step(TritonAttention(chip), step, config, dtype, expands_from=config.expands_from, kv=kv)


def check(
    kv_lens: tuple[int, ...],
    config: LatentAttentionConfig = LATENTS,
    dtype: torch.dtype = torch.float32,
    chip: Chip = HOPPER,
    **options: Any,
) -> None:
    step = torch_step(config, kv_lens, dtype, **options)
    check_errors(attend(step, config, dtype, chip), step, TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_edges_of_tiles_and_splits(page_size: int) -> None:
    edges = (1, 31, 32, 33, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 70)
    check(edges, page_size=page_size)


@pytest.mark.parametrize(
    ("heads", "latent", "rotary"), [(1, 32, 8), (5, 48, 16), (16, 512, 64), (20, 96, 32), (40, 256, 32), (128, 64, 16)]
)
def test_heads_and_sizes(heads: int, latent: int, rotary: int) -> None:
    config = replace(LATENTS, num_heads=heads, latent=latent, rotary_dim=rotary)
    check((9, 1, SPLIT + 40), config, page_size=16)


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_types(chip: Chip, dtype: torch.dtype) -> None:
    check((9, 1, 70, SPLIT + 20), dtype=dtype, chip=chip)


def test_chunks_that_cross_a_split() -> None:
    """Some queries of a block see no key of its last split."""
    check((SPLIT + 2, 2 * SPLIT + 1, SPLIT), query_lens=(5, 2, 30))


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize(("heads", "count"), [(1, 70), (5, 30), (16, 9), (33, 3), (128, 2)])
def test_blocks_of_a_chunk(chip: Chip, heads: int, count: int) -> None:
    config = replace(LATENTS, num_heads=heads)
    check((33, 90, SPLIT + 7), config, torch.bfloat16, chip, query_lens=(1, count, 4))


def test_a_chunk_of_many_blocks_has_one_split_of_each() -> None:
    step = torch_step(LATENTS, (SPLIT + 70,), torch.float32, query_lens=(60,))
    assert plan_chunk(step, 67).splits.row_bound == 1  # 4 blocks of 16 tokens with one head each
    assert plan_chunk(step, 4).splits.row_bound > 1
    with patch.object(latent_plan, "_ENOUGH_PROGRAMS", 2):
        check((SPLIT + 70, 9), query_lens=(20, 3))


def plan_chunk(step: LatentStep, heads: int) -> LatentPlan:
    starts, lens = torch.from_numpy(step.query_starts), torch.from_numpy(step.kv_lens)
    sizes = (step.page_table.shape[1] * step.pages.shape[1], heads, LATENTS.latent, torch.float32, HOPPER)
    return plan_latent_chunks(starts, lens, 0, len(step.plain), *sizes)


@st.composite
def mixed_steps(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths, and queries of each sequence; decode rows come first."""
    kv_lens = draw(st.lists(st.integers(1, 520), min_size=1, max_size=4))
    decoded = draw(st.integers(0, len(kv_lens)))
    chunks = [draw(st.integers(1, min(length, 20))) for length in kv_lens[decoded:]]
    return tuple(kv_lens), (*[1] * decoded, *chunks)


@pytest.mark.parametrize("chip", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_vectors_in_8_bits(stored: torch.dtype, dtype: torch.dtype, chip: Chip) -> None:
    """As of the numbers that are stored; the rotated keys are 30 times as large as the latent vectors."""
    step = torch_step(LATENTS, (9, 70, SPLIT + 20, 40), dtype, query_lens=(1, 1, 1, 7))
    latent, width = LATENTS.latent, LATENTS.latent + LATENTS.rotary_dim
    numbers = torch.from_numpy(step.pages).float()
    numbers[..., latent:] *= 30
    kv = KVPages.allocate(len(numbers), 1, step.pages.shape[1], width, stored, CPU, shared=True, parts=PARTS)
    assert kv.latent_scales is not None
    kv.latent_scales.values.fill_(torch.nan)
    kv.keys.view(torch.uint8).fill_(0x7F)
    page, offset = torch.nonzero(numbers[..., 0].isfinite(), as_tuple=True)
    kv.latent_scales.write(kv.keys, (page, offset), numbers[page, offset])
    rotated = step.rotated / 30
    found = attend(replace(step, rotated=rotated), LATENTS, dtype, chip, kv).double().numpy()
    read = kv.latent_scales.gather(kv.keys, torch.from_numpy(step.page_table).long()).double().numpy()
    rounded = torch.from_numpy(rotated).to(dtype).double().numpy()
    for row, (start, length) in enumerate(zip(step.query_starts, step.kv_lens, strict=False)):
        mine = slice(start, step.query_starts[row + 1])
        asked = step.plain[mine], rounded[mine]
        expected = expanded_in_float64(LATENTS, *asked, read[row, :length], step.key_up, step.value_up)
        assert np.abs(found[mine] - expected).max() <= TOLERANCE[dtype] * np.abs(expected).max()


@settings(max_examples=10, deadline=None)
@given(lens=mixed_steps(), page_size=st.sampled_from([1, 4, 32]))
def test_any_step(lens: tuple[tuple[int, ...], tuple[int, ...]], page_size: int) -> None:
    kv_lens, query_lens = lens
    check(kv_lens, page_size=page_size, query_lens=query_lens)


def test_a_chunk_does_not_depend_on_the_order_of_programs() -> None:
    step = torch_step(LATENTS, (40, 300, 520), torch.float32, query_lens=(1, 1, 9))
    whole = attend(step, LATENTS)
    with shuffled_programs(5):
        assert torch.equal(attend(step, LATENTS), whole)


@pytest.mark.parametrize(
    ("rows", "heads", "bound"),
    [(1, 16, 128), (64, 16, 128), (256, 16, 32), (64, 128, 8), (256, 128, 2)],
)
def test_results_of_splits_take_at_most_256_mib(rows: int, heads: int, bound: int) -> None:
    lens = torch.zeros(rows, dtype=torch.int32)
    plan = plan_latent_decode(lens, rows, 163_840, heads, 512, torch.bfloat16, HOPPER)
    assert plan.splits.row_bound == bound
    assert plan.partials.weighted.nbytes <= 256 * 2**20


def kernel(step: LatentStep, rows: list[int], chip: Chip = HOPPER) -> torch.Tensor:
    """The kernel's output for these rows of a step, from the same queries of each."""
    width = LATENTS.latent + LATENTS.rotary_dim
    asked = np.random.default_rng(3).standard_normal((len(step.kv_lens), 4, width)).astype(np.float32)
    queries, lens = torch.from_numpy(asked)[rows], torch.from_numpy(step.kv_lens)[rows]
    table, pages = torch.from_numpy(step.page_table)[rows], torch.from_numpy(step.pages[:, None]).float()
    longest = table.shape[1] * pages.shape[2]
    plan = plan_latent_decode(lens, len(rows), longest, 4, LATENTS.latent, pages.dtype, chip)
    output = torch.full((len(rows), 4, LATENTS.latent), torch.nan)
    latent_attention(queries, KVPages(pages, pages), table, lens, AttentionOptions(0.3), plan, output, chip)
    return output


def test_a_row_is_the_same_in_any_batch_and_on_any_chip() -> None:
    lens = (700, 9, 300, 1)
    step = torch_step(LATENTS, lens, torch.float32)
    whole = kernel(step, [0, 1, 2, 3])
    assert torch.equal(kernel(step, [0, 1, 2, 3], AMPERE), whole)
    with shuffled_programs(3):
        assert torch.equal(kernel(step, [0, 1, 2, 3]), whole)
    for rows in ([0], [2, 1], [3, 3, 0]):
        assert torch.equal(kernel(step, rows), whole[rows])


def test_rows_of_padding_are_zero() -> None:
    step = torch_step(LATENTS, (40, 300, 9), torch.float32)
    found = attend(replace(step, kv_lens=np.array([40, 0, 9], np.int32)), LATENTS)
    assert not found[1].any()
    assert torch.equal(found[[0, 2]], attend(step, LATENTS)[[0, 2]])
    step = torch_step(LATENTS, (40, 30, 9), torch.float32, query_lens=(3, 20, 2))
    found = attend(replace(step, kv_lens=np.array([40, 0, 9], np.int32)), LATENTS)
    assert not found[3:23].any()
    others = [0, 1, 2, 23, 24]
    assert torch.equal(found[others], attend(step, LATENTS)[others])


@pytest.mark.parametrize(
    ("heads", "dtype", "capability", "blocks"),
    [
        (1, torch.bfloat16, 90, 1),
        (128, torch.bfloat16, 90, 2),
        (96, torch.float16, 90, 2),
        (65, torch.bfloat16, 90, 5),
        (128, torch.bfloat16, 80, 4),
        (40, torch.bfloat16, 100, 2),
        (67, torch.bfloat16, 100, 67),
        (128, torch.float32, 90, 8),
    ],
)
def test_heads_are_divided_into_equal_blocks(heads: int, dtype: torch.dtype, capability: int, blocks: int) -> None:
    assert latent_tile(heads, dtype, Chip(capability, 100)).blocks == blocks


def test_what_the_kernel_does_not_support_is_refused() -> None:
    queries, output = torch.zeros(1, 4, 40), torch.zeros(1, 4, 32)
    pages = torch.zeros(2, 1, 16, 40)
    lens = torch.ones(1, dtype=torch.int32)
    plan = plan_latent_decode(lens, 1, 16, 4, 32, torch.float32, HOPPER)
    table = torch.ones(1, 1, dtype=torch.int32)

    def run(options: AttentionOptions, pages: torch.Tensor = pages) -> None:
        latent_attention(queries, KVPages(pages, pages), table, lens, options, plan, output, HOPPER)

    with pytest.raises(ValueError, match="no window, no soft cap and no sinks"):
        run(AttentionOptions(1.0, window=4))
    with pytest.raises(ValueError, match=r"queries of 40 numbers and outputs of 32 do not fit pages \(2, 1, 16, 48\)"):
        run(AttentionOptions(1.0), torch.zeros(2, 1, 16, 48))
