"""The GPU compiler's figures for the kernels of attention and of experts: instructions of their main loops, registers,
shared memory.

    python benchmarks/gpu_kernel_sass.py [--only attention] [--chips 80 89 90 100 120] [--json FILE]

Needs no GPU: kernels are compiled ahead of time and their machine code is read. Attention is that of Llama 3 8B's
layers: 32 heads of 128 on 8 kv heads, pages of 16. Experts are those of Qwen3-30B-A3B's, with plain weights: 128 of
which a token chooses 8, hidden size 2048, inner size 768; of 128 rows, and of 32,768. Columns:

- `instr/KB`: instructions of all warps of a program for a kilobyte of keys and values, or of weights.
- `instr/MFLOP`: for a million operations of the products, of extend attention in the loop without masks.
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
from torch_backend.kernels.expert_product import SKEW
from torch_backend.kernels.extend_plan import extend_tile
from torch_backend.kernels.latent_plan import chunk_tile, latent_tile
from torch_backend.kernels.plain_experts import plain_tile

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
    "gate and up, 128 rows": "16 to 32 per KB",
    "gate and up, 32768 rows": "214 per MFLOP",
    "down, 128 rows": "16 to 32 per KB",
    "down, 32768 rows": "214 per MFLOP",
    "decode, 16 heads": "71 to 89",
    "decode, 128 heads": "569 to 711",
}
"""The same work in Triton kernels of two well-known engines; of experts, in one's, with the tiles that it measured as
best for an H200, and without the gate; over latent vectors, in one's, 16 heads of a program, with 32 or 64 keys."""

EXPERTS = {
    "gate and up": ("gate_experts", "128 x 2 x 768 x 2048"),
    "gate and up, without the gate": ("multiply_sorted_rows", "128 x 1536 x 2048"),
    "down": ("sum_experts", "128 x 2048 x 768"),
}
"""Operations and shapes of `tests/helpers/triton_inventory.py`."""

EXPERT_ROWS = (128, 32_768)

LATENTS = {
    "decode, 16 heads": ("latent_attention", 16),
    "decode, 128 heads": ("latent_attention", 128),
    "chunks, 16 heads": ("latent_attention of chunks", 16),
    "chunks, 128 heads": ("latent_attention of chunks", 128),
}
"""Operations, and heads over vectors of 512 + 64 numbers."""

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


def measure_experts(chips: list[int]) -> list[dict[str, Any]]:
    """A row for each product of experts, number of rows and chip. Where a loop waits in inner loops, as on sm_100,
    its instructions are not counted."""
    prefixes = {
        (form, rows, chip): f"sm_{chip} {operation}: bfloat16, {rows} rows, {shape}: "
        for form, (operation, shape) in EXPERTS.items()
        for rows in EXPERT_ROWS
        for chip in chips
    }
    compiled = compile_shipped(chips, prefixes.values())
    found: list[dict[str, Any]] = []
    for (form, rows, capability), prefix in prefixes.items():
        figures, gated = compiled.kernels[prefix + "multiply_experts"], form == "gate and up"
        tile = plain_tile(SKEW * rows // 128, 2048, torch.bfloat16, Chip(capability, 132), gated=gated)
        instructions = figures.warps * sum(figures.loops)
        numbers = (2 if gated else 1) * tile.outputs * tile.inputs
        name = f"{form}, {rows} rows"
        found.append(
            {
                "kernel": name,
                "chip": f"sm_{capability}",
                "instr/KB": round(instructions / (2 * numbers / 1024)) or "-",
                "instr/MFLOP": round(instructions / (2e-6 * numbers * tile.rows)) or "-",
                **_resources(figures),
                "another engine": OTHERS.get(name, "-") if capability == 90 else "-",
            }
        )
    return found


def measure_latents(chips: list[int]) -> list[dict[str, Any]]:
    """A row for each form and chip. Instructions are those of all programs that take a token's vector, for a kilobyte
    of it: a program has some of the heads of a decode row, or of tokens of a chunk."""
    prefixes = {
        (form, chip): f"sm_{chip} {operation}: bfloat16, {heads} heads, 512 + 64, pages of 16: "
        for form, (operation, heads) in LATENTS.items()
        for chip in chips
    }
    compiled = compile_shipped(chips, prefixes.values())
    found: list[dict[str, Any]] = []
    for (form, capability), prefix in prefixes.items():
        figures, heads, chip = compiled.kernels[prefix + "latent_splits"], LATENTS[form][1], Chip(capability, 132)
        tile, tokens = latent_tile(heads, torch.bfloat16, chip), 1
        if form.startswith("chunks"):
            tile, tokens = chunk_tile(heads, torch.bfloat16, chip)
        instructions = figures.warps * figures.loops[0] * tile.blocks / tile.tile.keys
        found.append(
            {
                "kernel": form,
                "chip": f"sm_{capability}",
                "instr/KB": round(instructions / (2 * 576 / 1024)),
                "instr/MFLOP": round(instructions / (2e-6 * tokens * heads * (2 * 512 + 64))),
                **_resources(figures),
                "another engine": OTHERS.get(form, "-") if capability == 90 else "-",
            }
        )
    return found


def _row(kernel: str, figures: Figures, pages: torch.dtype, chip: Chip) -> dict[str, Any]:
    instructions = figures.warps * figures.loops[0]
    if kernel == "decode_splits":
        kilobytes = 2 * decode_tile(HEAD_DIM, pages, chip).keys * HEAD_DIM * pages.itemsize / 1024
        work = {"instr/KB": round(instructions / kilobytes), "instr/MFLOP": "-"}
    else:
        tile = extend_tile(HEAD_DIM, pages, chip)
        megaflops = 4e-6 * tile.rows * tile.keys * HEAD_DIM
        work = {"instr/KB": "-", "instr/MFLOP": round(instructions / megaflops)}
    return work | _resources(figures)


def _resources(figures: Figures) -> dict[str, Any]:
    return {
        "warps": figures.warps,
        "registers": figures.registers,
        "stack": figures.stack_bytes,
        "shared": figures.shared_bytes // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of kernels' main loops, without a GPU.")
    parser.add_argument("--only", choices=["attention", "latents", "experts"], help="default: all")
    parser.add_argument("--chips", type=int, nargs="+", default=list(SHARED_MEMORY), choices=list(SHARED_MEMORY))
    parser.add_argument("--json", type=Path, help="write the rows to files, FILE_attention.json and FILE_experts.json")
    options = parser.parse_args()
    kinds = {"attention": measure, "latents": measure_latents, "experts": measure_experts}
    for kind, measured in kinds.items():
        if options.only in (None, kind):
            file = options.json and options.json.with_stem(f"{options.json.stem}_{kind}")
            report(f"kernels of {kind}, compiled ahead of time", measured(options.chips), file)


if __name__ == "__main__":
    main()
