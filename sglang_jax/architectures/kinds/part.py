"""The interface of parts of layers, and how they declare parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.sections import Sections
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import ParameterKind, Part

Axes = tuple[tuple[Axis, ...], ...]
"""The meaning of each axis of a tensor, a product of `Axis`, outermost first: rows of queries are (heads, head_dim)."""

Sizes = tuple[tuple[int, ...], ...]
"""The lengths of `Axes`, in the same structure."""

Factors = tuple[tuple[int, float], ...]
"""Consecutive runs of rows: the number of rows of each, and its multiplier."""

HIDDEN = (Axis.HIDDEN,)


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """Where a parameter is in a tensor that stores several parameters head by head.

    - `stored`: rows of the tensor per head.
    - `runs`: the first row and the number of rows, of each head's, of each run that belongs to the parameter. Its rows
      are the first run of all heads, then the second run of all heads, and so on.
    """

    stored: int
    runs: tuple[tuple[int, int], ...]

    @property
    def own(self) -> int:
        """Rows of the parameter per head."""
        return sum(count for _, count in self.runs)


def side_by_side(first: int, second: int) -> tuple[FusedHeads, FusedHeads]:
    """The places of two parameters with these rows per head, the second of which follows the first in each head."""
    return FusedHeads(first + second, ((0, first),)), FusedHeads(first + second, ((first, second),))


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter before it has a name in a checkpoint. Fields: see `manifest.ParameterSpec`. `stored_as`: the part
    whose tensor, from the same row on, holds this one too."""

    part: Part
    kind: ParameterKind
    axes: Axes
    sizes: Sizes
    offset: float = 0.0
    interleaved: bool = False
    stored_as: Part | None = None
    rotated_rows: int = 0
    fused_heads: FusedHeads | None = None
    factors: Factors = ()
    sections: Sections = ()
    default: float | None = None


@dataclass(frozen=True, slots=True)
class CachedArray:
    """An array that attention caches in pages. Shape per token: `[heads, width]`, sharded by heads; or, if `heads` is
    None, `[width]`, replicated on every device. `parts`: the sizes of its parts, each of which has a scale of its own
    in 8 bits; none for an array with heads. Recurrent states have `recurrent.StateArray`."""

    name: str
    heads: int | None
    width: int
    parts: tuple[int, ...] = ()

    def numbers(self, devices: int = 1) -> int:
        """Numbers per token on each of `devices`."""
        return self.width if self.heads is None else -(-self.heads // devices) * self.width


class LayerPart(Protocol):
    """A part of a layer: attention, a recurrent layer, or a feed-forward one."""

    def parameters(self, hidden: int) -> Iterator[Declared]:
        """Its parameters, in the order of the model. `hidden`: width of the residual stream."""
        ...

    def sharded(self, over: Parallelism) -> Self:
        """The whole part as it is built for several devices, each of which gets complete heads, columns or experts.
        Heads of which there are fewer than devices are replicated.

        **Raises:** `ConfigError` if the devices cannot share the part.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order in which the rows of each head are stored: see `ParameterSpec`."""

    interleaved: bool = False
    rotated_rows: int = 0


_AS_STORED = HeadOrder()


def linear(
    part: Part,
    sizes: Sizes,
    axes: Axes,
    bias: bool,
    *,
    order: HeadOrder = _AS_STORED,
    stored_as: Part | None = None,
    input_scale: float = 1.0,
    output_scale: float = 1.0,
) -> Iterator[Declared]:
    """A matrix, and its bias if it has one. Both are multiplied by `output_scale` when loaded, and the matrix also by
    `input_scale`."""
    rows = math.prod(sizes[0])
    own = Declared(part, ParameterKind.WEIGHT, axes, sizes, 0.0, order.interleaved, stored_as, order.rotated_rows)
    yield replace(own, factors=((rows, input_scale * output_scale),))
    if bias:
        yield replace(own, kind=ParameterKind.BIAS, axes=axes[:1], sizes=sizes[:1], factors=((rows, output_scale),))


def norm_parameters(part: Part, size: int, norm: NormConfig) -> Iterator[Declared]:
    """The weight of a norm over the residual stream, and its bias if it has one."""
    yield Declared(part, ParameterKind.WEIGHT, (HIDDEN,), ((size,),), norm.offset)
    if norm.bias:
        yield Declared(part, ParameterKind.BIAS, (HIDDEN,), ((size,),))
