"""The cost of each operation of a compiled program by the compiler's own estimate, including loops. It covers an
operation's instructions and its waits for memory, but neither Pallas kernels, nor collectives, nor copies that overlap
with other work."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
LAYER = "jit(_run_layer)"
"""Name of the layers in the program: see `models.transformer`."""

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.-]+) = (?P<result>.*?) (?P<kind>[a-z][\w-]*)\((?P<operands>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations)=\{?%([\w.-]+)")
_LOOP = re.compile(r"condition=%(?P<condition>[\w.-]+), body=%(?P<body>[\w.-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{|true_computation=|false_computation=)(?P<names>%[\w.-]+(?:, %[\w.-]+)*)"
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
_WIDTH = re.compile(r"\d+")
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_ENTRY_OF_TABLE = re.compile(r"^(?P<number>\d+) (?P<value>.*)$")
_MEMORY = re.compile(r"S\(\d+\)")
_INDEX = re.compile(r"index=(\d+)")
_FIELD = re.compile(r"(\w+)=(\d+)")

_MOVES = ("copy", "transpose", "bitcast-convert")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step, with the compiler's estimate.

    - `name`, `kind`: of the instruction; `result`: with its layout, `bf16[64,4096]{1,0:T(8,128)}`.
    - `cycles`: of one run; `times`: runs per step.
    - `conditional`: in a branch that a step takes only if a request needs it.
    - `origin`: its name in the program, `jit(step)/dot_general`; `source`: file and line, empty if unknown.
    - `moved`: the program's argument that the operation only moves to another layout, else empty.
    - `takes`: for a collective or a windowed product, the program's arguments that it reads unchanged.
    - `offloaded`: it starts work on the SparseCores, other than collectives.
    """

    name: str
    kind: str
    result: str
    cycles: int
    times: int
    conditional: bool
    origin: str
    source: str
    moved: str
    offloaded: bool = False
    takes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.cycles * self.times

    @property
    def is_windowed(self) -> bool:
        """Whether it is part of a product that is split into pieces, to exchange one while another is multiplied."""
        return self.kind == "while" and "windowed_dot_general" in self.result

    @property
    def is_collective(self) -> bool:
        return self.kind.removesuffix("-start") in COLLECTIVES

    @property
    def is_sort(self) -> bool:
        """Whether it is a sort, or runs on the SparseCores: a scatter to a large table becomes both."""
        return self.kind == "sort" or self.offloaded

    @property
    def in_layers(self) -> bool:
        return LAYER in self.origin

    @property
    def array(self) -> str:
        """The largest array of the result, without its layout."""
        found = [(_bytes(array), array[0]) for array in _ARRAY.finditer(self.result)]
        return max(found)[1] if found else ""

    @property
    def bytes(self) -> int:
        """Bytes of the result; of a start operation's operands, results and state, only the largest array."""
        sizes = [_bytes(array) for array in _ARRAY.finditer(self.result)]
        return max(sizes, default=0) if self.kind.endswith("-start") else sum(sizes)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    kind: str
    result: str
    operands: tuple[str, ...]
    line: str
    root: bool


