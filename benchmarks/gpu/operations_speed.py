"""Fused operations as a share of copy bandwidth, next to torch's operations launched one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.bench import Bench, Row, Table, Work, share
from gpu.steps import random_pages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import Operations, Rotation


def run(bench: Bench) -> Iterator[Table]:
    """Widths of Llama 3 8B, next to torch's operations launched one by one."""
    rows = [
        row
        for tokens in ((4,) if bench.small else (1, 256, 2048, 8192))
        for row in _operations(bench, tokens, **({"hidden": 64, "inner": 96} if bench.small else {}))
    ]
    rate = bench.rates.copy_bytes_per_second / 1e9
    yield Table(f"fused operations ({bench.kernels.name}), copy {rate:.4g} GB/s", rows)


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
