"""The text of a compiled program, and the kernels and collectives in it as the compiler generated them: kinds, dtypes,
and bytes sent per device."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tpu.operations import Operation

_KERNEL = re.compile(r'^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = .*custom_call_target="tpu_custom_call"')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(?P<entries>.*?)\]')
_SCOPED_ENTRY = re.compile(r'"memory_space":"(?P<space>\d+)"[^}]*"size":"(?P<size>\d+)"')
_VMEM = "1"
_COST = re.compile(r'"cost_estimate":\{(?P<fields>[^}]*)\}')
_COST_FIELD = re.compile(r'"(?P<name>flops|bytes_accessed)":"?(?P<value>-?\d+)')


@dataclass(frozen=True, slots=True)
class Kernel:
    """Calls of one Pallas kernel. `vmem`: maximum bytes of vector memory of a call; `flops`, `bytes`: of one call, by
    the kernel author's estimate; None if there is none. `all_flops`, `all_bytes`: of all calls."""

    name: str
    count: int
    vmem: int
    flops: int | None
    bytes: int | None
    all_flops: int = 0
    all_bytes: int = 0


def take_text(dumps: Path) -> str | None:
    """Returns the text of the module compiled last, after all passes. `Compiled.as_text` would be simpler, but fails on
    modules with some asynchronous operations (libtpu 0.0.51)."""
    found = sorted(dumps.glob("*.after_codegen.txt"), key=lambda file: file.stat().st_size)
    text = found[-1].read_text(errors="replace") if found else None
    shutil.rmtree(dumps)
    dumps.mkdir()
    return text


def find_kernels(text: str) -> tuple[Kernel, ...]:
    """The Pallas kernels of a module, in the order of their first calls."""
    calls: dict[str, list[Kernel]] = {}
    for line in text.splitlines():
        match = _KERNEL.match(line) if "tpu_custom_call" in line else None
        if match is not None:
            name = re.sub(r"(\.\d+)+$", "", match["name"])
            calls.setdefault(name, []).append(_kernel(name, line))
    return tuple(
        Kernel(
            name,
            len(found),
            max(call.vmem for call in found),
            found[0].flops,
            found[0].bytes,
            sum(call.flops or 0 for call in found),
            sum(call.bytes or 0 for call in found),
        )
        for name, found in calls.items()
    )


def _kernel(name: str, line: str) -> Kernel:
    scoped = _SCOPED.search(line)
    entries: Iterable[re.Match[str]] = _SCOPED_ENTRY.finditer(scoped["entries"]) if scoped else ()
    vmem = sum(int(entry["size"]) for entry in entries if entry["space"] == _VMEM)
    cost = _COST.search(line)
    fields = {field["name"]: int(field["value"]) for field in _COST_FIELD.finditer(cost["fields"])} if cost else {}
    return Kernel(name, 1, vmem, fields.get("flops"), fields.get("bytes_accessed"))


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind and dtype, inside or outside of the layers.

    - `type`: of the largest array, `bf16`; `largest`: the result of the largest of them, `bf16[64,4096]`.
    - `conditional`: in a branch that a step takes only if a request needs it.
    - `count`: runs per step; `bytes`: one device's bytes of all their results.
    """

    kind: str
    type: str
    in_layers: bool
    conditional: bool
    count: int
    bytes: int
    largest: str

    def sent(self, devices: int) -> float:
        """Bytes that each of `devices` devices sends, with ring algorithms."""
        match self.kind:
            case "all-reduce":
                return 2 * (devices - 1) / devices * self.bytes
            case "reduce-scatter":
                return (devices - 1) * self.bytes
            case "collective-permute":
                return self.bytes
            case _:
                return (devices - 1) / devices * self.bytes


def collectives_of(operations: Iterable[Operation]) -> tuple[Collective, ...]:
    """Groups collectives by kind: those of every step first, then by bytes, largest first."""
    found: dict[tuple[str, str, bool, bool], list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.is_collective:
            kind, type_ = operation.kind.removesuffix("-start"), operation.array.split("[")[0]
            found[kind, type_, operation.in_layers, operation.conditional].append(operation)
    collectives = (
        Collective(
            *key,
            count=sum(one.times for one in same),
            bytes=sum(one.bytes * one.times for one in same),
            largest=max(same, key=lambda one: one.bytes).array,
        )
        for key, same in found.items()
    )
    return tuple(sorted(collectives, key=lambda collective: (collective.conditional, -collective.bytes)))
