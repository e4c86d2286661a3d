"""Matrices whose weights are stored as small whole numbers in blocks, read without being widened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.parameters import rows_of_parameter, stored_part
from sglang_jax.checkpoint.reader import Array, Index

BLOCK = 32
"""Weights along the inputs that share a scale."""


class BlockFormat(Enum):
    """What is stored of a block of 32 weights.

    - `FOUR_BITS`: levels 0 to 15, float16 scale and least weight: a weight is `scale * level + least`.
    - `EIGHT_BITS`: levels -128 to 127 and a float16 scale: a weight is `scale * level`.
    """

    FOUR_BITS = 4
    EIGHT_BITS = 8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return {BlockFormat.FOUR_BITS: BLOCK // 2 + 4, BlockFormat.EIGHT_BITS: BLOCK + 2}[self]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix `[out, in]` of one format.

    - `levels`: `[out, in / 32, 16]` uint8 of four bits, byte i of which has the level of weight i in its low half and
      that of weight i + 16 in its high one; `[out, in / 32, 32]` int8 of eight.
    - `scales`, `least`: float16 `[out, in / 32]`; `least` is None where weights have none.
    """

    form: BlockFormat
    levels: Array
    scales: Array
    least: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return self.levels.shape[0], self.levels.shape[1] * BLOCK

    def widened(self) -> Array:
        """The matrix in float32, `[out, in]`."""
        levels = self.levels
        if self.form is BlockFormat.FOUR_BITS:
            levels = np.concatenate((levels & 15, levels >> 4), axis=-1)
        found = self.scales.astype(np.float32)[..., None] * levels
        if self.least is not None:
            found += self.least.astype(np.float32)[..., None]
        return found.reshape(self.shape)

    def of_rows(self, change: Callable[[Array], Array]) -> Blocks:
        """The same with its rows in another order, or fewer of them."""
        least = None if self.least is None else change(self.least)
        return Blocks(self.form, change(self.levels), change(self.scales), least)

    @staticmethod
    def stacked(parts: Sequence[Blocks]) -> Blocks:
        """Matrices of one format, one after the other along the outputs."""
        least = [part.least for part in parts if part.least is not None]
        return Blocks(
            parts[0].form,
            np.concatenate([part.levels for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(least) if least else None,
        )


class BlockReader(Protocol):
    """What reads tensors of blocks beside reading them as numbers."""

    def block_format(self, name: str) -> BlockFormat | None:
        """The format of a tensor; None for one that is stored in another way. Reads no values."""
        ...

    def read_blocks(self, name: str, index: Index) -> Blocks:
        """The part of a tensor of blocks at `index`, which takes whole blocks."""
        ...


class BlockParameters:
    """Reads the parameters of a model as blocks where they are stored so: see `ParameterReader`."""

    def __init__(self, reader: BlockReader, config: ModelConfig) -> None:
        self._reader = reader
        self._specs = manifest_of(config).specs

    def format(self, name: ParameterName, index: Index | None = None) -> BlockFormat | None:
        """The format of a matrix, or of its part at `index`. None where it is stored in another way, where the part
        cuts through blocks, and where it is not used as it is stored (see `ParameterSpec.factors`). Reads no values."""
        spec = self._specs[name]
        if len(spec.shape) != 2 or spec.factors or spec.offset:
            return None
        _, (columns,) = stored_part(spec, index)
        first, last, _ = columns.indices(spec.shape[1])
        return None if first % BLOCK or last % BLOCK else self._reader.block_format(spec.tensor)

    def read(self, name: ParameterName, index: Index | None = None) -> Blocks:
        """The matrix, or its part at `index`, of which `format` is not None."""
        spec = self._specs[name]
        rows, rest = stored_part(spec, index)
        found = self._reader.read_blocks(spec.tensor, (rows, *rest))
        return found.of_rows(lambda rows: rows_of_parameter(spec, rows))
