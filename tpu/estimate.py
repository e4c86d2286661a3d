"""The compiler's estimate of a whole program: its time, its slowest operations, and costs that could be avoided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpu.operations import Operation, short_source

_WORST = 5
_MIN_CYCLES_OF_A_MOVE = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of the operations that run in every step, without branches that only some requests need, and without
    Pallas kernels and collectives, which the compiler does not estimate.

    - `cycles`: of the program, including loops; `layer_cycles`: those of the layers. `worst`: the operations with the
      most cycles.
    - `moves`: operations that only convert weights or pages to another layout.
    - `windowed`: products that are split into pieces, to exchange one while another is multiplied.
    - `permutes`: collective permutes in the layers. `sorts`: sorts, and operations on the SparseCores.
    """

    cycles: int
    layer_cycles: int
    worst: tuple[Operation, ...]
    moves: tuple[Operation, ...]
    windowed: tuple[Operation, ...]
    permutes: tuple[Operation, ...]
    sorts: int

    @classmethod
    def of(cls, operations: Sequence[Operation], names: Mapping[str, str]) -> Estimate:
        """Summarises operations; `names`: of weights, by their names in the program (`weights[3]`)."""
        own = [operation for operation in operations if not operation.conditional]
        moves = (
            replace(operation, moved=names.get(operation.moved, operation.moved))
            for operation in own
            if operation.moved in names
            or (operation.moved.startswith("state.") and operation.cycles > _MIN_CYCLES_OF_A_MOVE)
        )

        def named(found: Iterable[Operation]) -> tuple[Operation, ...]:
            return tuple(replace(one, takes=tuple(names.get(name, name) for name in one.takes)) for one in found)

        return cls(
            cycles=sum(operation.total for operation in own),
            layer_cycles=sum(operation.total for operation in own if operation.in_layers),
            worst=tuple(sorted(own, key=lambda operation: -operation.total)[:_WORST]),
            moves=tuple(moves),
            windowed=named(operation for operation in own if operation.is_windowed),
            permutes=named(operation for operation in own if operation.in_layers and "permute" in operation.kind),
            sorts=sum(operation.is_sort for operation in own),
        )

    def warnings(self, program: str, clock: float) -> list[str]:
        found = [
            f"{program!r} converts {move.moved} to another layout at every step: {move.result.split('{')[0]}, "
            f"{move.total / clock * 1e6:.0f} us ({short_source(move.source) or move.name})"
            for move in self.moves
        ]
        found += [
            f"{program!r} splits a product into pieces that devices exchange one by one, {where}"
            for where in _places(self.windowed)
        ]
        found += [
            f"{program!r} permutes an array among devices in the layers, {where}" for where in _places(self.permutes)
        ]
        if self.sorts:
            found.append(f"{program!r} has {self.sorts} sorts, or parts left to the SparseCores, at every step")
        return found


def _places(operations: Sequence[Operation]) -> list[str]:
    """Groups operations by arrays and line: runs per step, names of arguments, the largest array, and the line."""
    found: Counter[tuple[str, str]] = Counter()
    for operation in operations:
        arrays = " ".join([*operation.takes, operation.array])
        found[arrays, short_source(operation.source) or operation.name] += operation.times
    return [f"{times}x a step: {arrays} ({source})" for (arrays, source), times in found.items()]
