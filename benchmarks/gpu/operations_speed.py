"""Fused operations as a share of copy bandwidth, next to torch's operations launched one by one; and those that also
round rows to 8 bits, next to two kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.bench import Bench, Row, Table, Work, share
from gpu.steps import random_pages
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import Operations, Rotation


def run(bench: Bench) -> Iterator[Table]:
    """Widths of Llama 3 8B."""
    sizes = {"hidden": 64, "inner": 96} if bench.small else {}
    steps = (4,) if bench.small else (1, 256, 2048, 8192)
    rows = [row for tokens in steps for row in _operations(bench, tokens, **sizes)]
    rate = bench.rates.copy_bytes_per_second / 1e9
    yield Table(f"fused operations ({bench.kernels.name}), copy {rate:.4g} GB/s", rows)
    if bench.kernels.name == "triton":
        rounded = [row for tokens in steps for row in _roundings(bench, tokens, **sizes)]
        yield Table(f"fused operations that round to int8, copy {rate:.4g} GB/s", rounded)


def _roundings(bench: Bench, tokens: int, hidden: int = 4096, inner: int = 14336) -> Iterator[Row]:
    from torch_backend.kernels.operations import TritonRounding

    rounding, operations = TritonRounding(torch.int8, bench.chip.dependent_launches), bench.kernels.operations
    x, residual = (bench.normal(tokens, hidden) for _ in range(2))
    weight, gate_up = bench.normal(hidden), bench.normal(tokens, 2 * inner)
    size = bench.dtype.itemsize
    works: dict[str, tuple[Work, Work, int]] = {
        "rms_norm": (
            lambda: rounding.rms_norm(x, weight, 1e-5),
            lambda: rounding.round(operations.rms_norm(x, weight, 1e-5)),
            x.numel() * (size + 1),
        ),
        "add_rms_norm": (
            lambda: rounding.add_rms_norm(x, residual, weight, 1e-5),
            lambda: rounding.round(operations.add_rms_norm(x, residual, weight, 1e-5)[0]),
            x.numel() * (3 * size + 1),
        ),
        "silu_mul": (
            lambda: rounding.gated(gate_up, Activation.SILU),
            lambda: rounding.round(operations.silu_mul(gate_up)),
            tokens * inner * (2 * size + 1),
        ),
    }
    for name, (work, separate, moved) in works.items():
        seconds = bench.stopwatch.seconds(work)
        yield {
            "operation": name,
            "tokens": tokens,
            "us": seconds * 1e6,
            "share of copy": share(moved / seconds, bench.rates.copy_bytes_per_second),
            "two kernels us": bench.stopwatch.seconds(separate) * 1e6,
        }


def _operations(bench: Bench, tokens: int, hidden: int = 4096, inner: int = 14336) -> Iterator[Row]:
    heads, kv_heads, head_dim, page_size = 32, 8, 128, 16
    x, residual = (bench.normal(tokens, hidden) for _ in range(2))
    weight = bench.normal(hidden)
    gate_up = bench.normal(tokens, 2 * inner)
    qkv = bench.normal(tokens, (heads + 2 * kv_heads) * head_dim)
    kv = random_pages(bench, 1 + -(-tokens // page_size), kv_heads, page_size, head_dim, bench.dtype)
    slots = page_size + torch.arange(tokens, device=bench.device)
    angles = bench.normal(tokens, head_dim // 2, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin())
    size = bench.dtype.itemsize

    def works(operations: Operations) -> dict[str, tuple[Work, int]]:
        return {
            "rms_norm": (lambda: operations.rms_norm(x, weight, 1e-5), 2 * x.nbytes),
            "add_rms_norm": (lambda: operations.add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes),
            "silu_mul": (lambda: operations.silu_mul(gate_up), 3 * tokens * inner * size),
            "rotate_and_write": (
                lambda: operations.rotate_and_write(qkv, rotation, None, kv, slots),
                2 * qkv.nbytes + 2 * rotation.cosines.nbytes,
            ),
        }

    native = works(NativeOperations())
    for name, (work, moved) in works(bench.kernels.operations).items():
        seconds = bench.stopwatch.seconds(work)
        yield {
            "operation": name,
            "tokens": tokens,
            "us": seconds * 1e6,
            "share of copy": share(moved / seconds, bench.rates.copy_bytes_per_second),
            "native us": bench.stopwatch.seconds(native[name][0]) * 1e6,
        }
