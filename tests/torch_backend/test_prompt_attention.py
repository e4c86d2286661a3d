"""Attention of prompts by a CPU kernel against numpy in float64, over shuffled pages with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import cpu_attention
from helpers.torch_attention_steps import Case, error, make_step

from sglang_jax.config import EngineConfig
from sglang_jax.cpu_kernels.vectors import supported
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.cpu_prompts import CpuPrompts
from torch_backend.attention.interface import HeadForm
from torch_backend.cpu_trial import CpuForm, CpuKernelsError, make_cpu_kernels

pytestmark = pytest.mark.skipif(not supported(), reason="kernels need a processor with avx512_bf16")

TOLERANCE = 1.6e-2
"""One rounding of an output below 4 to bfloat16, and weights that are rounded before they are summed."""

MIXED = Case(kv_lens=(9, 1, 30, 7, 5), query_lens=(1, 1, 13, 7, 1), num_decode=2, dtype=torch.bfloat16)
PROMPTS = Case(kv_lens=(75, 64, 3, 400), query_lens=(75, 20, 2, 333), num_decode=0, dtype=torch.bfloat16)
STEPS = {"mixed": MIXED, "prompts": PROMPTS}

every_step = pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)


def attention_of(case: Case) -> CpuAttention:
    return cpu_attention(torch.bfloat16, HeadForm(case.head_dim, case.group), prompts=True)


def check(case: Case) -> None:
    """With NaN in the kernel's work memory."""
    attention = attention_of(case)
    assert attention.prompts is not None
    attention.prompts.scratch.fill_(0xFF)
    assert error(attention, make_step(case)) < TOLERANCE


@every_step
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128])
def test_page_sizes(case: Case, page_size: int) -> None:
    check(replace(case, page_size=page_size))


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 7, 96)])
def test_heads(kv_heads: int, group: int, head_dim: int) -> None:
    check(replace(PROMPTS, kv_heads=kv_heads, group=group, head_dim=head_dim, page_size=16))


@every_step
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_options(case: Case, window: int | None, soft_cap: float | None, sinks: bool) -> None:
    check(replace(case, window=window, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("window", [None, 70])
def test_a_token_s_result_is_the_same_in_any_chunk_bit_for_bit(window: int | None) -> None:
    """The last 333 tokens of a sequence, in a step with others or in separate chunks."""
    whole = make_step(replace(PROMPTS, window=window, page_size=16))
    attention = attention_of(PROMPTS)
    together = attention.prepare(whole.batch)(whole.queries, whole.kv, whole.options)[-333:]
    done = 0
    for count in (1, 64, 5, 130, 133):
        batch = replace(
            whole.batch,
            page_table=whole.batch.page_table[-1:],
            kv_lens=torch.tensor([400 - 333 + done + count], dtype=torch.int32),
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            tokens=whole.batch.tokens[:count],
            num_decode=0,
        )
        queries = whole.queries[-333:][done : done + count]
        found = attention.prepare(batch)(queries, whole.kv, whole.options)
        assert torch.equal(found, together[done : done + count])
        done += count
    assert done == 333


@pytest.mark.parametrize("factor", [0.0, 1e4])
def test_scores_all_equal_and_far_apart(factor: float) -> None:
    """Compared with torch's attention of the same numbers in float64."""
    step = make_step(replace(PROMPTS, page_size=16))
    queries = step.queries * factor
    found = attention_of(PROMPTS).prepare(step.batch)(queries, step.kv, step.options)[-333:]
    pages = step.batch.page_table[-1].long()
    keys, values = (
        part[pages].transpose(0, 1).flatten(1, 2)[:, :400].double().repeat_interleave(PROMPTS.group, 0)
        for part in (step.kv.keys, step.kv.values)
    )
    hidden = torch.ones(333, 400, dtype=torch.bool).triu(68)
    scores = (queries[-333:].double().transpose(0, 1) @ keys.transpose(1, 2) * step.options.scale).masked_fill(
        hidden, -torch.inf
    )
    expected = (scores.softmax(-1) @ values).transpose(0, 1)
    assert float((found.double() - expected).abs().max()) < TOLERANCE


def test_nan_of_a_query_affects_only_its_own_token() -> None:
    step = make_step(replace(PROMPTS, page_size=16))
    queries = step.queries.clone()
    queries[80, 1, 5] = torch.nan
    found = attention_of(PROMPTS).prepare(step.batch)(queries, step.kv, step.options)
    assert bool(found[80, 1].isnan().all())
    found[80, 1] = 0
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("wrong", [1.05, float("nan")])
def test_a_kernel_that_computes_wrongly_is_rejected(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = CpuPrompts.attend_into

    def scaled(prompts: CpuPrompts, output: torch.Tensor, *arguments: Any) -> None:
        right(prompts, output, *arguments)
        output *= wrong

    monkeypatch.setattr(CpuPrompts, "attend_into", scaled)
    form = CpuForm(torch.bfloat16, torch.bfloat16, (HeadForm(64, 2),))
    with pytest.raises(CpuKernelsError, match=r"wrong results on this machine \(attention of prompts\)"):
        make_cpu_kernels(form, EngineConfig().cache_folder())


def test_heads_that_do_not_fill_vectors_use_torch() -> None:
    assert CpuPrompts.take([HeadForm(64, 3), HeadForm(96, 1)])
    assert not CpuPrompts.take([HeadForm(64, 3), HeadForm(80, 1)])
