"""Writes a checkpoint as a Hugging Face folder whose matrices are quantised, in the format of compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sglang_jax.architectures.manifest import ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import ParameterKind, Part, hf_name
from sglang_jax.checkpoint.compressed_tensors import quantization_config, tensors_of
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.hf_config import CONFIG_FILE
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, TensorReader
from sglang_jax.checkpoint.safetensors_writer import SHARD_BYTES, write_safetensors
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError, ConfigError

_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the output before it is quantised. `quantization`: None if it stays plain. `kept`: it also keeps its
    dtype, because the engine does not compute with it."""

    shape: tuple[int, ...]
    read: Callable[[], Array]
    quantization: Quantization | None = None
    kept: bool = False


class QuantizedTensors:
    """The tensors of a checkpoint under their Hugging Face names, with one for each expert, quantised as
    `--quantization` does while loading. Raises `ConfigError` if a family stores experts only together, which
    compressed-tensors cannot quantise, and if no matrix can be quantised."""

    def __init__(self, reader: TensorReader, config: ModelConfig, quantization: Quantization) -> None:
        self._reader, self._names = reader, reader.names()
        self._parameters = ParameterReader(reader, config)
        self._head = hf_name(family_named(config.architecture).names[Part.HEAD], ParameterKind.WEIGHT, None)
        self._tensors: dict[str, _Tensor] = {}
        for spec in manifest_of(config).specs.values():
            if spec.places:
                self._add_experts(spec, quantization.of(spec))
            else:
                self._add(spec, quantization.of(spec))
        self._add_others(config)
        if not self.encodings:
            raise ConfigError(
                f"no matrix of this model can be quantised to {quantization.encoding.values.value}: its groups divide "
                "no number of inputs: choose int8 or fp8"
            )

    @property
    def encodings(self) -> dict[str, Encoding]:
        """The encodings of quantised layers, by their names."""
        return {
            name.removesuffix(_WEIGHT): tensor.quantization.encoding
            for name, tensor in self._tensors.items()
            if tensor.quantization is not None
        }

    @property
    def plain_layers(self) -> list[str]:
        """The layers whose matrix is not quantised; also a head that is tied to the embeddings."""
        names = (
            name
            for name, tensor in self._tensors.items()
            if name.endswith(_WEIGHT) and len(tensor.shape) == 2 and tensor.quantization is None
        )
        return [name.removesuffix(_WEIGHT) for name in dict.fromkeys((*names, self._head))]

    def arrays(self, dtype: np.dtype | None = None) -> Iterator[tuple[str, Array]]:
        """The tensors to write. `dtype`: of plain parameters; None for the stored one. Raises `CheckpointError` for
        numbers that are not finite in a matrix to quantise."""
        for name, tensor in self._tensors.items():
            found = tensor.read()
            if tensor.quantization is None:
                yield name, found if dtype is None or tensor.kept else found.astype(dtype, copy=False)
                continue
            encoding = tensor.quantization.encoding
            try:
                stored = Stored(encoding, tensor.quantization.arrays(found, encoding.roles))
            except ValueError as error:
                raise CheckpointError(f"{name}: {error}") from error
            for ending, array in tensors_of(stored).items():
                yield f"{name.removesuffix(_WEIGHT)}.{ending}", array

    def _add(self, spec: ParameterSpec, quantization: Quantization | None) -> None:
        """Adds a parameter, or the tensor that it shares with others. That stays plain if one of them does."""
        name = spec.tensor_of(self._names)
        known = self._tensors.get(name)
        if known is not None and known.quantization != quantization:
            quantization = None
        self._tensors[name] = _Tensor(self._reader.shape(name), partial(self._reader.read, name), quantization)

    def _add_experts(self, spec: ParameterSpec, quantization: Quantization | None) -> None:
        place = spec.places[0]
        if not place.tensor_per_expert:
            raise ConfigError(
                f"{spec.tensor}: compressed-tensors cannot quantise experts that share a tensor: choose --to orbax "
                "with --quantize int8 or fp8"
            )
        for expert in range(spec.shape[0]):
            read = partial(self._read_expert, spec, expert)
            self._tensors[place.tensor_of(expert)] = _Tensor(spec.shape[1:], read, quantization)

    def _read_expert(self, spec: ParameterSpec, expert: int) -> Array:
        found: Array = self._parameters.read(spec.name, (slice(expert, expert + 1),))[0]
        return found

    def _add_others(self, config: ModelConfig) -> None:
        """Adds what the engine does not multiply by, such as scales of keys and values and layers of multi-token
        prediction; but no copy of tied embeddings."""
        used = manifest_of(config).tensors(self._names).keys()
        tied = {self._head} if config.tie_word_embeddings else set()
        for name in sorted(self._names - used - tied):
            self._tensors[name] = _Tensor(self._reader.shape(name), partial(self._reader.read, name), kept=True)


def write_quantized_folder(
    folder: Path,
    tensors: QuantizedTensors,
    config: Mapping[str, Any],
    *,
    dtype: np.dtype | None = None,
    kv_type: KVCacheDtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes weights, and then config.json, into `folder`, which exists. `config`: the values of config.json;
    `dtype`: of plain parameters, None for the stored one; `kv_type`: see `quantization_config`. Raises
    `CheckpointError` as `QuantizedTensors.arrays`."""
    write_safetensors(folder, tensors.arrays(dtype), shard_bytes)
    field = quantization_config(tensors.encodings, tensors.plain_layers, kv_type)
    # The config is last, so a folder with it is complete.
    text = json.dumps({**config, "quantization_config": field}, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