class Module:
    """The text of a compiled program."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, dict[str, _Instruction]] = {}
        self._tables: dict[str, dict[int, str]] = {}
        self._entry = ""
        self._read(text)

    def operations(self) -> tuple[Operation, ...]:
        """Operations with an estimate, collectives, sorts, and loops of windowed products, in the order of the text."""
        return tuple(self._walk(self._entry, 1, False, {}))

    def _read(self, text: str) -> None:
        table: dict[int, str] = {}
        own: dict[str, _Instruction] = {}
        for line in text.splitlines():
            if _TABLE.match(line):
                table = self._tables.setdefault(line, {})
            elif header := _COMPUTATION.match(line):
                own = self._computations.setdefault(header["name"], {})
                self._entry = header["name"] if header["entry"] else self._entry
            elif found := _INSTRUCTION.match(line):
                operands = tuple(_OPERAND.findall(found["operands"]))
                root = found["root"] is not None
                own[found["name"]] = _Instruction(found["name"], found["kind"], found["result"], operands, line, root)
            elif row := _ENTRY_OF_TABLE.match(line):
                table[int(row["number"])] = row["value"]

    def _walk(self, computation: str, times: int, conditional: bool, arguments: dict[int, str]) -> Iterator[Operation]:
        """Yields the operations of a computation and those that it calls. `arguments`: the elements of its tuple that
        are arguments of the program."""
        own = self._computations.get(computation, {})
        names: dict[str, str] = {}
        for instruction in own.values():
            names[instruction.name] = self._argument(instruction, names, arguments, computation == self._entry)
            found = self._operation(instruction, times, conditional, names, own)
            if found.is_collective:
                found = replace(found, takes=tuple(name for each in instruction.operands if (name := names.get(each))))
            if found.cycles or found.is_collective or found.is_sort:
                yield found
            if instruction.kind == "while" and (loop := _LOOP.search(instruction.line)):
                carried = self._carried(instruction, own, names)
                if "windowed_dot_general" in loop["body"]:
                    result, given = f"windowed_dot_general {instruction.result}", tuple(carried.values())
                    yield replace(found, result=result, takes=given)
                trips = self._trips(loop["condition"], loop["body"], _initial(instruction, own))
                yield from self._walk(loop["body"], times * trips, conditional, carried)
            elif branches := _BRANCHES.search(instruction.line):
                for branch in _OPERAND.findall(branches["names"]):
                    yield from self._walk(branch, times, True, {})
            elif called := _CALLED.search(instruction.line):
                # An operation's estimate includes all within, except what the compiler runs in parallel.
                within = self._walk(called[1], times, conditional, {})
                whole = instruction.kind in ("call", "async-start")
                wanted = (inner for inner in within if whole or inner.is_collective)
                yield from (replace(inner, origin=inner.origin or found.origin) for inner in wanted)

    def _operation(
        self,
        instruction: _Instruction,
        times: int,
        conditional: bool,
        names: dict[str, str],
        own: dict[str, _Instruction],
    ) -> Operation:
        cycles = _CYCLES.search(instruction.line)
        origin = _OP_NAME.search(instruction.line)
        return Operation(
            name=instruction.name,
            kind=instruction.kind,
            result=instruction.result,
            cycles=int(cycles[1]) if cycles else 0,
            times=times,
            conditional=conditional,
            origin=origin[1] if origin else "",
            source=self._source(instruction.line),
            moved=self._moved(instruction, names, own),
            offloaded='async_execution_thread="sparsecore"' in instruction.line and not self._exchanges(instruction),
        )

    def _exchanges(self, instruction: _Instruction) -> bool:
        """Whether an instruction calls a collective, which SparseCores may run too."""
        called = _CALLED.search(instruction.line)
        inner = self._computations.get(called[1], {}).values() if called else ()
        return any(each.kind.removesuffix("-start") in COLLECTIVES or self._exchanges(each) for each in inner)

    def _argument(
        self, instruction: _Instruction, names: dict[str, str], arguments: dict[int, str], at_entry: bool
    ) -> str:
        """The program's argument that an instruction returns unchanged; empty if it does not."""
        match instruction.kind:
            case "parameter" if at_entry:
                origin = _OP_NAME.search(instruction.line)
                return origin[1] if origin else instruction.name
            case "get-tuple-element":
                index = _INDEX.search(instruction.line)
                return arguments.get(int(index[1]), "") if index else ""
            case "copy-start" | "copy-done" | "bitcast" | "optimization-barrier":
                return names.get(instruction.operands[0], "") if instruction.operands else ""
            case _:
                return ""

    def _carried(self, loop: _Instruction, own: dict[str, _Instruction], names: dict[str, str]) -> dict[int, str]:
        """Elements of a loop's initial tuple that are arguments of the program."""
        given = (None if each is None else names.get(each.name) for each in _initial(loop, own))
        return {index: name for index, name in enumerate(given) if name}

    def _moved(self, instruction: _Instruction, names: dict[str, str], own: dict[str, _Instruction]) -> str:
        """The argument that an instruction moves: by a copy, or a fusion of only moves. A copy to another memory,
        mostly VMEM, in the same layout does not count."""
        if len(instruction.operands) != 1 or not names.get(instruction.operands[0]):
            return ""
        given = own.get(instruction.operands[0])
        if instruction.kind == "copy" and given is not None and _as_it_lies(given) == _as_it_lies(instruction):
            return ""
        if instruction.kind in _MOVES:
            return names[instruction.operands[0]]
        if instruction.kind == "fusion" and (called := _CALLED.search(instruction.line)):
            inner = {found.kind for found in self._computations.get(called[1], {}).values()}
            if inner <= {*_MOVES, "parameter", "bitcast", "reshape"} and inner & {*_MOVES, "reshape"}:
                return names[instruction.operands[0]]
        return ""

    def _trips(self, condition: str, body: str, initial: Sequence[_Instruction | None]) -> int:
        """Trips of a loop whose condition compares a counter from 0 with a constant, which may be an element of its
        initial tuple; 1 for any other."""
        own = self._computations.get(condition, {})
        compared = next((found for found in own.values() if found.root and "direction=LT" in found.line), None)
        if compared is None:
            return 1
        limit = next((found for name in compared.operands if (found := _constant(own.get(name), initial))), 1)
        counter = own.get(compared.operands[0])
        index = _INDEX.search(counter.line) if counter is not None else None
        return -(-limit // self._increment(body, int(index[1]))) if index else limit

    def _increment(self, body: str, element: int) -> int:
        """The amount that a loop's body adds to an element of its tuple; 1 if it cannot be determined."""
        own = self._computations.get(body, {})
        result = next((found for found in own.values() if found.root), None)
        if result is None or element >= len(result.operands):
            return 1
        total, sums = 0, own.get(result.operands[element])
        while sums is not None and sums.kind in ("add", "copy"):
            total += sum(_constant(own.get(name)) for name in sums.operands)
            sums = own.get(sums.operands[0])
        return max(total, 1)

    def _source(self, line: str) -> str:
        frame = _FRAME.search(line)
        if frame is None:
            return ""
        place = _fields(self._tables.get("StackFrames", {}).get(int(frame[1]), "")).get("file_location_id")
        location = _fields(self._tables.get("FileLocations", {}).get(place or 0, ""))
        name = self._tables.get("FileNames", {}).get(location.get("file_name_id", 0), "").strip('"')
        return f"{name}:{location['line']}" if name else ""


def _as_it_lies(instruction: _Instruction) -> str:
    """The result with its layout, without its memory space: `S(1)` is VMEM."""
    return _MEMORY.sub("", instruction.result)


def _initial(loop: _Instruction, own: dict[str, _Instruction]) -> tuple[_Instruction | None, ...]:
    """The elements of a loop's initial tuple, where they are known."""
    given = own.get(loop.operands[0])
    return () if given is None or given.kind != "tuple" else tuple(own.get(name) for name in given.operands)


def _constant(instruction: _Instruction | None, elements: Sequence[_Instruction | None] = ()) -> int:
    """The value of an integer constant, or of one of the `elements` that the instruction takes from a tuple; 0 for all
    else."""
    if instruction is not None and instruction.kind == "get-tuple-element" and elements:
        index = _INDEX.search(instruction.line)
        instruction = elements[int(index[1])] if index else None
    found = re.search(r" constant\((\d+)\)", instruction.line) if instruction is not None else None
    return int(found[1]) if found else 0


def short_source(source: str) -> str:
    """A source location without the path before the package."""
    return source[max(source.rfind("sglang_jax/"), 0) :]


def _fields(row: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}


def _bytes(array: re.Match[str]) -> int:
    elements = math.prod(int(size) for size in array["shape"].split(",") if size)
    width = _WIDTH.search(array["type"])
    return elements * max(int(width[0]) if width else 8, 8) // 8
