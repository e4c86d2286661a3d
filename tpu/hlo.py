"""What the text of a compiled program tells: its collectives and its kernels.

A computation is counted once, however often a loop runs it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_INSTRUCTION = re.compile(
    rf" = (?P<result>[^=]*?) (?P<kind>{'|'.join(_COLLECTIVES)})(?P<start>-start)?\(",
)
_ARRAY = re.compile(r"\b(?P<type>pred|[a-z]+\d+\w*)\[(?P<shape>[\d,]*)\]")
_WIDTH = re.compile(r"\d+")

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?(?P<names>%[\w.-]+(?:, %[\w.-]+)*)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{|true_computation=|false_computation=)(?P<names>%[\w.-]+(?:, %[\w.-]+)*)"
)

_KERNEL = re.compile(r'^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = .*custom_call_target="tpu_custom_call"')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(?P<entries>.*?)\]')
_SCOPED_ENTRY = re.compile(r'"memory_space":"(?P<space>\d+)"[^}]*"size":"(?P<size>\d+)"')
_VMEM = "1"
_COST = re.compile(r'"cost_estimate":\{(?P<fields>[^}]*)\}')
_COST_FIELD = re.compile(r'"(?P<name>flops|bytes_accessed)":"?(?P<value>-?\d+)')


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind.

    - `count`: how many there are; `bytes`: what one device has of all their results.
    - `conditional`: in a branch that a step takes only if a request asks for it.
    - `largest`: the array that the largest of them results in, `bf16[64,4096]`.
    """

    kind: str
    conditional: bool
    count: int
    bytes: int
    largest: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """Calls of one Pallas kernel.

    - `vmem`: most bytes of vector memory that a call takes.
    - `flops`, `bytes`: of one call, by the estimate that the kernel's author gave; None if there is none.
    """

    name: str
    count: int
    vmem: int
    flops: int | None
    bytes: int | None


def take_text(dumps: Path) -> str | None:
    """The text of the module compiled last, as it was after all passes. `Compiled.as_text` would be the plain way, but
    fails on modules with some asynchronous operations (libtpu 0.0.51)."""
    found = sorted(dumps.glob("*.after_codegen.txt"), key=lambda file: file.stat().st_size)
    text = found[-1].read_text(errors="replace") if found else None
    shutil.rmtree(dumps)
    dumps.mkdir()
    return text


def find_collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a module: those of every step first, and largest first."""
    unconditional = _unconditional(text)
    found: dict[tuple[str, bool], list[tuple[int, str]]] = defaultdict(list)
    for computation, line in _instructions(text):
        match = _INSTRUCTION.search(line)
        if match is not None:
            arrays = [(_bytes(array), array[0]) for array in _ARRAY.finditer(match["result"])]
            # What starts one carries its operands, its results and a few words of state.
            size = max(arrays)[0] if match["start"] else sum(size for size, _ in arrays)
            found[match["kind"], computation not in unconditional].append((size, max(arrays)[1]))
    collectives = (
        Collective(kind, conditional, len(sizes), sum(size for size, _ in sizes), max(sizes)[1])
        for (kind, conditional), sizes in found.items()
    )
    return tuple(sorted(collectives, key=lambda collective: (collective.conditional, -collective.bytes)))


def find_kernels(text: str) -> tuple[Kernel, ...]:
    """The Pallas kernels of a module, in the order of their first calls."""
    calls: dict[str, list[Kernel]] = {}
    for line in text.splitlines():
        match = _KERNEL.match(line) if "tpu_custom_call" in line else None
        if match is not None:
            name = re.sub(r"(\.\d+)+$", "", match["name"])
            calls.setdefault(name, []).append(_kernel(name, line))
    return tuple(
        Kernel(name, len(found), max(call.vmem for call in found), found[0].flops, found[0].bytes)
        for name, found in calls.items()
    )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the computation that it is in."""
    name = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            name = header["name"]
        else:
            yield name, line


def _unconditional(text: str) -> set[str]:
    """Computations that the entry reaches without a branch."""
    called: dict[str, set[str]] = defaultdict(set)
    entry = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None and header["entry"]:
            entry = header["name"]
    for computation, line in _instructions(text):
        for match in _CALLED.finditer(line):
            called[computation].update(_names(match["names"]))
        for match in _BRANCHES.finditer(line):
            called[computation].difference_update(_names(match["names"]))
    reached: set[str] = set()
    waiting = [entry]
    while waiting:
        computation = waiting.pop()
        if computation not in reached:
            reached.add(computation)
            waiting.extend(called[computation])
    return reached


def _names(listed: str) -> list[str]:
    return [name.removeprefix("%") for name in listed.split(", ")]


def _kernel(name: str, line: str) -> Kernel:
    scoped = _SCOPED.search(line)
    entries: Iterable[re.Match[str]] = _SCOPED_ENTRY.finditer(scoped["entries"]) if scoped else ()
    vmem = sum(int(entry["size"]) for entry in entries if entry["space"] == _VMEM)
    cost = _COST.search(line)
    fields = {field["name"]: int(field["value"]) for field in _COST_FIELD.finditer(cost["fields"])} if cost else {}
    return Kernel(name, 1, vmem, fields.get("flops"), fields.get("bytes_accessed"))


def _bytes(array: re.Match[str]) -> int:
    elements = math.prod(int(size) for size in array["shape"].split(",") if size)
    width = _WIDTH.search(array["type"])
    return elements * max(int(width[0]) if width else 8, 8) // 8
