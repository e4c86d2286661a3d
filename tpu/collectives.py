"""The collectives of a compiled program, as the compiler made them: kinds, types, and what a device sends for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tpu.operations import Operation


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind and type, of the layers or of what is around them.

    - `type`: of the largest array, `bf16`.
    - `conditional`: in a branch that a step takes only if a request asks for it.
    - `count`: how often a step runs them; `bytes`: what one device has of all their results.
    - `largest`: the array that the largest of them results in, `bf16[64,4096]`.
    """

    kind: str
    type: str
    in_layers: bool
    conditional: bool
    count: int
    bytes: int
    largest: str

    def sent(self, devices: int) -> float:
        """Bytes that each of so many devices sends, as rings do it."""
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
    """By kind: those of every step first, and those with the most bytes first."""
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
