"""Logits that do not depend on the batch, chunks or cached prefixes, bit for bit, on the Torch backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT, prompts
from helpers.fixed_rows import differences
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_attention_steps import Case, make_step
from helpers.torch_paged_model import TorchPagedModel
from torch.nn import functional

from torch_backend.attention.fixed import BlockAttention
from torch_backend.elementwise import evenly
from torch_backend.layers.row_tiles import TILE_ROWS, RowTiles, sizes_of_tiles
from torch_backend.parallel import DistributedTensorParallel

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT
MOST = 48
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("name", "numba", "dtype"),
    [
        ("gpt_oss", False, FLOAT32),
        ("qwen3_5", False, BFLOAT16),
        soak("qwen2_moe", True, FLOAT32),
        soak("deepseek_v3", False, FLOAT32),
        soak("gemma2", True, FLOAT32),
        soak("gemma2", False, BFLOAT16),
        soak("gpt_oss", False, BFLOAT16),
        soak("qwen3_5", False, FLOAT32),
        soak("mamba2", False, FLOAT32),
        soak("falcon_h1", False, FLOAT32),
        soak("deepseek_v3", False, BFLOAT16),
    ],
)
def test_logits_do_not_depend_on_the_step(name: str, numba: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Without `fixed`, most of these logits differ."""
    case = CASES[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    columns = -(-64 // case.page_size)
    model = TorchPagedModel(folder, dtype=dtype, numba=numba, page_size=case.page_size, columns=columns, fixed=True)
    assert differences(model, prompts(), MOST, states=name in HYBRIDS) == 0


@pytest.mark.parametrize("head_dim", [10, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_attention_does_not_depend_on_where_a_chunk_begins(head_dim: int, window: int | None) -> None:
    """MKL rounds products of 10 columns by the place of a row."""
    case = Case(kv_lens=(150,), query_lens=(40,), num_decode=0, kv_heads=1, group=3, head_dim=head_dim, window=window)
    step, attention = make_step(case), BlockAttention()
    whole = attention.prepare(step.batch)(step.queries, step.kv, step.options)
    assert torch.allclose(whole.double(), torch.from_numpy(step.expected), atol=1e-5)
    for first, last in ((39, 40), (3, 23), (17, 22), (6, 40)):
        batch = replace(
            step.batch,
            tokens=step.batch.tokens[first:last],
            positions=step.batch.positions[first:last],
            kv_lens=step.batch.kv_lens - 40 + last,
            query_starts=torch.tensor([0, last - first], dtype=torch.int32),
        )
        found = attention.prepare(batch)(step.queries[first:last], step.kv, step.options)
        assert torch.equal(found, whole[first:last])


def test_sums_over_ranks_do_not_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = torch.randn((5, 70, 24), generator=torch.Generator().manual_seed(0)).to(BFLOAT16)

    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: object) -> None:
        """Finds the rows of the other ranks by those of the first."""
        rows = (ranks[0][:, None] == x).all(-1).int().argmax(0)
        for part, rank in zip(parts, ranks, strict=True):
            part.copy_(rank[rows])

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: len(ranks))
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    parallel = DistributedTensorParallel(None, None, in_order=True)
    whole = parallel.all_reduce(ranks[0])
    assert torch.equal(whole, torch.cat([parallel.all_reduce(ranks[0][row : row + 7]) for row in range(0, 70, 7)]))
    assert torch.allclose(whole.double(), ranks.double().sum(0), rtol=2**-8, atol=1e-5)


def by_size(x: torch.Tensor) -> torch.Tensor:
    """A product that rounds by its number of rows."""
    return x * (1 + len(x) / 1024)


def by_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1, len(x) + 1)[:, None]


@pytest.mark.parametrize(
    ("product", "sizes"),
    [(torch.neg, TILE_ROWS), (by_size, TILE_ROWS[:1]), (by_place, (1,))],
    ids=["same", "size", "place"],
)
def test_tiles_are_as_large_as_a_product_allows(
    product: Callable[[torch.Tensor], torch.Tensor], sizes: tuple[int, ...]
) -> None:
    assert sizes_of_tiles(product, 8, FLOAT32) == sizes
    x = torch.randn((2 * TILE_ROWS[1] + 21, 8), generator=torch.Generator().manual_seed(0))
    tiled = RowTiles(product, sizes)
    whole = tiled(x)
    for first, last in ((0, 0), (0, 1), (5, 21), (5, 22), (100, len(x))):
        assert torch.equal(tiled(x[first:last]), whole[first:last])


@pytest.mark.parametrize(
    "function", [torch.sigmoid, functional.silu, functional.softplus], ids=lambda each: each.__name__
)
def test_a_function_of_elements_does_not_depend_on_their_place(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2**15 + 5, generator=torch.Generator().manual_seed(0))
    whole = evenly(function, x)
    for size in (1, 7, 33):
        parts = torch.cat([evenly(function, part) for part in torch.split(x[: 100 * size], size)])
        assert torch.equal(parts, whole[: 100 * size])
    assert torch.allclose(whole, function(x))
