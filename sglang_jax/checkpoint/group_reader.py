"""Reads folders with weights quantised in groups: GPTQ, AWQ, compressed-tensors, and blocks of float8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.float4_tensors import FLOAT4_CLASSES
from sglang_jax.checkpoint.group_blocks import GroupType
from sglang_jax.checkpoint.grouped_experts import GroupedExperts
from sglang_jax.checkpoint.grouped_tensors import (
    AwqMatrix,
    CompressedTensorsMatrix,
    Float8Matrix,
    GptqMatrix,
    GroupLayout,
    GroupScheme,
)
from sglang_jax.checkpoint.reader import Array, Index, Role, TensorReader
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.checkpoint.stored_quantization import StoredQuantization
from sglang_jax.checkpoint.tensors import expected_tensors, listed, mtp_prefixes
from sglang_jax.errors import CheckpointError

_WEIGHT, _PACKED = ".weight", ".weight_packed"

_MARKERS = {
    GroupLayout.GPTQ: ".qweight",
    GroupLayout.GPTQ_V2: ".qweight",
    GroupLayout.AWQ: ".qweight",
    GroupLayout.FLOAT8_INVERSE: ".weight_scale_inv",
    GroupLayout.MXFP4_EXPERTS: "_blocks",
}
"""What only quantised layers have, in formats whose config does not list layers."""


class GroupedTensor(Protocol):
    """A matrix, or those of all experts of a layer, in groups."""

    @property
    def name(self) -> str:
        """The name under which it is read."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors of which it may consist."""
        ...

    @property
    def kind(self) -> GroupType | None:
        """The blocks of `blocks`; None if it can only be dequantised."""
        ...

    def blocks(self, index: Index | None = None) -> Array:
        """The part at `index`, of whole blocks: uint8 `[..., rows, blocks, bytes]`."""
        ...

    def widened(self, index: Index | None = None) -> Array:
        """The part at `index`, dequantised: float32."""
        ...

    def faults(self) -> Iterator[str]:
        """Describes tensors that are missing, misshapen or of another type; reads no values."""
        ...


_CLASSES: dict[
    GroupLayout, Callable[[SafetensorsReader, str, GroupScheme, Mapping[str, tuple[int, ...]]], GroupedTensor]
] = {
    GroupLayout.COMPRESSED: CompressedTensorsMatrix,
    GroupLayout.GPTQ: GptqMatrix,
    GroupLayout.GPTQ_V2: GptqMatrix,
    GroupLayout.AWQ: AwqMatrix,
    GroupLayout.FLOAT8: Float8Matrix,
    GroupLayout.FLOAT8_INVERSE: Float8Matrix,
    GroupLayout.MXFP4_EXPERTS: GroupedExperts,
    **FLOAT4_CLASSES,
}


class GroupReader:
    """The tensors of a folder, some of which are `grouped`. These have an encoding if they consist of whole blocks;
    `read` dequantises them to float32."""

    def __init__(self, others: TensorReader, grouped: Iterable[GroupedTensor]) -> None:
        """`others`: reads the tensors of other layers."""
        self._others = others
        self._grouped = {each.name: each for each in grouped}
        self._names = others.names() | self._grouped.keys()

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._grouped[name].shape if name in self._grouped else self._others.shape(name)

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorReader.read`. Raises `CheckpointError` for scales that are not finite."""
        return self._grouped[name].widened(index) if name in self._grouped else self._others.read(name, index)

    def encoding(self, name: str) -> Encoding | None:
        if name not in self._grouped:
            return self._others.encoding(name)
        kind = self._grouped[name].kind
        return None if kind is None else Encoding(kind)

    def in_bfloat16(self, name: str) -> bool:
        return name not in self._grouped and self._others.in_bfloat16(name)

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """See `TensorReader.read_array`. Raises `CheckpointError` as `read` does."""
        if name not in self._grouped:
            return self._others.read_array(name, role, index)
        if role is not Role.VALUES or self._grouped[name].kind is None:
            raise ValueError(f"{name} is stored without {role.value}")
        return self._grouped[name].blocks(index)


def find_groups(
    folder: SafetensorsReader, quantization: StoredQuantization, config: ModelConfig
) -> list[GroupedTensor]:
    """The matrices of a folder that are quantised in groups. Raises `CheckpointError` naming the tensors, at
    most 500, that are not as their layout has them; reads no values."""
    expected = expected_tensors(config, folder.names())
    grouped = [
        _CLASSES[scheme.layout](folder, layer, scheme, expected)
        for layer, scheme in _schemes(folder, quantization, config).items()
    ]
    faults = sorted(fault for matrix in grouped for fault in matrix.faults())
    if faults:
        raise CheckpointError(
            f"the tensors are not those that {quantization.file} describes as quantised ({len(faults)} faults):"
            + listed(faults)
        )
    return grouped


def _schemes(
    folder: SafetensorsReader, quantization: StoredQuantization, config: ModelConfig
) -> dict[str, GroupScheme]:
    """The schemes of layers in groups. Layers of multi-token prediction have none, because they are not read."""
    names, mtp = folder.names(), mtp_prefixes(config)
    used = [name for name in names if not name.startswith(mtp)]
    if quantization.by_tensors is not None:
        marker = _MARKERS[quantization.by_tensors.layout]
        return {name.removesuffix(marker): quantization.by_tensors for name in used if name.endswith(marker)}
    specs = manifest_of(config).specs
    routers = {spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.ROUTER}
    embeddings = {spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.EMBEDDING}
    found: dict[str, GroupScheme] = {}
    for name in used:
        layer, dot, ending = name.rpartition(".")
        # Some versions of the tools count a router as a linear layer, and others do not.
        plain_router = name in routers and folder.is_plain(name)
        if dot + ending in (_WEIGHT, _PACKED) and len(folder.shape(name)) == 2 and not plain_router:
            scheme = quantization.scheme(layer, "Embedding" if f"{layer}{_WEIGHT}" in embeddings else "Linear")
            if isinstance(scheme, GroupScheme):
                found[layer] = scheme
    return found


def tensors_of_groups(grouped: Iterable[GroupedTensor]) -> frozenset[str]:
    """The tensors of which the matrices may consist."""
    return frozenset[str]().union(*(matrix.tensors for matrix in grouped))
