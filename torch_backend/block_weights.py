"""Matrices that stay in the blocks in which a checkpoint stores them, beside their packed form."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader, TensorReader
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.linear import Linear
from torch_backend.layers.matrix import InBlocks
from torch_backend.layers.weight_format import PackedAndBlocks
from torch_backend.models.transformer import Transformer
from torch_backend.weights import ParameterPart, packs, sources

logger = logging.getLogger(__name__)

_OUTPUTS_TOGETHER = 4
"""Outputs of a part of a matrix are a multiple of this."""

_MOST_OF_MEMORY = 1 / 8
"""Of what the other form of all weights leaves, blocks take no more than this share."""


class BlockMatrices(Protocol):
    """Makes matrices of blocks that multiply on this machine."""

    def work(self, encoding: Encoding, *, gated: bool) -> bool:
        """Whether products of an encoding, or gated ones, can be had here and are right; said in the log if not."""
        ...

    def matrix(self, blocks: Stored, bias: torch.Tensor | None) -> InBlocks:
        """A matrix whose outputs are a multiple of 4, each half of them if it is gate and up."""
        ...


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """The matrix of a linear layer of which all parts have one encoding."""

    linear: Linear
    parts: list[ParameterPart]
    encoding: Encoding
    parameters: ParameterReader
    matrices: BlockMatrices

    @property
    def nbytes(self) -> int:
        """Bytes that its blocks take; known before they are read."""
        return self.encoding.nbytes(*self.linear.weight.shape)

    def read(self) -> InBlocks | None:
        """The layer's blocks; None if eight times some scale overflows float16."""
        blocks = Stored.stacked([self.parameters.read_stored(part.name, part.index) for part in self.parts])
        if blocks.encoding.offsets and not bool(np.isfinite(blocks.arrays[Role.OFFSETS]).all()):
            return None
        return self.matrices.matrix(blocks, self.linear.bias)


def matrices_to_keep(
    model: Transformer, config: ModelConfig, reader: TensorReader, matrices: BlockMatrices | None, room: int
) -> Sequence[KeptMatrix]:
    """The matrices of `model` to be kept in blocks: none where `matrices` is None, or where they would take more than
    an eighth of `room`, the bytes that the packed model leaves. Reads no values."""
    if matrices is None or not packs(model):
        return ()
    parameters = ParameterReader(reader, config)
    kept = []
    for module, name, parts in sources(model, config, tied_head=True):
        if isinstance(module, Linear) and name == "weight":
            encoding = _common_encoding(module, parts, parameters)
            if encoding is not None and matrices.work(encoding, gated=parts[0].name.part is Part.GATE):
                kept.append(KeptMatrix(module, parts, encoding, parameters, matrices))
    needed = sum(each.nbytes for each in kept)
    if needed > room * _MOST_OF_MEMORY:
        logger.info(
            "Quantised matrices are only kept dequantised: keeping both takes %.0f MiB, more than an eighth of %.0f",
            needed / 2**20,
            room / 2**20,
        )
        return ()
    return kept


def _common_encoding(linear: Linear, parts: list[ParameterPart], parameters: ParameterReader) -> Encoding | None:
    found = {parameters.encoding(part.name, part.index) for part in parts}
    rows = [part.index[0].stop - part.index[0].start for part in parts]
    if len(found) > 1 or sum(rows) != len(linear.weight) or any(count % _OUTPUTS_TOGETHER for count in rows):
        return None
    return found.pop()


def measure_forms(weights: PackedAndBlocks) -> None:
    """Finds out for how many rows blocks are quicker than packed matrices; says so in the log. Belongs on the thread
    that runs the model."""
    found = {f"{form.outputs}x{form.inputs}": limit for form, limit in weights.measure().items()}
    logger.info(
        "Quantised matrices are used in steps with at most these numbers of rows: %s",
        ", ".join(f"{shape} {limit}" for shape, limit in found.items()),
    )
