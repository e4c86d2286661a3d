"""Attention over int8 pages, against numpy in float64: on the stored values, and on the original ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.cpu_kernels import cpu_attention
from helpers.int8_steps import Int8Step, int8_step
from helpers.torch_attention_steps import Case
from helpers.triton_attention import AMPERE, HOPPER, TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.architectures.kinds.part import CachedArray
from sglang_jax.cpu_kernels.prompt_tiles import Products
from torch_backend.attention.interface import AttentionImplementation, HeadForm
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.attention.triton import TritonAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kernels.operations import TritonOperations
from torch_backend.kv_pages import KVForm, KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import Rotation

CPU = torch.device("cpu")
IMPLEMENTATIONS = {"native": NativeAttention(), "sm_90": TritonAttention(HOPPER), "sm_80": TritonAttention(AMPERE)}
CASES = {
    "decode rows": Case(kv_lens=(9, 1, 64, 300, 65), query_lens=(1,) * 5, num_decode=5, padding=2),
    "prompts": Case(kv_lens=(33, 70, 64), query_lens=(33, 70, 64), num_decode=0),
    "a chunk behind a prefix": Case(kv_lens=(40, 200), query_lens=(1, 23), num_decode=1, page_size=16),
    "window": Case(kv_lens=(90, 150), query_lens=(1, 40), num_decode=1, window=37),
    "soft cap": Case(kv_lens=(90, 150), query_lens=(1, 40), num_decode=1, soft_cap=3.0),
    "sinks": Case(kv_lens=(90, 150), query_lens=(1, 40), num_decode=1, sinks=True, group=3),
    "all of them": Case(
        kv_lens=(90, 150), query_lens=(1, 40), num_decode=1, sinks=True, soft_cap=5.0, window=33, head_dim=80
    ),
    "pages of 1": Case(kv_lens=(70, 30), query_lens=(1, 30), num_decode=1, page_size=1, head_dim=128, kv_heads=1),
}


def run(implementation: AttentionImplementation, built: Int8Step) -> torch.Tensor:
    step = built.step
    with torch.inference_mode():
        return implementation.prepare(step.batch)(step.queries, step.kv, step.options)


def check(implementation: AttentionImplementation, built: Int8Step) -> None:
    """Every token's output within its own bound, as for pages in other types."""
    output = run(implementation, built).double().numpy()
    errors = np.abs(output - built.step.expected).max((1, 2))
    sizes = np.abs(built.step.expected).max((1, 2))
    assert not np.isnan(errors).any()
    assert (errors <= TOLERANCE[built.step.queries.dtype] * sizes + (sizes == 0) * 0.0).all(), (errors / sizes).max()


