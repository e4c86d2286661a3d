"""Attention by CPU kernels against numpy in float64, over shuffled pages with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.cpu_kernels import cpu_attention
from helpers.torch_attention_steps import Case, error, make_step

from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.interface import AttentionOptions, HeadForm

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
"""float32: rounding of sums. bfloat16: one rounding of an output below 4, which is half of 2^-7 times 2."""

DECODE = Case(kv_lens=(9, 1, 30, 140, 16), query_lens=(1,) * 5, num_decode=5, padding=3)
LONG = Case(kv_lens=(255, 256, 257, 3, 1100, 512), query_lens=(1,) * 6, num_decode=6)
MIXED = Case(kv_lens=(9, 1, 30, 7, 5), query_lens=(1, 1, 13, 7, 1), num_decode=2)
PREFILL = Case(kv_lens=(75, 64, 3), query_lens=(75, 20, 2), num_decode=0)
STEPS = {"decode": DECODE, "long": LONG, "mixed": MIXED, "prefill": PREFILL}

every_step = pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def attention_of(case: Case) -> CpuAttention:
    return cpu_attention(case.dtype, HeadForm(case.head_dim, case.group))


def check(case: Case) -> None:
    assert error(attention_of(case), make_step(case)) < TOLERANCE[case.dtype]


@every_step
@every_dtype
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_sizes(case: Case, page_size: int, dtype: torch.dtype) -> None:
    check(replace(case, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("case", [DECODE, LONG, MIXED], ids=["decode", "long", "mixed"])
@every_dtype
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 1, 64), (3, 3, 80), (1, 4, 96), (2, 8, 128)])
def test_heads(case: Case, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    check(replace(case, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype, page_size=16))


@every_step
@every_dtype
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 300])
def test_options(case: Case, window: int | None, soft_cap: float | None, sinks: bool, dtype: torch.dtype) -> None:
    check(replace(case, window=window, soft_cap=soft_cap, sinks=sinks, dtype=dtype))


@every_dtype
def test_a_row_s_result_is_batch_invariant_bit_for_bit(dtype: torch.dtype) -> None:
    """A single row is computed by one thread, a batch by all."""
    many = make_step(replace(LONG, dtype=dtype))
    together = cpu_attention(dtype, HeadForm(64, 2)).prepare(many.batch)(many.queries, many.kv, many.options)
    for row in range(len(LONG.kv_lens)):
        batch = replace(
            many.batch,
            page_table=many.batch.page_table[row : row + 1],
            kv_lens=many.batch.kv_lens[row : row + 1],
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            tokens=many.batch.tokens[:1],
            num_decode=1,
        )
        alone = cpu_attention(dtype, HeadForm(64, 2)).prepare(batch)(many.queries[row : row + 1], many.kv, many.options)
        assert torch.equal(alone[0], together[row])


@every_dtype
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_nan_affects_only_its_own_row(part: str, dtype: torch.dtype) -> None:
    """A model whose numbers overflow must not continue as if nothing were wrong."""
    step = make_step(replace(DECODE, dtype=dtype, page_size=16))
    page = int(step.batch.page_table[2, 1])
    {"queries": step.queries[2], "keys": step.kv.keys[page, :, 3], "values": step.kv.values[page, :, 3]}[part].fill_(
        torch.nan
    )
    found = cpu_attention(dtype, HeadForm(64, 2)).prepare(step.batch)(step.queries, step.kv, step.options)
    assert bool(found[2].isnan().all())
    assert not bool(found[[0, 1, 3, 4]].isnan().any())


def test_scores_far_apart_and_all_equal() -> None:
    step = make_step(replace(LONG, page_size=16))
    kv = step.kv
    for factor in (0.0, 1e4):
        queries = step.queries * factor
        found = cpu_attention(torch.float32, HeadForm(64, 2)).prepare(step.batch)(
            queries, kv, AttentionOptions(scale=1.0)
        )
        for row, length in enumerate(LONG.kv_lens):
            pages = step.batch.page_table[row].long()
            keys, values = (
                part[pages].transpose(0, 1).flatten(1, 2)[:, :length].double().repeat_interleave(2, 0)
                for part in (kv.keys, kv.values)
            )
            scores = torch.einsum("hd,hkd->hk", queries[row].double(), keys)
            expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
            assert (found[row] - expected).abs().max() < (2e-6 if factor == 0 else 0.05)


def test_unsupported_shapes_are_refused() -> None:
    step = make_step(DECODE)
    attention = cpu_attention(torch.bfloat16, HeadForm(64, 2))
    made_for = r"made for torch.bfloat16, HeadForm\(head_dim=64, group=2\) and pages of torch.bfloat16"
    with pytest.raises(TypeError, match=rf"{made_for} was given torch.float32, HeadForm\(head_dim=64, group=2\) and"):
        attention.prepare(step.batch)(step.queries, step.kv, step.options)
