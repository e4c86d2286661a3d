"""Paged attention in plain torch against numpy in float64, over shuffled pages with NaN in every unused slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.latent_steps import LATENTS, Numbers
from helpers.torch_attention_steps import Case, error, make_step
from helpers.torch_latents import attend_step, torch_step

from torch_backend.attention import latent
from torch_backend.attention.fixed import BlockAttention
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
WHOLE = Case(kv_lens=(1, 1, 30, 600, 30, 2), query_lens=(1, 1, 30, 600, 30, 2), num_decode=2, causal=False)
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


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, BlockAttention()], ids=lambda it: type(it).__name__)
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_texts_whose_tokens_see_all_others(implementation: AttentionImplementation, soft_cap: float | None) -> None:
    check(implementation, replace(WHOLE, soft_cap=soft_cap))


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
    """More queries than one mask covers, with and without a prefix."""
    case = Case(
        kv_lens=(1060, 600), query_lens=(1050, 600), num_decode=0, kv_heads=1, head_dim=16, page_size=16, window=window
    )
    check(NativeAttention(), case)


def test_sequences_of_very_different_length() -> None:
    lens = (700, 3, 690, 150, 12, 400, 128, 1)
    check(NativeAttention(), Case(kv_lens=lens, query_lens=(1,) * 8, num_decode=8, page_size=16))


def test_layers_of_different_shapes_in_one_step() -> None:
    """Windowed layers with sinks and plain ones alternate with one preparation of the step."""
    plain = make_step(MIXED)
    windowed = replace(plain.options, window=6, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0]))
    shared = NativeAttention().prepare(plain.batch)
    for options in (plain.options, windowed, plain.options, windowed):
        alone = ReferenceAttention().prepare(plain.batch)(plain.queries, plain.kv, options)
        assert (shared(plain.queries, plain.kv, options) - alone).abs().max() < TOLERANCE[torch.float32]


LATENT_FORMS = {"absorbed": None, "expanded": 2, "by length": LATENTS.expands_from}
"""The number of a row's queries from which it is expanded."""

LATENT_STEPS = {
    "mixed": ((9, 1, 30, 70, 45, 8, 20), (1, 1, 13, 70, 7, 8, 1)),
    "alike": ((20, 9, 20, 20, 33), (12, 1, 12, 12, 12)),
    "decode": ((9, 1, 30), (1, 1, 1)),
}
every_form = pytest.mark.parametrize("least", LATENT_FORMS.values(), ids=LATENT_FORMS)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and blocks, some of them partial, in short sequences too."""
    monkeypatch.setattr(latent, "_KEYS_PER_TILE", 16)
    monkeypatch.setattr(latent, "_QUERIES_PER_BLOCK", 5)


def latent_outputs(
    kv_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    least: int | None,
    dtype: torch.dtype = torch.float32,
    implementation: AttentionImplementation | None = None,
    **options: Any,
) -> tuple[Numbers, Numbers]:
    """The actual and the expected output of attention."""
    step = torch_step(LATENTS, kv_lens, dtype, query_lens, **options)
    found = attend_step(implementation or NativeAttention(), step, LATENTS, dtype, expands_from=least)
    return found.double().numpy(), step.expected


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", LATENT_STEPS)
@every_form
def test_both_forms_of_latent_attention_in_one_step(least: int | None, name: str, page_size: int) -> None:
    found, expected = latent_outputs(*LATENT_STEPS[name], least, page_size=page_size)
    assert np.abs(found - expected).max() < 2e-6


def test_rows_use_the_form_for_their_length() -> None:
    counts = LATENT_STEPS["mixed"][1]
    by_length, absorbed = (
        latent_outputs(*LATENT_STEPS["mixed"], LATENT_FORMS[form])[0] for form in ("by length", "absorbed")
    )
    parts = (np.split(found, np.cumsum(counts)[:-1]) for found in (by_length, absorbed))
    same = [np.array_equal(*pair) for pair in zip(*parts, strict=True)]
    assert same == [count < 8 for count in counts]


def test_latent_attention_of_the_reference() -> None:
    found, expected = latent_outputs(*LATENT_STEPS["mixed"], 2, implementation=ReferenceAttention())
    assert np.abs(found - expected).max() < 2e-6


def test_latent_tiles_of_full_size() -> None:
    found, expected = latent_outputs((1100, 600, 30), (700, 600, 1), 2)
    assert np.abs(found - expected).max() < 2e-6


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_latent_chunks_and_hits_at_every_place(page_size: int) -> None:
    for place in range(70):
        found, expected = latent_outputs((70,), (70 - place,), 2, page_size=page_size)
        assert np.abs(found - expected).max() < 2e-6, f"{place} tokens are cached"


@pytest.mark.usefixtures("small_tiles")
def test_an_expanded_row_does_not_depend_on_other_rows() -> None:
    alone, _ = latent_outputs((70,), (20,), LATENTS.expands_from)
    for kv_lens, query_lens in (((9, 70, 33), (1, 20, 7)), ((70, 70, 80), (20, 20, 9)), ((30, 5, 70), (30, 1, 20))):
        found, _ = latent_outputs(kv_lens, query_lens, LATENTS.expands_from)
        last = int(np.cumsum(query_lens)[kv_lens.index(70)])
        assert np.array_equal(found[last - 20 : last], alone)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@every_form
def test_rounding_of_latent_attention(least: int | None, dtype: torch.dtype, unit: float) -> None:
    """As docs/architecture.md states it, in units of the type's rounding, `unit`: root mean squares of errors over
    those of outputs, and the largest error over the largest output."""
    found, expected = latent_outputs((9, 40, 70, 45, 200), (1, 13, 70, 7, 90), least, dtype)
    error = found - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < unit
    assert np.abs(error).max() < 1.5 * unit * np.abs(expected).max()
