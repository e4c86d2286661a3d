"""The arithmetic of the loops in step programs that libtpu compiles: `python -m helpers.tpu_tile_loops FOLDER TOPOLOGY
OPTIONS` prints that of the largest decode step and of the largest mixed step of a model, as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.-]+) = (?P<result>.*?) (?P<kind>[a-z][\w-]*)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=|false_computation=)(%[\w.-]+(?:, %[\w.-]+)*)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ATTRIBUTES = re.compile(r"(?:dim_labels|window|dimensions|direction|slice)=(?:\{[^}]*\}|[\w>-]+)")
_TILING = re.compile(r'"(?:kernel_window_bounds|iteration_bounds|input_window_bounds|output_window_bounds)":\[[^]]*\]')
_MEMORY = re.compile(r"S\(\d+\)|/\*index=\d+\*/")

_PRODUCTS = ("convolution", "dot")
_SUMS = (*_PRODUCTS, "reduce", "reduce-window")
_INTEGERS = re.compile(r"^\(?(?:[su]\d+|pred)\[")
_MOVES = {
    *("parameter", "constant", "tuple", "get-tuple-element", "copy", "copy-start", "copy-done", "bitcast", "reshape"),
    *("transpose", "broadcast", "slice", "dynamic-slice", "dynamic-update-slice", "pad", "concatenate"),
    *("gather", "scatter"),
    *("fusion", "while", "conditional", "call", "async-start", "async-update", "async-done", "custom-call"),
    *("opt-barrier", "optimization-barrier", "after-all", "slice-start", "slice-done"),
}
"""Instructions that compute nothing."""


@dataclass(frozen=True)
class Loops:
    """`bodies`: for each name of a loop in the program, the arithmetic of each such loop; `outside`: products in no
    loop."""

    bodies: dict[str, list[str]]
    outside: list[str]


@dataclass(frozen=True)
class _Instruction:
    result: str
    kind: str
    rest: str

    @property
    def called(self) -> list[str]:
        branches = [name.strip(" %") for found in _BRANCHES.findall(self.rest) for name in found.split(",")]
        return [*_CALLED.findall(self.rest), *branches]


def loops_of(text: str) -> Loops:
    """The loops of a module's text. A loop's arithmetic is the set of its instructions that are neither on integers nor
    moves, with types and layouts, and for sums how they are divided; not where its operands are in memory."""
    computations = dict[str, list[_Instruction]]()
    entry, own = "", list[_Instruction]()
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            own = computations.setdefault(header["name"], [])
            entry = header["name"] if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            own.append(_Instruction(_MEMORY.sub("", found["result"]), found["kind"], found["rest"]))

    def arithmetic(name: str, tiling: str) -> Iterator[str]:
        for each in computations.get(name, ()):
            here = " ".join(_TILING.findall(each.rest)) or tiling
            if each.kind not in _MOVES and not _INTEGERS.match(each.result):
                of_sum = here if each.kind in _SUMS else ""
                yield " ".join((each.kind, each.result, *_ATTRIBUTES.findall(each.rest), of_sum))
            if each.kind not in _SUMS:
                for called in each.called:
                    yield from arithmetic(called, here)

    def walk(name: str) -> Iterator[tuple[str, str]]:
        for each in computations.get(name, ()):
            if each.kind == "while":
                origin = _OP_NAME.search(each.rest)
                (body,) = re.findall(r"body=%([\w.-]+)", each.rest)
                yield (origin[1] if origin else ""), "\n".join(sorted(set(arithmetic(body, ""))))
            elif each.kind in _PRODUCTS:
                yield "", each.result
            else:
                for called in each.called:
                    yield from walk(called)

    bodies, outside = dict[str, list[str]](), list[str]()
    for origin, found in walk(entry):
        if origin:
            bodies.setdefault(origin, []).append(found)
        else:
            outside.append(found)
    return Loops({origin: sorted(found) for origin, found in bodies.items()}, outside)


def compiled_loops(folder: Path, topology: str, **options: Any) -> tuple[Loops, Loops]:
    """The loops of the largest decode step and of the largest mixed step, of the model of a folder with a
    config.json."""
    root = Path(__file__).parents[2]
    paths = [root, root / "tests", Path(sys.prefix) / "libtpu", os.environ.get("PYTHONPATH", "")]
    arguments = [str(folder), topology, json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-m", "helpers.tpu_tile_loops", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decode, mixed = json.loads(done.stdout.splitlines()[-1])
    return Loops(**decode), Loops(**mixed)


def differences(few: Loops, many: Loops) -> list[str]:
    """Loops of a program of few rows that are not loops of one of many rows, with what differs."""
    found = []
    for origin, bodies in few.bodies.items():
        missing = Counter(bodies) - Counter(many.bodies.get(origin, ()))
        others = Counter(many.bodies.get(origin, ())) - Counter(bodies)
        for mine, theirs in zip(missing, [*others, *[""] * len(missing)], strict=False):
            lines = set(mine.splitlines()) ^ set(theirs.splitlines())
            found.append("\n".join((origin, *sorted(lines))))
    return found


def main(folder: str, topology: str, options: str) -> None:
    from tpu.worker import prepare_compiler

    dumps = prepare_compiler(Path(tempfile.mkdtemp()))
    from dataclasses import asdict

    from sglang_jax.checkpoint.opening import open_checkpoint
    from sglang_jax.config import EngineConfig, LoadFormat
    from tpu import compiling
    from tpu.figures import ProgramFailure, Request, Selection
    from tpu.topologies import parse_topology

    texts, take_text = list[str](), compiling.take_text

    def take(dumps: Path) -> str | None:
        text = take_text(dumps)
        assert text is not None
        texts.append(text)
        return text

    def refuse(message: object) -> None:
        assert not isinstance(message, ProgramFailure), message

    compiling.take_text = take
    request = Request(
        model=open_checkpoint(folder, LoadFormat.DUMMY).config,
        options=EngineConfig(model_path=folder, **json.loads(options)),
        topology=parse_topology(topology),
        selection=Selection.QUICK,
    )
    compiling.compile_all(request, dumps, refuse)
    print(json.dumps([asdict(loops_of(text)) for text in texts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
