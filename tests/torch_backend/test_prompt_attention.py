"""Attention of prompts by a CPU kernel against numpy in float64, over shuffled pages with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import cpu_attention
from helpers.torch_attention_steps import Case, error, make_step
from numba import config

from sglang_jax.config import EngineConfig
from sglang_jax.cpu_kernels.prompt_tiles import EIGHTS, FOURS, PAIRS, SIXTEENS, Products
from sglang_jax.cpu_kernels.vectors import supported
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.cpu_prompts import CpuPrompts
from torch_backend.attention.interface import HeadForm
from torch_backend.cpu_trial import CpuForm, CpuKernelsError, make_cpu_kernels

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
"""float32: rounding of sums. bfloat16: one rounding of an output below 4, and weights that are rounded before they are
summed."""

MIXED = Case(kv_lens=(9, 1, 30, 7, 5), query_lens=(1, 1, 13, 7, 1), num_decode=2)
PROMPTS = Case(kv_lens=(75, 64, 3, 400), query_lens=(75, 20, 2, 333), num_decode=0)
WHOLE = Case(kv_lens=(1, 1, 30, 64, 333), query_lens=(1, 1, 30, 64, 333), num_decode=2, causal=False)
STEPS = {"mixed": MIXED, "prompts": PROMPTS}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for a dtype, and how it multiplies."""

    dtype: torch.dtype
    products: Products


KERNELS = {
    "float32-128": Kernel(torch.float32, FOURS),
    "float32-512": Kernel(torch.float32, SIXTEENS),
    "bfloat16-widened": Kernel(torch.bfloat16, EIGHTS),
    "bfloat16-pairs": Kernel(torch.bfloat16, PAIRS),
}
"""All that this processor can run: LLVM divides vectors that are too long for it."""

if not supported():
    del KERNELS["bfloat16-pairs"]

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)


def attention_of(case: Case, kernel: Kernel) -> CpuAttention:
    return cpu_attention(kernel.dtype, HeadForm(case.head_dim, case.group), prompts=kernel.products)


def check(case: Case, kernel: Kernel) -> None:
    """With NaN in the kernel's work memory."""
    attention = attention_of(case, kernel)
    assert attention.prompts is not None
    attention.prompts.scratch.fill_(0xFF)
    assert error(attention, make_step(replace(case, dtype=kernel.dtype))) < TOLERANCE[kernel.dtype]


@every_kernel
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 128])
def test_page_sizes(kernel: Kernel, page_size: int) -> None:
    for case in (MIXED, PROMPTS):
        check(replace(case, page_size=page_size), kernel)


def test_heads_larger_than_the_sums_of_a_row_but_not_twice_as_large() -> None:
    check(replace(PROMPTS, kv_heads=2, group=7, head_dim=96, page_size=16), KERNELS["float32-512"])


@every_kernel
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_options(kernel: Kernel, window: int | None, soft_cap: float | None, sinks: bool) -> None:
    for case in (MIXED, PROMPTS):
        check(replace(case, window=window, soft_cap=soft_cap, sinks=sinks), kernel)


@every_kernel
def test_texts_whose_tokens_see_all_others(kernel: Kernel) -> None:
    for soft_cap, sinks in ((None, False), (1.5, True)):
        check(replace(WHOLE, soft_cap=soft_cap, sinks=sinks), kernel)


@every_kernel
@pytest.mark.parametrize("window", [None, 70])
def test_a_token_s_result_is_the_same_in_any_chunk_bit_for_bit(kernel: Kernel, window: int | None) -> None:
    """The last 333 tokens of a sequence, in a step with others or in separate chunks."""
    whole = make_step(replace(PROMPTS, dtype=kernel.dtype, window=window, page_size=16))
    attention = attention_of(PROMPTS, kernel)
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


@every_kernel
@pytest.mark.parametrize("factor", [0.0, 1e4])
def test_scores_all_equal_and_far_apart(kernel: Kernel, factor: float) -> None:
    """Compared with torch's attention of the same numbers in float64."""
    step = make_step(replace(PROMPTS, dtype=kernel.dtype, page_size=16))
    queries = step.queries * factor
    found = attention_of(PROMPTS, kernel).prepare(step.batch)(queries, step.kv, step.options)[-333:]
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
    # Sums of products of 1e4 have an error of 1e-2 in float32.
    assert float((found.double() - expected).abs().max()) < (TOLERANCE[kernel.dtype] if factor == 0 else 1.6e-2)


@every_kernel
def test_nan_of_a_query_affects_only_its_own_token(kernel: Kernel) -> None:
    step = make_step(replace(PROMPTS, dtype=kernel.dtype, page_size=16))
    queries = step.queries.clone()
    queries[80, 1, 5] = torch.nan
    found = attention_of(PROMPTS, kernel).prepare(step.batch)(queries, step.kv, step.options)
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
    form = CpuForm(torch.float32, torch.float32, (HeadForm(64, 2),))
    with pytest.raises(CpuKernelsError, match=r"wrong results on this machine \(attention of prompts\)"):
        make_cpu_kernels(form, EngineConfig().cache_folder())


def test_heads_that_do_not_fill_vectors_use_torch() -> None:
    assert CpuPrompts.take([HeadForm(64, 3), HeadForm(96, 1)])
    assert not CpuPrompts.take([HeadForm(64, 3), HeadForm(80, 1)])


@pytest.mark.parametrize(
    ("features", "in_float32", "in_bfloat16"),
    [
        ("", FOURS, FOURS),
        ("+avx,-avx2", FOURS, FOURS),
        ("+avx2,-avx512bw", EIGHTS, EIGHTS),
        ("+avx2,+avx512bw,-avx512bf16", SIXTEENS, SIXTEENS),
        ("+avx2,+avx512bw,+avx512bf16", SIXTEENS, PAIRS),
    ],
)
def test_products_are_those_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, features: str, in_float32: Products, in_bfloat16: Products
) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    assert (Products.of(4), Products.of(2)) == (in_float32, in_bfloat16)
