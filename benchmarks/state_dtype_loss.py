"""Loss of `--mamba-ssm-dtype bfloat16`: states rounded after each token, next to the same in float32.

    python benchmarks/state_dtype_loss.py [--tokens 1024] [--json FILE]

One layer with 8 heads of 128 by 128 numbers is decoded token by token, over random queries, keys and values. `left`:
the median share of a matrix that remains after a token. The error is that of a head's output, relative to its size:
median and largest over all heads and tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from machine import report

from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs, scan

HEADS, DIM = 8, 128
SIZES_OF_DECAYS = (-1.0, -4.0, -7.0)
"""Logarithms of the medians of a token's decay, which is itself a logarithm."""


def loss(tokens: int, delta: bool, size: float) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    queries, keys = (torch.nn.functional.normalize(torch.randn(tokens, HEADS, DIM), dim=-1) for _ in range(2))
    values = torch.randn(tokens, HEADS, DIM)
    decays = -torch.exp(torch.randn(tokens, HEADS) + size)
    rates = torch.randn(tokens, HEADS).sigmoid() if delta else None
    inputs = ScanInputs(queries, keys, values, decays, rates)
    one = torch.zeros(1, dtype=torch.int64)
    rows = StateRows(one, one.bool(), one, one, one, torch.tensor([0, 1], dtype=torch.int32), num_decode=1)
    exact = rounded = torch.zeros(1, HEADS, DIM, DIM)
    errors = []
    for token in range(tokens):
        part = inputs.part(token, token + 1)
        expected, exact = scan(part, exact, rows)
        found, rounded = scan(part, rounded, rows)
        rounded = rounded.bfloat16().float()
        errors.append((found - expected).norm(dim=-1) / expected.norm(dim=-1))
    all_errors = torch.cat(errors)
    return {
        "layer": "delta net" if delta else "Mamba-2",
        "left": f"{float(decays.exp().median()):.1%}",
        "median error": f"{float(all_errors.median()):.2%}",
        "largest error": f"{float(all_errors.max()):.2%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [loss(args.tokens, delta, size) for delta in (True, False) for size in SIZES_OF_DECAYS]
    report("Outputs of recurrent layers whose states are bfloat16 between tokens", rows, args.json)


if __name__ == "__main__":
    main()
