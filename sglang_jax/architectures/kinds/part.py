"""What every kind of part says of itself, and how it declares parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.sections import Sections
from sglang_jax.architectures.tensor_names import Kind, Part

Axes = tuple[tuple[Axis, ...], ...]
"""Of each axis of a tensor what it runs over, outermost first: (heads, head_dim) are the rows of a projection."""

Sizes = tuple[tuple[int, ...], ...]
"""Of `Axes`, in the same form, how far each runs."""

Factors = tuple[tuple[int, float], ...]
"""Numbers of rows, one run behind the other, and what each run is multiplied by."""

HIDDEN = (Axis.HIDDEN,)


@dataclass(frozen=True, slots=True)
class Declared:
    """A parameter of a part, before it has a name in a checkpoint. Fields are those of `manifest.ParameterSpec`;
    `stored_as`: the part of the model whose tensor this is as well."""

    part: Part
    kind: Kind
    axes: Axes
    sizes: Sizes
    offset: float = 0.0
    interleaved: bool = False
    stored_as: Part | None = None
    rotated: int = 0
    stored_head: int = 0
    first_in_head: int = 0
    factors: Factors = ()
    sections: Sections = ()
    default: float | None = None


@dataclass(frozen=True, slots=True)
class CachedArray:
    """What attention keeps of each token in pages: numbers `[heads, width]`, of which a device has whole heads; or
    `[width]`, which every device has, where `heads` is None. States have `recurrent.StateArray`."""

    name: str
    heads: int | None
    width: int

    def numbers(self, devices: int = 1) -> int:
        """Of a token, that each of so many devices has."""
        return self.width if self.heads is None else -(-self.heads // devices) * self.width


class LayerPart(Protocol):
    """A part of a layer: attention, a recurrent layer, or a feed-forward one."""

    def parameters(self, hidden: int) -> Iterator[Declared]:
        """Its parameters, in the order of the model. `hidden`: numbers of the residual stream."""
        ...

    def sharded(self, size: int) -> Self:
        """The part as it is built for `size` devices that share it, each with whole heads or columns: what there is too
        little of for that is there several times.

        **Raises:** `ConfigError` if it cannot be divided so.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """How the rows of each head are stored: see `ParameterSpec`."""

    interleaved: bool = False
    rotated: int = 0


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
    """A matrix, and its bias if it has one. Both scales become part of what is loaded."""
    rows = math.prod(sizes[0])
    own = Declared(part, Kind.WEIGHT, axes, sizes, 0.0, order.interleaved, stored_as, order.rotated)
    yield replace(own, factors=((rows, input_scale * output_scale),))
    if bias:
        yield replace(own, kind=Kind.BIAS, axes=axes[:1], sizes=sizes[:1], factors=((rows, output_scale),))


def norm_weight(part: Part, size: int, offset: float) -> Declared:
    """The weight of a norm over the residual stream."""
    return Declared(part, Kind.WEIGHT, (HIDDEN,), ((size,),), offset)
