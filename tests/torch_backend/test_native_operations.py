"""A layer's fused operations in plain torch against float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from torch_backend.kv_pages import KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import HeadNorms, Rotation

OPERATIONS = NativeOperations()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def check_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """`found` is within half a step of its type from `exact`, and a little for sums in float32."""
    assert found.shape == exact.shape
    step = torch.finfo(found.dtype).eps * exact.abs()
    slack = 2e-6 * (1 + exact.abs().max())
    assert bool(((found.double() - exact).abs() <= 0.51 * step + slack).all())


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def exact_rotation(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs as complex numbers, turned."""
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@every_dtype
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, scale: float, generator: torch.Generator) -> None:
    x = (torch.randn(5, 96, generator=generator) * scale).to(dtype)
    weight = (1 + torch.randn(96, generator=generator)).to(dtype)
    before = x.clone()
    check_rounded_once(OPERATIONS.rms_norm(x, weight, EPS), exact_norm(x, weight))
    assert torch.equal(x, before)


@every_dtype
def test_add_rms_norm(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, residual = (torch.randn(5, 96, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + torch.randn(96, generator=generator)).to(dtype)
    total = x + residual
    normed, found = OPERATIONS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    assert torch.equal(found, total)
    check_rounded_once(normed, exact_norm(total, weight))


@every_dtype
def test_silu_mul(dtype: torch.dtype, generator: torch.Generator) -> None:
    gate_up = (3 * torch.randn(7, 96, generator=generator)).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    check_rounded_once(OPERATIONS.silu_mul(gate_up), functional.silu(gate) * up)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (3, 1, 80), (4, 4, 16)])
@every_dtype
def test_rotate_and_write(
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
    pages = torch.full((9, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
    kv = KVPages(pages, pages.clone())
    slots = torch.randperm(9 * page_size, generator=generator)[:tokens]
    norms = HeadNorms(*weights, EPS) if normed else None

    queries = OPERATIONS.rotate_and_write(qkv, rotation, norms, kv, slots)

    assert torch.equal(qkv, before)
    assert queries.is_contiguous()
    wanted, keys, values = before.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        wanted, keys = exact_norm(wanted, weights[0]), exact_norm(keys, weights[1])
    check_rounded_once(queries, exact_rotation(wanted, angles))
    written = kv.keys.transpose(1, 2).flatten(0, 1), kv.values.transpose(1, 2).flatten(0, 1)
    check_rounded_once(written[0][slots], exact_rotation(keys, angles))
    assert torch.equal(written[1][slots], values)
    untouched = torch.ones(9 * page_size, dtype=torch.bool)
    untouched[slots] = False
    for found in written:
        assert bool(found[untouched].isnan().all())


def test_float8_pages_hold_values_over_their_head_s_scale(generator: torch.Generator) -> None:
    tokens, kv_heads, head_dim = 5, 2, 16
    qkv = torch.randn(tokens, 4 * head_dim * 2, generator=generator)
    qkv[0, -1] = 1e6  # beyond the largest float8, also when scaled
    kv = KVPages.allocate(4, kv_heads, 4, head_dim, torch.float8_e4m3fn, torch.device("cpu"))
    assert kv.key_scale is not None
    assert kv.value_scale is not None
    kv.key_scale.copy_(torch.tensor([0.01, 0.25]))
    kv.value_scale.copy_(torch.tensor([2.0, 0.05]))
    slots = torch.tensor([3, 0, 7, 12, 5])
    still = Rotation(torch.ones(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2))

    OPERATIONS.rotate_and_write(qkv, still, None, kv, slots)

    _, keys, values = qkv.view(tokens, -1, head_dim).split([4, 2, 2], dim=1)
    for pages, scale, data in ((kv.keys, kv.key_scale, keys), (kv.values, kv.value_scale, values)):
        read = pages.float().transpose(1, 2).flatten(0, 1)[slots] * scale[:, None]
        wanted = data.clamp(-448 * scale[:, None], 448 * scale[:, None])
        # Three bits after the leading one, down to the smallest step of 2^-9.
        assert bool(((read - wanted).abs() <= wanted.abs() / 16 + scale[:, None] * 2**-10).all())
