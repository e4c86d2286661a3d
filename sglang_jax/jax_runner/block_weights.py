"""Which matrices of a model are kept in the blocks of a GGUF file too, and their values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.reader import Role, TensorReader
from sglang_jax.cpu_kernels.block_layout import OUTPUTS, pack
from sglang_jax.errors import CheckpointError
from sglang_jax.layers.block_matrix import BlockMatrix, BlockProduct
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import named_sharding
from sglang_jax.models.parameters import HEAD
from sglang_jax.models.transformer import Transformer

logger = logging.getLogger(__name__)

_MOST_OF_MEMORY = 1 / 8
"""Of what the other form of all weights leaves, blocks take no more than this share."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of a model as a checkpoint has it: parts one after the other along the outputs, and in which order the
    model has their rows, None for the same."""

    names: tuple[ParameterName, ...]
    order: np.ndarray | None


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """The matrices of a model that are kept in blocks, by their place in it, and their reader."""

    products: dict[str, BlockProduct]
    matrices: dict[str, _Matrix]
    parameters: ParameterReader

    def attach(self, model: Transformer) -> None:
        """Gives a model of shapes what it keeps in blocks, shapes too."""
        for place, module in _modules(model):
            if place in self.products:
                outputs, inputs = _sizes(module, model)
                matrix = BlockMatrix(self.products[place], outputs, inputs)
                if isinstance(module, Linear):
                    module.blocks = matrix
                else:
                    model.head_blocks = matrix

    def load(self, model: Transformer, mesh: Mesh) -> None:
        """Gives the blocks of a model their values.

        **Raises:** `CheckpointError` for weights whose offset float16 cannot hold.
        """
        for place, module in _modules(model):
            found = module.blocks if isinstance(module, Linear) else model.head_blocks
            if found is not None:
                packed = pack(self._read(place))
                for parameter, values in ((found.levels, packed.levels), (found.scales, packed.scales)):
                    parameter.set_value(jax.device_put(values, named_sharding(mesh, parameter.axes)))

    def _read(self, place: str) -> Stored:
        matrix = self.matrices[place]
        blocks = Stored.stacked([self.parameters.read_stored(name) for name in matrix.names])
        if blocks.encoding.offsets and not bool(np.isfinite(blocks.arrays[Role.OFFSETS]).all()):
            raise CheckpointError(f"{place or 'the head'} has scales that blocks cannot hold: remove keep_gguf_blocks")
        order = matrix.order
        return blocks if order is None else blocks.of_rows(lambda rows: rows[order])


def blocks_to_keep(
    model: Transformer,
    config: ModelConfig,
    reader: TensorReader,
    product: Callable[[Encoding], BlockProduct | None],
    room: int,
) -> KeptBlocks | None:
    """The matrices of `model`, a model of shapes on one device, that are stored in blocks with a product: None where
    there are none, or where they would take more than an eighth of `room`, the bytes that the model leaves. Reads no
    values."""
    parameters = ParameterReader(reader, config)
    products, matrices, needed = dict[str, BlockProduct](), dict[str, _Matrix](), 0
    for place, module in _modules(model):
        outputs, inputs = _sizes(module, model)
        matrix = _matrix_of(place, module, config)
        encoding = None if matrix is None else _common_encoding(parameters, matrix)
        found = None if encoding is None or outputs % OUTPUTS else product(encoding)
        if matrix is not None and encoding is not None and found is not None:
            products[place], matrices[place] = found, matrix
            needed += encoding.nbytes(outputs, inputs)
    if needed > room * _MOST_OF_MEMORY:
        logger.info(
            "Quantised matrices are only kept dequantised: keeping both takes %.0f MiB, more than an eighth of %.0f",
            needed / 2**20,
            room / 2**20,
        )
        return None
    logger.info("%d matrices are kept in blocks too, in %.0f MiB", len(products), needed / 2**20)
    return KeptBlocks(products, matrices, parameters) if products else None


def _modules(model: Transformer) -> Iterator[tuple[str, nnx.Module]]:
    """Linear layers, and the model itself for its head, by name."""
    yield "", model
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield ".".join(map(str, path)), module


def _sizes(module: nnx.Module, model: Transformer) -> tuple[int, int]:
    """Outputs and inputs."""
    if not isinstance(module, Linear):
        return model.config.vocab_size, model.config.hidden_size
    outputs = math.prod(module.outputs)
    return outputs, math.prod(module.kernel.shape) // outputs


def _matrix_of(place: str, module: nnx.Module, config: ModelConfig) -> _Matrix | None:
    """None for one whose rows are in an order that is not known here."""
    if not isinstance(module, Linear):
        return _Matrix((HEAD,), None)
    kernel: Parameter = module.kernel
    layer = int(place.split(".")[1])
    names = tuple(ParameterName(part, kernel.kind, layer) for part in kernel.parts)
    if Axis.HEAD_PART in kernel.axes:
        return _Matrix(names, _order_of_heads(*module.outputs))
    if Axis.GATE_OR_UP in kernel.axes:
        return _Matrix(names, None)
    (name,) = names
    inputs, outputs = kernel.axes[: module.inputs], kernel.axes[module.inputs :]
    return _Matrix(names, None) if manifest_of(config).specs[name].axes == (outputs, inputs) else None


def _order_of_heads(kv_heads: int, parts: int, head_dim: int) -> np.ndarray:
    """The rows of queries, keys and values, as they follow one another in a checkpoint, in the order in which a model
    has them: of each kv head its queries, its key and its value."""
    rows = np.arange(kv_heads * parts * head_dim)
    queries, keys, values = np.split(rows, np.cumsum([parts - 2, 1]) * kv_heads * head_dim)
    by_head = [part.reshape(kv_heads, -1, head_dim) for part in (queries, keys, values)]
    return np.concatenate(by_head, axis=1).reshape(-1)


def _common_encoding(parameters: ParameterReader, matrix: _Matrix) -> Encoding | None:
    found = {parameters.encoding(name) for name in matrix.names}
    return found.pop() if len(found) == 1 else None
