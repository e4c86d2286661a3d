"""Compiles Triton kernels for GPUs that this machine lacks: the launchers run unchanged, on tensors without memory.

A stub replaces the CUDA driver and every launch ends after its compilation, so that Triton specialises the arguments as
it would on the device. This needs a process that compiles kernels instead of interpreting them: `compile_shipped`
starts one. As a program,

    PYTHONPATH=.:tests python -m helpers.triton_ahead_of_time [--targets 80 ...] [--only WORDS ...] [--write TABLE]

prints the figures of the shipped kernels, and writes the table that a test compares with.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "helpers" / "triton_table.json"

# Compute capabilities, and the shared memory of one program there in bytes.
SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
COMPILED_WHOLE = 90
"""The chip for which every kernel is compiled."""

COMPILED_BUT_FOR_DECODE = (80, 100)
"""Chips for which all kernels are compiled except those of decode attention, and those of prompts with a page size
other than 16: page sizes change how keys are found, in the same way on all chips. Of the rest, and for chips that are
not named here, only the representative kernels are compiled."""

SECONDS_PER_KERNEL = 120

_INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "mma": "mma.sync",
    "tcgen05": "tcgen05.mma",
    "cp.async": "cp.async.c",
    "tma": "cp.async.bulk.tensor",
    "griddepcontrol": "griddepcontrol.wait",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The resources of a multiprocessor that one kernel needs, and which of the chip's special instructions it has.

    - `stack_bytes`: of each thread, 0 when no register is spilled.
    - `shared_bytes`: of a program.
    - `loops`: machine instructions of each innermost loop that multiplies matrices, for one iteration of one warp. Not
      in the table: a test compares them with a bound.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    stages: int
    instructions: tuple[str, ...]
    loops: tuple[int, ...] = field(default=(), compare=False)


class StubDriver:
    """The part of Triton's CUDA driver that a compilation uses. Each capability is a separate device."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("meta")


def compile_launch(launch: Callable[[], object], capability: int) -> dict[str, Figures]:
    """Calls `launch` and returns the figures of every kernel that it would have launched, by the kernel's name."""
    import triton
    from triton.runtime.jit import JITFunction

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("this process interprets kernels (TRITON_INTERPRET=1), so that it cannot compile them")
    run = JITFunction.run
    found: dict[str, Figures] = {}

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        name = kernel.metadata.name
        figures = _figures(kernel)
        if found.setdefault(name, figures) != figures:
            raise RuntimeError(f"one launch runs {name} in two forms: give each a configuration of its own")
        return kernel

    triton.runtime.driver.set_active(StubDriver(capability))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def dump(kernel: Any, option: str) -> str:
    """What cuobjdump says about a compiled kernel: `--dump-sass` for its machine code."""
    import triton.backends.nvidia

    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        return subprocess.run([program, option, cubin.name], capture_output=True, text=True, check=True).stdout


def _figures(kernel: Any) -> Figures:
    usage = dump(kernel, "--dump-resource-usage")
    taken = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if taken is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage}")
    ptx = kernel.asm["ptx"]
    return Figures(
        registers=int(taken[1]),
        stack_bytes=int(taken[2]),
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        instructions=tuple(sorted(name for name, words in _INSTRUCTIONS.items() if words in ptx)),
        loops=tuple(map(len, loops_with_products(dump(kernel, "--dump-sass")))),
    )


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*)")
_PRODUCTS = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "DMMA")


