"""The GPU compiler's figures for the attention kernels: instructions of their main loops, registers, shared memory.

    python benchmarks/gpu_kernel_sass.py [--chips 80 89 90 100 120] [--json FILE]

Needs no GPU: kernels are compiled ahead of time and their machine code is read. Llama 3 8B's layers: 32 heads of 128 on
8 kv heads, pages of 16. Columns:

- `instr/KB`: of decode attention, instructions of all warps of a program for a kilobyte of keys and values.
- `instr/MFLOP`: of extend attention, for a million operations of its two products, in the loop without masks.
- `warps`, `registers`, `stack` (bytes that a thread spills), `shared` (KiB of a program).

Fewer instructions do not guarantee speed, which only a GPU measures; many more than another kernel's do predict
slowness. `OTHERS` were read in the same way for sm_90 in November 2026 (triton 3.7.1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from machine import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.triton_ahead_of_time import SHARED_MEMORY, Figures, compile_shipped

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import decode_tile
from torch_backend.kernels.extend_plan import extend_tile

HEAD_DIM = 128
FORMS = {
    "decode, bfloat16": ("decode_attention", torch.bfloat16),
    "decode, float8": ("decode_attention", torch.float8_e4m3fn),
    "extend, bfloat16": ("extend_attention", torch.bfloat16),
    "extend, float8": ("extend_attention", torch.float8_e4m3fn),
    "short chunk, bfloat16": ("extend_attention of short chunks", torch.bfloat16),
}
OTHERS = {
    "decode, bfloat16": "69 and 135",
    "decode, float8": "198 and 281",
    "extend, bfloat16": "1,385 and 4,654",
}
"""The same work in Triton kernels of two well-known engines."""


_CONFIGURATION = "bfloat16, head_dim 128, group 4, {} pages of 16"


def measure(chips: list[int]) -> list[dict[str, Any]]:
    """A row for each kernel and chip."""
    prefixes = {
        (form, chip): f"sm_{chip} {operation}: {_CONFIGURATION.format(str(pages).removeprefix('torch.'))}: "
        for form, (operation, pages) in FORMS.items()
        for chip in chips
    }
    compiled = compile_shipped(chips, prefixes.values())
    rows: list[dict[str, Any]] = []
    for (form, capability), prefix in prefixes.items():
        kernel = next(
            name for name in ("decode_splits", "extend_blocks", "extend_splits") if prefix + name in compiled.kernels
        )
        figures, pages = compiled.kernels[prefix + kernel], FORMS[form][1]
        others = OTHERS.get(form, "-") if capability == 90 else "-"
        found = _row(kernel, figures, pages, Chip(capability, 132))
        rows.append({"kernel": form, "chip": f"sm_{capability}", **found, "two other engines": others})
    return rows


def _row(kernel: str, figures: Figures, pages: torch.dtype, chip: Chip) -> dict[str, Any]:
    instructions = figures.warps * figures.loops[0]
    if kernel == "decode_splits":
        kilobytes = 2 * decode_tile(HEAD_DIM, pages, chip).keys * HEAD_DIM * pages.itemsize / 1024
        work = {"instr/KB": round(instructions / kilobytes), "instr/MFLOP": "-"}
    else:
        tile = extend_tile(HEAD_DIM, pages, chip)
        megaflops = 4e-6 * tile.rows * tile.keys * HEAD_DIM
        work = {"instr/KB": "-", "instr/MFLOP": round(instructions / megaflops)}
    return work | {
        "warps": figures.warps,
        "registers": figures.registers,
        "stack": figures.stack_bytes,
        "shared": figures.shared_bytes // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of the attention kernels' main loops, without a GPU.")
    parser.add_argument("--chips", type=int, nargs="+", default=list(SHARED_MEMORY), choices=list(SHARED_MEMORY))
    parser.add_argument("--json", type=Path, help="write the rows to a file")
    options = parser.parse_args()
    report("attention kernels, compiled ahead of time", measure(options.chips), options.json)


if __name__ == "__main__":
    main()
