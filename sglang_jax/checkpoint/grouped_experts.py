"""The matrices of all experts of a layer in one tensor, in MXFP4 of the Open Compute Project, as gpt-oss has them.

`X_blocks`: uint8 `[experts, out, groups, 16]`, floats of 4 bits (E2M1), the first of two in the low half of a byte;
`X_scales`: uint8 `[experts, out, groups]`, the exponents of the groups' scales, plus 127.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import Manifest
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from sglang_jax.checkpoint.grouped_tensors import GroupScheme
from sglang_jax.checkpoint.reader import Array, Index, whole_index
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.errors import CheckpointError

MXFP4 = GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)

_BLOCKS, _SCALES = "_blocks", "_scales"
_HALF = MXFP4.weights // 2
"""Bytes of a group."""

_NAN = 255
"""The exponent of NaN."""


class GroupedExperts:
    """Matrices `[experts, out, in]`. See `GroupedTensor`."""

    kind = MXFP4

    def __init__(
        self, folder: SafetensorsReader, stem: str, _scheme: GroupScheme, expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """See `GroupedMatrix`."""
        self._folder = folder
        self.name, self._scales = f"{stem}{_BLOCKS}", f"{stem}{_SCALES}"
        self.tensors = frozenset({self.name, self._scales})
        sides = folder.shape(self.name)
        if len(sides) != 4 or sides[-1] != _HALF:
            wanted = expected.get(self.name)
            shape = "" if wanted is None else f", such as {(*wanted[:2], wanted[2] // MXFP4.weights, _HALF)}"
            raise CheckpointError(f"{self.name} is {sides}, it must have four axes, the last of {_HALF}{shape}")
        self.shape = (*sides[:2], sides[2] * MXFP4.weights)

    def blocks(self, index: Index | None = None) -> Array:
        """The part at `index`, of whole blocks: uint8 `[experts, rows, blocks, bytes]`. Raises `CheckpointError` for
        scales that are not numbers."""
        experts, rows, columns = whole_index(self.shape, index)
        first, last, _ = columns.indices(self.shape[2])
        groups = slice(first // MXFP4.weights, -(-last // MXFP4.weights))
        stored = self._folder.read_raw(self.name, (experts, rows, groups))
        scales = self._folder.read_raw(self._scales, (experts, rows, groups))
        if (scales == _NAN).any():
            raise CheckpointError(f"{self._scales} has a scale that is not a number: the checkpoint is damaged")
        levels = np.empty((*stored.shape[:-1], MXFP4.weights), np.uint8)
        np.bitwise_and(stored, 15, out=levels[..., ::2])
        np.right_shift(stored, 4, out=levels[..., 1::2])
        own = MXFP4.join(
            levels.reshape(-1, levels.shape[2] * MXFP4.weights),
            np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu).reshape(-1, scales.shape[2]),
        )
        return own.reshape(*scales.shape, MXFP4.nbytes)

    def widened(self, index: Index | None = None) -> NDArray[np.float32]:
        """The part at `index`, dequantised: float32 `[experts, rows, columns]`."""
        columns = whole_index(self.shape, index)[2]
        first, last, _ = columns.indices(self.shape[2])
        blocks = self.blocks(index)
        found = MXFP4.unpack(blocks.reshape(-1, *blocks.shape[2:])).widened()
        skipped = first // MXFP4.weights * MXFP4.weights
        return found.reshape(*blocks.shape[:2], -1)[..., first - skipped : max(last, first) - skipped]

    def faults(self) -> Iterator[str]:
        """See `GroupedTensor`."""
        groups = self._folder.shape(self.name)[:3]
        for name, shape in ((self.name, (*groups, _HALF)), (self._scales, groups)):
            if name not in self._folder.names():
                yield f"missing: {name}"
            elif self._folder.shape(name) != shape:
                yield f"misshapen: {name} is {self._folder.shape(name)}, it must be {shape}"
            elif self._folder.stored_as(name) != "uint8":
                yield f"mistyped: {name} is stored as {self._folder.stored_as(name)}, it must be uint8"


def blocks_of_experts(manifest: Manifest) -> frozenset[str]:
    """The names under which the matrices of a model's experts are read if they are in MXFP4."""
    places = (place for spec in manifest.specs.values() for place in spec.places)
    return frozenset(place.tensor for place in places if place.tensor.endswith(_BLOCKS))
