"""Errors of results, and whether they are within bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.bench import Row
from torch_backend.kv_pages import KVPages

_RELATIVE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.float8_e4m3fn: 1e-2,
    torch.int8: 3e-2,
}
"""Limit of the relative error of a whole result, by the coarsest type of the computation; int8 is that of queries."""

_OF_LARGEST = {
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 0.13,
    torch.int8: 0.1,
}
"""Limit of the error of one number, as a share of the largest; float8 rounded the other way is off by 1/8."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors of a result `[...]`: of the worst number, and of all together (norm of the difference over the norm of
    the expected result)."""

    largest_error: float
    relative_error: float
    ok: bool

    @classmethod
    def of(cls, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> Comparison:
        """NaN must be exactly where it is expected."""
        found, expected = found.double(), expected.double()
        same_nan = torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num(), expected.nan_to_num()
        difference = found - expected
        largest = float(difference.abs().max()) if difference.numel() else 0.0
        relative = float(difference.norm() / expected.norm().clamp(min=1e-30))
        scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
        ok = same_nan and relative <= _RELATIVE[dtype] and largest <= _OF_LARGEST[dtype] * scale
        return cls(largest, relative, ok)

    def row(self, what: str, case: str) -> Row:
        """A line of the table of checks."""
        return {
            "what": what,
            "case": case,
            "largest error": f"{self.largest_error:.2e}",
            "relative error": f"{self.relative_error:.2e}",
            "ok": self.ok,
        }


def exact(what: str, case: str, found: torch.Tensor, expected: torch.Tensor) -> Row:
    """A line for results that must agree bit for bit."""
    wrong = int((found != expected).sum())
    return {"what": what, "case": case, "differing": wrong, "ok": wrong == 0}


def widened(kv: KVPages) -> torch.Tensor:
    """Keys and values as they are read, float32 `[2, pages, kv_heads, page_size, head_dim]`."""
    parts = []
    for stored, scale in ((kv.keys, kv.key_scale), (kv.values, kv.value_scale)):
        values = stored.float()
        parts.append(values if scale is None else values * scale[:, None, None])
    return torch.stack(parts)


def short(dtype: torch.dtype) -> str:
    """`bfloat16`, `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")