def relative_error(implementation: AttentionImplementation, built: Int8Step) -> float:
    """Of all outputs together (L2), against float64 on the original values."""
    output = run(implementation, built).double().numpy()
    return float(np.linalg.norm(output - built.exact) / np.linalg.norm(built.exact))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("which", "values"),
    [("native", None), ("native", torch.int8), ("sm_90", torch.int8)],
    ids=["native, own values", "native, int8 values", "sm_90, int8 values"],
)
def test_outputs_equal_those_of_the_stored_values(which: str, name: str, values: torch.dtype | None) -> None:
    """In float32 only queries and keys are rounded, in the expected outputs too."""
    check(IMPLEMENTATIONS[which], int8_step(CASES[name], values=values, bias=3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_kernels_read_int8_and_do_not_round_queries(dtype: torch.dtype) -> None:
    """Unlike the others, so their outputs are those of the reference. Units of bfloat16 round keys and values of
    prompts to it once these are scaled: half a step each."""
    allowed = TOLERANCE[dtype] + (torch.finfo(dtype).eps if dtype is torch.bfloat16 else 0.0)
    attention = cpu_attention(dtype, HeadForm(64, 2), prompts=Products.of(dtype.itemsize), kv_dtype=torch.int8)
    for case in (*list(CASES.values())[:5], replace(CASES["sinks"], group=2)):
        built = int8_step(replace(case, dtype=dtype), values=torch.int8, bias=3.0)
        found, wide = run(attention, built).double(), replace(built.step, queries=built.step.queries.float())
        expected = run(ReferenceAttention(), replace(built, step=wide)).double()
        errors, sizes = (found - expected).abs().amax((1, 2)), expected.abs().amax((1, 2))
        assert bool((errors <= allowed * sizes).all()), (errors / sizes).max()


@pytest.mark.parametrize("which", IMPLEMENTATIONS)
def test_bfloat16(which: str) -> None:
    case = replace(CASES["a chunk behind a prefix"], dtype=torch.bfloat16, sinks=True)
    for values in (None, torch.int8):
        check(IMPLEMENTATIONS[which], int8_step(case, values=values))


@pytest.mark.parametrize("which", ["native", "sm_90"])
def test_the_error_does_not_grow_with_the_mean_of_keys(which: str) -> None:
    attention, case = IMPLEMENTATIONS[which], Case(kv_lens=(33, 70), query_lens=(33, 70), num_decode=0)
    errors = [relative_error(attention, int8_step(case, bias=bias)) for bias in (0.0, 5.0, 20.0)]
    assert max(errors) < min(0.03, 1.1 * errors[0])
    # without the mean, or with the mean of other keys: the error that the mean avoids
    assert relative_error(attention, int8_step(case, bias=20.0, mean_error=20.0)) > 0.05


@pytest.mark.parametrize("queries", [1, 5])
def test_lengths_of_every_remainder(queries: int) -> None:
    """Keys end at each place of a tile of 64, after as many before it."""
    lens = tuple(range(64, 128, 1 if queries == 1 else 9))
    rows = len(lens)
    case = Case(kv_lens=lens, query_lens=(queries,) * rows, num_decode=rows if queries == 1 else 0)
    check(IMPLEMENTATIONS["sm_90"], int8_step(replace(case, kv_heads=1, group=1, page_size=16)))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([1, 4, 16]), st.sampled_from([torch.float32, torch.int8]), st.data())
def test_random_steps(seed: int, page_size: int, values: torch.dtype, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    queries = [data.draw(st.integers(1, length)) for length in lens]
    case = Case(kv_lens=tuple(lens), query_lens=tuple(queries), num_decode=0, page_size=page_size)
    case = replace(case, window=data.draw(st.none() | st.integers(1, 50)), sinks=data.draw(st.booleans()))
    built = int8_step(case, values=values if values == torch.int8 else None, bias=2.0, seed=seed)
    for which in ("native", "sm_90"):
        check(IMPLEMENTATIONS[which], built)


def test_chunks_do_not_change_a_query() -> None:
    """A whole prompt, and its end as a chunk after the rest, over the same pages: equal bits."""
    built = int8_step(Case(kv_lens=(100,), query_lens=(100,), num_decode=0, page_size=16, sinks=True), bias=4.0)
    whole, step = run(IMPLEMENTATIONS["sm_90"], built), built.step
    for count in (1, 64, 99):
        batch = ForwardBatch(
            step.batch.tokens[-count:],
            step.batch.positions[-count:],
            step.batch.write_slots[-count:],
            step.batch.page_table,
            step.batch.kv_lens,
            torch.tensor([0, count], dtype=torch.int32),
            0,
        )
        part = replace(step, queries=step.queries[-count:].contiguous(), batch=batch)
        assert torch.equal(run(IMPLEMENTATIONS["sm_90"], Int8Step(part, built.exact)), whole[-count:])


def test_zero_keys_and_zero_queries() -> None:
    built = int8_step(CASES["a chunk behind a prefix"], bias=0.0, mean_error=0.0)
    kv, scales = built.step.kv, built.step.kv.token_scales
    assert scales is not None
    kv.keys.zero_()
    scales.keys.copy_(scales.keys.nan_to_num(0.0).zero_())
    step = replace(built.step, queries=built.step.queries * (torch.arange(len(built.step.queries)) % 2)[:, None, None])
    expected = run(ReferenceAttention(), Int8Step(step, built.exact))
    for implementation in IMPLEMENTATIONS.values():
        torch.testing.assert_close(run(implementation, Int8Step(step, built.exact)), expected, rtol=0, atol=2e-6)


def test_the_reference_reads_the_same_pages() -> None:
    """It does not round queries; everything else is the same computation."""
    built = int8_step(CASES["a chunk behind a prefix"], values=torch.int8, bias=2.0)
    assert relative_error(ReferenceAttention(), built) < 0.02
    assert np.abs(run(ReferenceAttention(), built).double().numpy() - built.step.expected).max() < 0.05


def pages(form: KVForm, *, page_size: int = 4) -> KVPages:
    """With scales that are NaN in unwritten slots."""
    kv = KVPages.allocate(4, 3, page_size, 64, form, CPU)
    assert kv.token_scales is not None
    kv.token_scales.keys.fill_(torch.nan)
    kv.token_scales.key_mean.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(5)))
    return kv


