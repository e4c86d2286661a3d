"""A layer's fused operations on a CPU, in plain torch and as CPU kernels, against float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from helpers.cpu_kernels import cpu_operations
from helpers.equal_ranks import EqualRanks
from torch.nn import functional

from torch_backend.kv_pages import KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import HeadNorms, Operations, Rotation

EPS = 1e-5
SHARED = 700
"""Rows of 96 that CPU kernels spread over torch's threads."""

every_dtype = pytest.mark.parametrize(
    ("numba", "dtype"),
    [
        (False, torch.float32),
        (False, torch.bfloat16),
        (False, torch.float16),
        (True, torch.float32),
        (True, torch.bfloat16),
    ],
    ids=lambda value: str(value) if isinstance(value, torch.dtype) else "numba" if value else "native",
)


def operations(numba: bool, dtype: torch.dtype, head_dim: int = 32) -> Operations:
    return cpu_operations(dtype, head_dim) if numba else NativeOperations()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def check_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """`found` is within half a step of its type from `exact`, plus a margin for sums in float32."""
    assert found.shape == exact.shape
    step = torch.finfo(found.dtype).eps * exact.abs()
    slack = 2e-6 * (1 + exact.abs().max())
    assert bool(((found.double() - exact).abs() <= 0.51 * step + slack).all())


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rotation(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates pairs as complex numbers."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@every_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("rows", [1, 5, SHARED])
def test_rms_norm(numba: bool, dtype: torch.dtype, rows: int, scale: float, generator: torch.Generator) -> None:
    x = (torch.randn(rows, 96, generator=generator) * scale).to(dtype)
    weight = (1 + torch.randn(96, generator=generator)).to(dtype)
    before = x.clone()
    check_rounded_once(operations(numba, dtype).rms_norm(x, weight, EPS), exact_norm(x, weight))
    assert torch.equal(x, before)


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, SHARED])
def test_add_rms_norm(numba: bool, dtype: torch.dtype, rows: int, generator: torch.Generator) -> None:
    x, residual = (torch.randn(rows, 96, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(96, generator=generator)).to(dtype)
    total = x + residual
    normed, found = operations(numba, dtype).add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(found, total)
    check_rounded_once(normed, exact_norm(total, weight))
    # from two ranks that each have half of x, which is exact
    of_ranks = operations(numba, dtype).all_reduce_add_rms_norm(x / 2, residual.clone(), weight, EPS, EqualRanks())
    assert torch.equal(torch.stack(of_ranks), torch.stack((normed, total)))


@every_dtype
def test_silu_mul(numba: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    gate_up = (3 * torch.randn(7, 96, generator=generator)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check_rounded_once(operations(numba, dtype).silu_mul(gate_up), functional.silu(gate) * up)


@every_dtype
def test_gelu_mul(numba: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    gate_up = (3 * torch.randn(7, 96, generator=generator)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check_rounded_once(operations(numba, dtype).gelu_mul(gate_up), functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("tokens", [1, 6, 143])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (3, 1, 80), (4, 4, 16)])
@every_dtype
def test_rotate_and_write(
    numba: bool,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    normed: bool,
    page_size: int,
    generator: torch.Generator,
) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    before = qkv.clone()
    angles = 100 * torch.rand(tokens, head_dim // 2, generator=generator, dtype=torch.float64)
    rotation = Rotation(angles.cos().float(), angles.sin().float())
    weights = [(1 + torch.randn(head_dim, generator=generator)).to(dtype) for _ in range(2)]
    num_pages = 3 + -(-tokens // page_size)
    pages = torch.full((num_pages, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
    kv = KVPages(pages, pages.clone())
    slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
    norms = HeadNorms(*weights, EPS) if normed else None

    queries = operations(numba, dtype, head_dim).rotate_and_write(qkv, rotation, norms, kv, slots)

    assert torch.equal(qkv, before)
    assert queries.is_contiguous()
    wanted, keys, values = before.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        wanted, keys = exact_norm(wanted, weights[0]), exact_norm(keys, weights[1])
    check_rounded_once(queries, exact_rotation(wanted, angles))
    written = kv.keys.transpose(1, 2).flatten(0, 1), kv.values.transpose(1, 2).flatten(0, 1)
    check_rounded_once(written[0][slots], exact_rotation(keys, angles))
    assert torch.equal(written[1][slots], values)
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool)
    untouched[slots] = False
    for found in written:
        assert bool(found[untouched].isnan().all())


def test_float8_pages_hold_values_over_their_head_s_scale(generator: torch.Generator) -> None:
    tokens, kv_heads, head_dim = 5, 2, 16
    qkv = torch.randn(tokens, 4 * head_dim * 2, generator=generator)
    qkv[0, -1] = 1e6  # beyond the largest float8, also after scaling
    kv = KVPages.allocate(4, kv_heads, 4, head_dim, torch.float8_e4m3fn, torch.device("cpu"))
    assert kv.key_scale is not None
    assert kv.value_scale is not None
    kv.key_scale.copy_(torch.tensor([0.01, 0.25]))
    kv.value_scale.copy_(torch.tensor([2.0, 0.05]))
    slots = torch.tensor([3, 0, 7, 12, 5])
    still = Rotation(torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2))

    NativeOperations().rotate_and_write(qkv, still, None, kv, slots)

    _, keys, values = qkv.view(tokens, -1, head_dim).split([4, 2, 2], dim=1)
    for pages, scale, data in ((kv.keys, kv.key_scale, keys), (kv.values, kv.value_scale, values)):
        read = pages.float().transpose(1, 2).flatten(0, 1)[slots] * scale[:, None]
        wanted = data.clamp(-448 * scale[:, None], 448 * scale[:, None])
        # three bits after the leading one, down to the smallest step of 2^-9
        assert bool(((read - wanted).abs() <= wanted.abs() / 16 + scale[:, None] * 2**-10).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cpu_kernels_preserve_nan_and_infinity(dtype: torch.dtype) -> None:
    """Rounding to bfloat16 is done on bits, where a carry could turn NaN into a number."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32)
    for rows in (1, SHARED):
        x = torch.ones(rows, 96, dtype=dtype)
        residual = torch.ones(rows, 96, dtype=dtype)
        x[0, :4] = bits.view(torch.float32).to(dtype) if dtype == torch.float32 else torch.nan
        x[-1, 5] = torch.inf if rows > 1 else 1.0
        normed, total = cpu_operations(dtype, 32).add_rms_norm(x, residual, torch.ones(96, dtype=dtype), EPS)
        assert bool(normed[0].isnan().all())
        assert bool(total[0, :4].isnan().all())
        assert bool((total[0, 4:] == 2).all()) or rows == 1
        if rows > 1:
            assert total[-1, 5] == torch.inf
            assert bool((normed[1:-1] - 1).abs().max() < 0.01)


def test_cpu_kernels_round_to_the_nearest_and_to_even(generator: torch.Generator) -> None:
    """Like torch, for every rounding case of a sum: exact, below, at and above the middle."""
    x = torch.randint(-(2**15), 2**15, (512, 96), generator=generator, dtype=torch.int16).view(torch.bfloat16)
    residual = torch.randint(-(2**15), 2**15, (512, 96), generator=generator, dtype=torch.int16).view(torch.bfloat16)
    x[:256] = residual[:256] * (1 + torch.randint(-3, 4, (256, 96), generator=generator) / 256)
    expected = (x.float() + residual.float()).bfloat16()
    _, total = cpu_operations(torch.bfloat16, 32).add_rms_norm(x, residual, torch.ones(96).bfloat16(), EPS)
    assert torch.equal(total.isnan(), expected.isnan())
    assert torch.equal(total.nan_to_num(), expected.nan_to_num())


def test_cpu_kernels_refuse_other_types() -> None:
    x, weight = torch.ones(2, 96), torch.ones(96)
    with pytest.raises(TypeError, match=r"made for torch\.bfloat16 were given torch\.float32"):
        cpu_operations(torch.bfloat16, 32).rms_norm(x, weight, EPS)
