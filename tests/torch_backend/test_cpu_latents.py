"""Attention over latent vectors by kernels for CPUs, against numpy in float64: shuffled pages, NaN in every unused
slot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.cpu_kernels import cpu_latents
from helpers.family_cases import LATENT, check_family
from helpers.latent_steps import LATENTS, LatentStep
from helpers.torch_latents import attend_step, check_errors, torch_step
from helpers.torch_paged_model import TorchPagedModel

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.cpu_kernels.prompt_attention import heads_of_item
from sglang_jax.cpu_kernels.prompt_tiles import EIGHTS, FOURS, PAIRS, SIXTEENS, Products
from sglang_jax.cpu_kernels.vectors import supported
from torch_backend.attention.cpu_latents import CpuLatents
from torch_backend.attention.interface import LatentForm
from torch_backend.layers.row_tiles import TILE_ROWS

SMALL = replace(LATENTS, rotary_dim=32)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 3 * 2**-8}
"""Fraction of the largest output. Absorbed queries are rounded too, and for pairs weights."""

NEEDS_PAIRS = pytest.mark.skipif(not supported(), reason="a processor without products of bfloat16")


def attend(
    step: LatentStep,
    config: LatentAttentionConfig,
    dtype: torch.dtype = torch.float32,
    products: Products | None = None,
    *,
    expands: bool = False,
    tile: int | None = None,
    attention: CpuLatents | None = None,
) -> torch.Tensor:
    form = LatentForm(config.num_heads, config.latent, config.rotary_dim)
    attention = attention or cpu_latents(dtype, form, products=products)
    expands_from = config.expands_from if expands else None
    return attend_step(attention, step, config, dtype, expands_from=expands_from, tile=tile)


def check(
    kv_lens: tuple[int, ...],
    config: LatentAttentionConfig = SMALL,
    dtype: torch.dtype = torch.float32,
    products: Products | None = None,
    *,
    expands: bool = False,
    **options: Any,
) -> None:
    step = torch_step(config, kv_lens, dtype, **options)
    check_errors(attend(step, config, dtype, products, expands=expands), step, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "products"),
    [
        (torch.float32, SIXTEENS),
        (torch.float32, EIGHTS),
        (torch.float32, FOURS),
        (torch.bfloat16, EIGHTS),
        pytest.param(torch.bfloat16, PAIRS, marks=NEEDS_PAIRS),
    ],
)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rows_and_chunks(page_size: int, products: Products, dtype: torch.dtype) -> None:
    lens = (1, 63, 64, 65, 200, 7, 90, 64)
    check(lens, dtype=dtype, products=products, page_size=page_size, query_lens=(1, 1, 1, 1, 1, 7, 50, 2))


@pytest.mark.parametrize(
    ("heads", "latent", "rotary"), [(1, 32, 32), (5, 64, 32), (16, 512, 64), (40, 256, 32), (128, 64, 64)]
)
def test_heads_and_sizes(heads: int, latent: int, rotary: int) -> None:
    config = replace(SMALL, num_heads=heads, latent=latent, rotary_dim=rotary)
    check((130, 9, 33), config, query_lens=(1, 1, 20))


def test_long_chunks_are_expanded() -> None:
    """Of at least 8 tokens, between others."""
    check((40, 30, 9, 50, 12), query_lens=(1, 8, 3, 20, 2), expands=True)
    check((20, 9), query_lens=(20, 9), expands=True)


def test_a_token_is_the_same_in_any_chunk_and_batch() -> None:
    lens, counts = (70, 100, 30), (1, 40, 30)
    step = torch_step(SMALL, lens, torch.float32, query_lens=counts)
    tile = TILE_ROWS[0]  # of the products with projections
    whole = attend(step, SMALL, tile=tile)
    for row, (first, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
        for number in (0, count // 2, count - 1):
            at = slice(first + number, first + number + 1)
            one = replace(
                step,
                plain=step.plain[at],
                rotated=step.rotated[at],
                write_slots=step.write_slots[at],
                page_table=step.page_table[row : row + 1],
                kv_lens=np.array([lens[row] - count + number + 1], np.int32),
                query_starts=np.array([0, 1], np.int32),
                num_decode=1,
            )
            assert torch.equal(attend(one, SMALL, tile=tile), whole[at])


def test_parts_of_heads_give_the_same_bits() -> None:
    """Items of 16 and of 4 heads."""
    assert heads_of_item(16) == (16, 4)
    config = replace(SMALL, num_heads=16)
    step = torch_step(config, (130, 9, 33), torch.float32, query_lens=(1, 1, 20))
    attention = cpu_latents(torch.float32, LatentForm(16, 32, 32))
    (kernels,) = attention._kernels.values()
    found = []
    for kernel in kernels:
        with patch.object(CpuLatents, "kernel_for", return_value=kernel):
            found.append(attend(step, config, attention=attention))
    assert len(found) == 2
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("heads", "groups"), [(1, (1,)), (5, (5,)), (16, (16, 4)), (20, (10, 5)), (40, (10, 5)), (67, (1,)), (128, (16, 4))]
)
def test_heads_of_an_item(heads: int, groups: tuple[int, ...]) -> None:
    assert heads_of_item(heads) == groups


def test_padding_is_zero() -> None:
    step = torch_step(SMALL, (40, 30, 9), torch.float32, query_lens=(1, 20, 2))
    found = attend(replace(step, kv_lens=np.array([40, 0, 9], np.int32)), SMALL)
    assert not found[1:21].any()
    others = [0, 21, 22]
    assert torch.equal(found[others], attend(step, SMALL)[others])


def test_what_the_kernels_were_not_made_for_is_refused() -> None:
    step = torch_step(SMALL, (9,), torch.float32)
    other = cpu_latents(torch.float32, LatentForm(8, 32, 32))
    with pytest.raises(TypeError, match=r"made for LatentForm\(heads=8.* was given LatentForm\(heads=4"):
        attend(step, SMALL, attention=other)
    wide = cpu_latents(torch.float32, LatentForm(4, 32, 32))
    with pytest.raises(TypeError, match=r"made for torch.float32 was given torch.bfloat16"):
        attend(step, SMALL, torch.bfloat16, attention=wide)


@pytest.mark.parametrize("fixed", [False, True])
def test_logits_of_a_model_equal_transformers(fixed: bool, tmp_path: Path) -> None:
    case = LATENT["deepseek_v3_in_halves"]
    changes = {**case.changes, "qk_rope_head_dim": 32, "head_dim": 32}

    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, numba=True, fixed=fixed, page_size=page_size, columns=columns)

    check_family(replace(case, changes=changes), tmp_path, load)
