"""Paged attention in plain torch against numpy in float64, over shuffled pages with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.torch_attention_steps import Case, error, make_step

from torch_backend.attention.interface import AttentionImplementation
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention

IMPLEMENTATIONS = [ReferenceAttention(), NativeAttention()]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""float32: rounding of sums. The others: one rounding of an output below 4, which is half of 2^-7 or 2^-10 times 2."""

DECODE = Case(kv_lens=(9, 1, 30, 140, 16), query_lens=(1,) * 5, num_decode=5, padding=3)
MIXED = Case(kv_lens=(9, 1, 30, 7, 5), query_lens=(1, 1, 13, 7, 1), num_decode=2)
PREFILL = Case(kv_lens=(75, 64, 3), query_lens=(75, 20, 2), num_decode=0)
ALIKE = Case(kv_lens=(20, 9, 20, 9, 20, 6, 6), query_lens=(6, 1, 6, 2, 6, 6, 6), num_decode=0)
PADDED = Case(kv_lens=(9, 12), query_lens=(1, 1), num_decode=2, padding=2)
STEPS = {"decode": DECODE, "padded": PADDED, "mixed": MIXED, "prefill": PREFILL, "alike": ALIKE}

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda it: type(it).__name__)
every_step = pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)


def check(implementation: AttentionImplementation, case: Case) -> None:
    assert error(implementation, make_step(case)) < TOLERANCE[case.dtype]


@every_implementation
@every_step
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_page_sizes(implementation: AttentionImplementation, case: Case, page_size: int) -> None:
    check(implementation, replace(case, page_size=page_size))


@every_implementation
@every_step
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 1, 64), (1, 9, 80), (3, 3, 96), (2, 4, 128)])
def test_heads(implementation: AttentionImplementation, case: Case, kv_heads: int, group: int, head_dim: int) -> None:
    check(implementation, replace(case, kv_heads=kv_heads, group=group, head_dim=head_dim))


@every_implementation
@every_step
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(implementation: AttentionImplementation, case: Case, dtype: torch.dtype) -> None:
    check(implementation, replace(case, dtype=dtype))


@every_implementation
@every_step
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_pages_with_scales(implementation: AttentionImplementation, case: Case, dtype: torch.dtype) -> None:
    check(implementation, replace(case, dtype=dtype, kv_dtype=torch.float8_e4m3fn))


@every_implementation
@every_step
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 33])
def test_options(
    implementation: AttentionImplementation, case: Case, window: int | None, soft_cap: float | None, sinks: bool
) -> None:
    check(implementation, replace(case, window=window, soft_cap=soft_cap, sinks=sinks))


@pytest.mark.parametrize("window", [None, 40])
def test_chunks_of_many_queries(window: int | None) -> None:
    """More than are masked at once, with and without a prefix."""
    case = Case(
        kv_lens=(1060, 600), query_lens=(1050, 600), num_decode=0, kv_heads=1, head_dim=16, page_size=16, window=window
    )
    check(NativeAttention(), case)


def test_sequences_of_very_different_length() -> None:
    lens = (700, 3, 690, 150, 12, 400, 128, 1)
    check(NativeAttention(), Case(kv_lens=lens, query_lens=(1,) * 8, num_decode=8, page_size=16))


def test_layers_of_different_form_in_one_step() -> None:
    """Windowed layers with sinks and plain ones take turns over one preparation of the step."""
    plain = make_step(MIXED)
    windowed = replace(plain.options, window=6, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0]))
    shared = NativeAttention().prepare(plain.batch)
    for options in (plain.options, windowed, plain.options, windowed):
        alone = ReferenceAttention().prepare(plain.batch)(plain.queries, plain.kv, options)
        assert (shared(plain.queries, plain.kv, options) - alone).abs().max() < TOLERANCE[torch.float32]
