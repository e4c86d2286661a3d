"""The collectives of a compiled program as the compiler generated them: kinds, dtypes, and bytes sent per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tpu.operations import Operation


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
