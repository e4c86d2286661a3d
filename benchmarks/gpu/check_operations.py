"""Fused operations on the device against the native ones in float32; and those that also round rows to 8 bits, against
the same without rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from gpu.bench import Bench, Row, Table
from gpu.checks import Comparison, exact, short, widened
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kv_pages import KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.rounded_rows import RoundedRows

_EPS = 1e-5
_EXPECTED = NativeOperations()


def run(bench: Bench) -> Iterator[Table]:
    """One table."""
    rows: list[Row] = []
    for dtype in bench.dtypes:
        for tokens in (3,) if bench.small else (1, 5, 257):
            for hidden in (96,) if bench.small else (576, 4096, 8192):
                rows += _norms(bench, dtype, tokens, hidden)
            for inner in (200,) if bench.small else (1536, 14336):
                rows += [_activation(bench, dtype, tokens, inner, gelu=gelu) for gelu in (False, True)]
        for head_dim in (64, 80) if bench.small else (64, 80, 96, 128, 256):
            rows.append(_rotation(bench, dtype, head_dim, 16, norms=False, kv_dtype=dtype))
        rows.append(_rotation(bench, dtype, 128, 1, norms=True, kv_dtype=dtype))
        rows.append(_rotation(bench, dtype, 128, 64, norms=True, kv_dtype=torch.float8_e4m3fn))
    yield Table(f"fused operations ({bench.kernels.name}) against float32", rows)
    if bench.kernels.name == "triton":
        sizes = ((3, 96),) if bench.small else ((1, 576), (70, 4096), (257, 14_336), (5, 28_672))
        kinds = [(dtype, values) for dtype in bench.dtypes for values in _roundings(bench)]
        rounded = [row for kind in kinds for size in sizes for row in _rounded(bench, *kind, *size)]
        yield Table("rounding to 8 bits in the kernel before a product, and after it", rounded)


def _roundings(bench: Bench) -> tuple[torch.dtype, ...]:
    """float8 where the chip has it."""
    return (torch.int8, torch.float8_e4m3fn) if bench.chip.capability >= 89 else (torch.int8,)


def _rounded(bench: Bench, dtype: torch.dtype, values: torch.dtype, tokens: int, columns: int) -> Iterator[Row]:
    """One row is zeros, one is not finite. Every bit is that of two kernels, and near torch's rounding."""
    from torch_backend.kernels.operations import TritonRounding

    rounding, operations = TritonRounding(values, bench.chip.dependent_launches), bench.kernels.operations
    x, residual, gate_up = (bench.normal(tokens, size, dtype=dtype) for size in (columns, columns, 2 * columns))
    for each in (x, residual, gate_up):
        each[-1], each[tokens // 2, 0] = 0, torch.inf
    weight = 1 + bench.normal(columns, dtype=dtype) / 4
    normed, _ = operations.add_rms_norm(x.clone(), residual.clone(), weight, _EPS)
    pairs = {
        "rms_norm": (rounding.rms_norm(x, weight, _EPS), operations.rms_norm(x, weight, _EPS)),
        "add_rms_norm": (rounding.add_rms_norm(x, residual, weight, _EPS)[0], normed),
        "silu_mul": (rounding.gated(gate_up, Activation.SILU), operations.silu_mul(gate_up)),
    }
    case = f"{short(dtype)} {short(values)} {tokens} x {columns}"
    for name, (found, plain) in pairs.items():
        after = rounding.round(plain)
        yield exact(f"{name}: rounded within", case, _bits(found), _bits(after))
        own = found.values[:tokens].float() * found.scales[:, None]
        yield Comparison.of(own, _rounded_by_torch(plain, values), values).row(f"{name}: rounded", case)


def _bits(rows: RoundedRows) -> torch.Tensor:
    return torch.cat([each.view(torch.uint8).flatten() for each in (rows.values[: len(rows)], rows.scales)])


def _rounded_by_torch(x: torch.Tensor, values: torch.dtype) -> torch.Tensor:
    """Rows that are not finite are NaN."""
    wide = x.float()
    largest = 127.0 if values == torch.int8 else torch.finfo(values).max
    scales = wide.abs().amax(-1, keepdim=True) / largest
    levels = wide / torch.where(scales == 0, 1.0, scales)
    levels = levels.round() if values == torch.int8 else levels.clamp(-largest, largest).to(values).float()
    return torch.where(wide.isfinite().all(-1, keepdim=True), levels * scales, torch.nan)


def _norms(bench: Bench, dtype: torch.dtype, tokens: int, hidden: int) -> Iterator[Row]:
    x, residual = (bench.normal(tokens, hidden, dtype=dtype) for _ in range(2))
    weight = 1 + bench.normal(hidden, dtype=dtype) / 4
    case = f"{short(dtype)} {tokens} x {hidden}"
    expected = _EXPECTED.rms_norm(x.float(), weight.float(), _EPS)
    yield Comparison.of(bench.kernels.operations.rms_norm(x, weight, _EPS), expected, dtype).row("rms_norm", case)
    total = (x.float() + residual.float()).to(dtype)
    expected = _EXPECTED.rms_norm(total.float(), weight.float(), _EPS)
    normed, summed = bench.kernels.operations.add_rms_norm(x, residual, weight, _EPS)
    yield Comparison.of(normed, expected, dtype).row("add_rms_norm", case)
    yield Comparison.of(summed, total, dtype).row("add_rms_norm: sum", case)


def _activation(bench: Bench, dtype: torch.dtype, tokens: int, inner: int, *, gelu: bool = False) -> Row:
    gate_up = 3 * bench.normal(tokens, 2 * inner, dtype=dtype)
    operations = bench.kernels.operations
    found = operations.gelu_mul(gate_up) if gelu else operations.silu_mul(gate_up)
    wide = gate_up.float()
    expected = _EXPECTED.gelu_mul(wide) if gelu else _EXPECTED.silu_mul(wide)
    name = "gelu_mul" if gelu else "silu_mul"
    return Comparison.of(found, expected, dtype).row(name, f"{short(dtype)} {tokens} x {inner}")


def _rotation(
    bench: Bench, dtype: torch.dtype, head_dim: int, page_size: int, *, norms: bool, kv_dtype: torch.dtype
) -> Row:
    """Queries and all pages together: unwritten slots must be unchanged."""
    tokens, heads, kv_heads = (4, 4, 2) if bench.small else (37, 28, 4)
    pages = 2 + tokens // page_size * 2
    kv, expected_kv = (
        KVPages.allocate(pages, kv_heads, page_size, head_dim, kept, bench.device)
        for kept in (kv_dtype, torch.float32 if kv_dtype == dtype else kv_dtype)
    )
    for pages_of in (kv, expected_kv):
        if pages_of.key_scale is not None and pages_of.value_scale is not None:
            pages_of.key_scale.fill_(0.02)
            pages_of.value_scale.fill_(0.03)
    order = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(1))
    slots = order[:tokens].to(bench.device)
    angles = torch.arange(tokens, device=bench.device)[:, None] / torch.linspace(1, 99, head_dim // 2).to(bench.device)
    rotation = Rotation(angles.cos(), angles.sin())
    query, key = (1 + bench.normal(head_dim, dtype=dtype) / 4 for _ in range(2))
    weights = HeadNorms(query, key, _EPS) if norms else None
    wide = replace(weights, query=weights.query.float(), key=weights.key.float()) if weights else None
    qkv = bench.normal(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    expected = _EXPECTED.rotate_and_write(qkv.float(), rotation, wide, expected_kv, slots)
    found = bench.kernels.operations.rotate_and_write(qkv, rotation, weights, kv, slots)
    both = torch.cat([found.float().flatten(), widened(kv).flatten()])
    both_expected = torch.cat([expected.flatten(), widened(expected_kv).flatten()])
    stored = "" if kv_dtype == dtype else f" KV {short(kv_dtype)}"
    case = f"{short(dtype)}{stored} dim {head_dim} page {page_size}{' norms' if norms else ''}"
    return Comparison.of(both, both_expected, kv_dtype).row("rotate_and_write", case)
