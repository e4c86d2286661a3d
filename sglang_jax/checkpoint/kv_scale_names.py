"""Which tensors of a checkpoint are scales of its keys and values, by the names that quantisers give them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.reader import TensorReader


class Side(IntEnum):
    KEYS = 0
    VALUES = 1


_SPELLINGS = (
    ("self_attn.k_scale", "self_attn.v_scale"),  # compressed-tensors
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),  # ModelOpt
    ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),  # AutoFP8, Quark
    ("self_attn.kv_scale", "self_attn.kv_scale"),  # one for both: the first versions of AutoFP8
    ("self_attn.attn.kv_scale", "self_attn.attn.kv_scale"),
)
_OF_QUERIES = frozenset(
    {
        "self_attn.q_scale",
        "self_attn.attn.q_scale",
        "self_attn.q_proj.q_scale",
        "self_attn.q_proj.output_scale",
        "self_attn.prob_output_scale",
        "self_attn.attn.prob_scale",
    }
)
"""Scales of queries and probabilities, which some write beside: neither is ever rounded to 8 bits here."""

_MEAN = "self_attn.k_mean"
"""The mean of each kv head's keys, float32 `[kv_heads, head_dim]`: what a cache that keeps keys in int8 without their
mean takes in place of one that it computes at each start. No quantiser writes one yet."""

_NAME = re.compile(r"model\.layers\.(0|[1-9]\d*)\.(.+)")


@dataclass(frozen=True, slots=True)
class KVScaleNames:
    """The scales that a checkpoint has.

    - `of`: their names by layer and side; more than one is a fault.
    - `unused`: those of queries and probabilities.
    - `means`: names of the means of keys, by layer.
    """

    of: Mapping[tuple[int, Side], tuple[str, ...]]
    unused: frozenset[str]
    means: Mapping[int, str]

    @classmethod
    def find(cls, names: Iterable[str], num_layers: int) -> KVScaleNames:
        """Of layers past `num_layers` none is a scale that is known."""
        of: dict[tuple[int, Side], tuple[str, ...]] = {}
        unused, means = set(), {}
        for name in sorted(names):
            matched = _NAME.fullmatch(name)
            if matched is None or int(matched[1]) >= num_layers:
                continue
            if matched[2] in _OF_QUERIES:
                unused.add(name)
            if matched[2] == _MEAN:
                means[int(matched[1])] = name
            for spelling in _SPELLINGS:
                for side in Side:
                    if spelling[side] == matched[2]:
                        place = (int(matched[1]), side)
                        of[place] = (*of.get(place, ()), name)
        return cls(of, frozenset(unused), means)

    def all(self) -> frozenset[str]:
        """Every tensor that is a scale or a mean, used or not."""
        return self.unused.union(self.means.values(), *self.of.values())

    def faults(self, reader: TensorReader, config: ModelConfig) -> list[str]:
        """What is wrong, a line for each tensor, where a checkpoint has any scale: layers or sides without one, two
        for the same, shapes that are neither one number nor one for each kv head."""
        with_attention = [number for number, layer in enumerate(config.layers) if layer.attention is not None]
        faults = self._faults_of_means(reader, config, with_attention)
        if not self.of:
            return faults
        for place in ((layer, side) for layer in with_attention for side in Side):
            names = self.of.get(place, ())
            if not names:
                faults.append(f"missing: {self._expected(*place)} (other scales of keys and values are present)")
            if len(names) > 1:
                faults.append(f"extra: {' and '.join(names)} are scales of the same {place[1].name.lower()}")
        layers = {name: layer for (layer, _), names in self.of.items() for name in names}
        for name, layer in sorted(layers.items()):
            attention = config.layers[layer].attention
            if attention is None:
                faults.append(f"extra: {name} is a scale of keys or values, of a layer without attention")
                continue
            kv_heads = attention.num_kv_heads
            if not is_scale_shape(reader.shape(name), kv_heads):
                faults.append(
                    f"misshapen: {name} is {reader.shape(name)}, it must be one number, or one for each of "
                    f"{kv_heads} kv heads"
                )
        return faults

    def _faults_of_means(self, reader: TensorReader, config: ModelConfig, with_attention: list[int]) -> list[str]:
        """The same of means: all layers with attention have one, or none."""
        faults = []
        for layer in with_attention if self.means else []:
            attention = config.layers[layer].attention
            assert attention is not None
            name, shape = self.means.get(layer), (attention.num_kv_heads, attention.head_dim)
            if name is None:
                faults.append(f"missing: model.layers.{layer}.{_MEAN} (other means of keys are present)")
            elif reader.shape(name) != shape:
                faults.append(f"misshapen: {name} is {reader.shape(name)}, it must be {shape}")
        strange = sorted(self.means.keys() - with_attention)
        return faults + [f"extra: {self.means[layer]} is of a layer without attention" for layer in strange]

    def _expected(self, layer: int, side: Side) -> str:
        """The name of a scale that is not there, spelt as one that is."""
        matched = _NAME.fullmatch(next(iter(self.of.values()))[0])
        assert matched is not None
        spelling = next(spelling for spelling in _SPELLINGS if matched[2] in spelling)
        return f"model.layers.{layer}.{spelling[side]}"


def is_scale_shape(shape: tuple[int, ...], kv_heads: int) -> bool:
    """One number or one for each kv head, whatever the axes of length 1: `()`, `(1,)`, `(kv_heads,)`,
    `(kv_heads, 1, 1)`."""
    return [length for length in shape if length != 1] in ([], [kv_heads])