def loops_with_products(sass: str) -> list[list[str]]:
    """From cuobjdump's output for a kernel: the instructions from the target of each backward branch to that branch,
    where matrices are multiplied in between and no other loop is inside; in the order of the program."""
    lines = [(int(found[1], 16), found[2], found[3]) for found in map(_LINE.match, sass.splitlines()) if found]
    loops: list[tuple[int, int]] = []
    for at, operation, operands in lines:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if operation.split(".")[0] == "BRA" and target and int(target[1], 16) < at:
            loops.append((int(target[1], 16), at))
    found = []
    for first, last in sorted(loops):
        inside = [operation for at, operation, _ in lines if first <= at <= last]
        innermost = not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops)
        if innermost and any(operation.startswith(_PRODUCTS) for operation in inside):
            found.append(inside)
    return found


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of kernels, by `sm_90 operation: configuration: kernel`, and the compiler they come from."""

    triton: str
    kernels: dict[str, Figures]

    def dumps(self) -> str:
        """JSON with one kernel a line, sorted."""
        lines = [f"  {json.dumps(name)}: {json.dumps(_plain(self.kernels[name]))}" for name in sorted(self.kernels)]
        return f'{{"triton": {json.dumps(self.triton)}, "kernels": {{\n' + ",\n".join(lines) + "\n}}\n"

    @classmethod
    def loads(cls, text: str) -> Table:
        """Reads what `dumps` wrote."""
        fields = json.loads(text)
        kernels = {
            name: Figures(**{key: tuple(value) if isinstance(value, list) else value for key, value in figures.items()})
            for name, figures in fields["kernels"].items()
        }
        return cls(fields["triton"], kernels)


def _plain(figures: Figures) -> dict[str, Any]:
    """The figures without loops where there are none."""
    return {key: value for key, value in asdict(figures).items() if key != "loops" or value}


def table_rows() -> list[str]:
    """The prefixes of the rows that the table has: see `COMPILED_WHOLE`."""
    from helpers.triton_inventory import REPRESENTATIVE, shipped_kernels

    kernels = shipped_kernels()
    others = [
        kernel
        for kernel in kernels
        if "attention" not in kernel.operation
        or (kernel.operation.startswith("extend") and "pages of 16" in kernel.configuration)
    ]
    of_chips = [(COMPILED_WHOLE, kernels), *((chip, others) for chip in COMPILED_BUT_FOR_DECODE)]
    of_chips += [(chip, [each for each in kernels if each.row in REPRESENTATIVE]) for chip in SHARED_MEMORY]
    rows = [f"sm_{chip} {kernel.row}" for chip, some in of_chips for kernel in some if chip >= kernel.capability]
    return list(dict.fromkeys(rows))


def compile_shipped(
    capabilities: Sequence[int], only: Iterable[str] = (), seconds_per_kernel: float = SECONDS_PER_KERNEL
) -> Table:
    """Compiles shipped kernels in a separate process.

    **Arguments:** `only`: row prefixes; an empty one stands for every kernel.

    **Raises:** `RuntimeError` with the compiler's output if a kernel fails or takes too long; it names the kernel.
    """
    command = [sys.executable, "-m", "helpers.triton_ahead_of_time", "--json", "--seconds", str(seconds_per_kernel)]
    return Table.loads(run_compiling([*command, "--targets", *map(str, capabilities), "--only", *only]))


def run_compiling(command: Sequence[str]) -> str:
    """The output of `command` in a process where Triton compiles; `RuntimeError` with its error output if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the compilation failed:\n{done.stderr[-20_000:]}")
    return done.stdout


def _compile_all(capabilities: Sequence[int], only: Sequence[str], seconds: float) -> Table:
    import triton
    from helpers.triton_inventory import shipped_kernels

    from torch_backend.kernels.chip import Chip, can_launch_dependents

    kernels: dict[str, Figures] = {}
    for capability in capabilities:
        chip = Chip(capability, 132, can_launch_dependents(capability))
        for shipped in shipped_kernels():
            prefix = f"sm_{capability} {shipped.row}"
            if only and prefix not in only:
                continue
            print(f"{prefix}...", end="", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(seconds, exit=True)
            start = time.monotonic()
            for name, figures in compile_launch(partial(shipped.launch, chip), capability).items():
                kernels[prefix + name] = figures
            print(f" {time.monotonic() - start:.1f} s", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    return Table(triton.__version__, kernels)


def main() -> None:
    """The program: see the module."""
    parser = argparse.ArgumentParser(description="Compiles the Triton kernels that ship, without a GPU.")
    parser.add_argument("--targets", type=int, nargs="+", default=list(SHARED_MEMORY), metavar="CAPABILITY")
    parser.add_argument("--only", nargs="*", default=[], metavar="ROW", help="row prefixes; default: the table's")
    parser.add_argument("--write", type=Path, help="where to write the table")
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_KERNEL, help="for each kernel, at most")
    parser.add_argument("--json", action="store_true", help="print the table instead of a summary")
    options = parser.parse_args()
    table = _compile_all(options.targets, options.only or table_rows(), options.seconds)
    if options.write:
        kept = {name: replace(figures, loops=()) for name, figures in table.kernels.items()}
        options.write.write_text(Table(table.triton, kept).dumps())
    if options.json:
        print(table.dumps(), end="")
    else:
        for name in sorted(table.kernels):
            print(name, table.kernels[name])


if __name__ == "__main__":
    main()