def write(operations: object, kv: KVPages, qkv: torch.Tensor, slots: torch.Tensor) -> None:
    half = torch.linspace(0, 3, len(qkv) * 32).view(-1, 32)
    operations.rotate_and_write(qkv, Rotation(half.cos(), half.sin()), None, kv, slots)


@pytest.mark.parametrize("values", [torch.float32, torch.int8])
@pytest.mark.parametrize("operations", [NativeOperations(), TritonOperations()], ids=["native", "triton"])
def test_a_written_token_does_not_depend_on_others(operations: object, values: torch.dtype) -> None:
    """Each token's scale and values, whatever else is written in the step; off by at most half a step."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(6, (4 + 2 * 3) * 64, generator=generator) * torch.tensor([1, 30, 0, 1e-3, 5, 2])[:, None]
    slots = torch.tensor([4, 5, 6, 9, 12, 15])
    together, one_by_one, plain = (pages(KVForm(torch.int8, values)) for _ in range(3))
    write(operations, together, qkv, slots)
    half = torch.linspace(0, 3, len(qkv) * 32).view(-1, 32)
    for number in range(6):
        rotation = Rotation(half[number : number + 1].cos(), half[number : number + 1].sin())
        one = slice(number, number + 1)
        operations.rotate_and_write(qkv[one].contiguous(), rotation, None, one_by_one, slots[one])
    assert torch.equal(together.keys, one_by_one.keys)
    assert torch.equal(together.values, one_by_one.values)
    scales, alone = together.token_scales, one_by_one.token_scales
    assert scales is not None
    assert alone is not None
    assert torch.equal(scales.keys.nan_to_num(-1), alone.keys.nan_to_num(-1))

    plain = KVPages.allocate(4, 3, 4, 64, torch.float32, CPU)
    write(NativeOperations(), plain, qkv, slots)
    places = slots // 4, slots % 4
    for stored, by_token, mean, wanted in (
        (together.keys, scales.keys, scales.key_mean, plain.keys),
        (together.values, scales.values, 0.0, plain.values),
    ):
        read = stored.transpose(1, 2)[places].float()
        if by_token is not None:
            steps = by_token.transpose(1, 2)[places][..., None]
            assert bool((read.abs().amax(-1, keepdim=True) == torch.where(steps == 0, 0.0, 127.0)).all())
            error = (read * steps + mean - wanted.transpose(1, 2)[places]).abs()
            assert bool((error <= 0.5001 * steps + 2e-6).all())


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("operations", [NativeOperations(), TritonOperations()], ids=["native", "triton"])
def test_a_key_that_is_not_finite_reaches_every_output_that_reads_it(operations: object, broken: float) -> None:
    kv = pages(KVForm(torch.int8, torch.int8))
    qkv = torch.randn(2, (4 + 2 * 3) * 64, generator=torch.Generator().manual_seed(1))
    qkv[1, 4 * 64 + 70] = broken
    qkv[1, 7 * 64 + 3] = broken
    write(operations, kv, qkv, torch.tensor([4, 5]))
    scales = kv.token_scales
    assert scales is not None
    assert scales.values is not None
    assert scales.keys[1, :, 1].isnan().tolist() == [False, True, False]
    assert scales.values[1, :, 1].isnan().tolist() == [True, False, False]
    assert not scales.keys[1, :, 0].isnan().any()


def test_bytes_per_token() -> None:
    arrays = [CachedArray(name, 3, 64) for name in ("keys", "values")]
    assert KVForm(torch.bfloat16, torch.bfloat16).bytes_per_token(arrays) == 2 * 3 * 64 * 2
    assert KVForm(torch.int8, torch.bfloat16).bytes_per_token(arrays) == 3 * (64 + 4 + 128)
    assert KVForm(torch.int8, torch.int8).bytes_per_token(arrays) == 3 * 2 * 68
    assert KVForm(torch.bfloat16, torch.bfloat16).bytes_per_token([CachedArray("latent", None, 576)]) == 2 * 576
