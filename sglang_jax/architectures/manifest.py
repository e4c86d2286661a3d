"""The parameters of a model: name, shape, axes and place in the checkpoint of each, all from its config.

Whatever deals with parameters follows from this list: the check of a checkpoint's tensors, both backends' loaders, the
names in GGUF files, random weights, Orbax checkpoints, and what the TPU tools count.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.part import HIDDEN, Axes, Declared, Factors, Sizes, norm_weight
from sglang_jax.architectures.kinds.sections import Sections
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import (
    EXPERT,
    OF_EXPERTS,
    OPTIONAL_NAMES,
    WHOLE_MODEL,
    Kind,
    Part,
    TensorName,
    TensorNames,
    gguf_name,
    hf_name,
)


@dataclass(frozen=True, slots=True)
class ParameterName:
    """A parameter by what it is. `layer` is None for those of the whole model."""

    part: Part
    kind: Kind = Kind.WEIGHT
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertsPlace:
    """Where a checkpoint has a parameter of all experts of a layer.

    - `tensor`: a name with `{expert}` for the number of an expert, of a tensor for each; or that of one for all.
    - `part`, `parts`: which of so many parts along its rows this is. `transposed`, `alternating`: see `Stacked`.
    """

    tensor: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    alternating: bool = False

    @property
    def one_each(self) -> bool:
        """Each expert has a tensor of its own."""
        return EXPERT in self.tensor

    def tensor_of(self, expert: int) -> str:
        """The name of the tensor with an expert."""
        return self.tensor.replace(EXPERT, str(expert))

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, of a parameter `[experts, rows, ...]` of this shape."""
        experts, rows, *rest = shape
        if self.one_each:
            return {self.tensor_of(expert): shape[1:] for expert in range(experts)}
        sides = (rows * self.parts, *rest)
        return {self.tensor: (experts, *(sides[::-1] if self.transposed else sides))}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, and where a checkpoint has it.

    - `axes`, `sizes`: of each axis as stored, matrices as [out, in], what it runs over and how far.
    - `tensor`: the Hugging Face name of the tensor that holds it, in the rows from `first_row` on. `gguf`: that tensor
      in a GGUF file.
    - `offset`: added to the stored values.
    - `interleaved`: of each head the rows that rotate are stored as pairs of neighbours, and otherwise in halves; the
      model has pairs half a head apart.
    - `rotated`: of each head so many rows at its beginning rotate; in the model they are spread over both halves. 0
      where all do, or none.
    - `factors`: runs of rows, and what each is multiplied by when it is read: the multipliers of a model are part of
      its loaded weights. Empty where all are 1.
    - `sections`: of channels along the first axis, of each of which a device has a part where several share the layer
      (`kinds.sections`). Empty where it has a part of the axis.
    - `stored_head`, `first_in_head`: the tensor has so many rows for each head, of which those of this parameter begin
      there. 0: it has the parameter's alone.
    - `places`: of a parameter of experts, where it may lie, one of which a checkpoint has; `tensor` and `gguf` name the
      first and the last.
    - `also`: other Hugging Face names of its tensor, one of which a checkpoint may have instead.
    - `default`: its values where a checkpoint has no tensor of it; None for one that it must have.
    """

    name: ParameterName
    axes: Axes
    sizes: Sizes
    tensor: str
    gguf: str | None
    first_row: int = 0
    offset: float = 0.0
    interleaved: bool = False
    rotated: int = 0
    stored_head: int = 0
    first_in_head: int = 0
    factors: Factors = ()
    sections: Sections = ()
    places: tuple[ExpertsPlace, ...] = ()
    also: tuple[str, ...] = ()
    default: float | None = None

    def tensor_of(self, names: Container[str]) -> str:
        """The name of its tensor in a checkpoint with tensors of these names; the first where it has none."""
        return next((name for name in self.spellings if name in names), self.tensor)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All names that its tensor may have."""
        return (self.tensor, *self.also)

    def place(self, names: Container[str]) -> ExpertsPlace:
        """Where a checkpoint with tensors of these names has a parameter of experts; the first where it has none."""
        return next((place for place in self.places if place.tensor_of(0) in names), self.places[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(math.prod(sizes) for sizes in self.sizes)

    @property
    def stored_rows(self) -> int:
        """Rows of its tensor, from `first_row` on, that hold it and what lies between."""
        return self.sizes[0][0] * self.stored_head if self.stored_head else self.shape[0]

    @property
    def lengths(self) -> dict[Axis, int]:
        """How far each of its axes runs."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return {axis: size for axes, sizes in pairs for axis, size in zip(axes, sizes, strict=True)}

    @property
    def is_matrix(self) -> bool:
        """It multiplies, and so do the matrices of experts."""
        return len(self.shape) == (3 if self.places else 2) and self.name.kind is Kind.WEIGHT

    @property
    def is_scale(self) -> bool:
        """Its values multiply activations one by one, as those of norms do: 1 in a model that is not trained."""
        return self.name.part in _SCALES


class Manifest:
    """Every parameter of a model, in the order of the model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @cached_property
    def specs(self) -> dict[ParameterName, ParameterSpec]:
        """What a checkpoint must have."""
        return {spec.name: spec for spec in _specs(self._config)}

    @cached_property
    def optional(self) -> dict[ParameterName, ParameterSpec]:
        """What it may have besides. No family is asked: the model may be one that transformers makes."""
        return {spec.name: spec for spec in _optional(self._config)}

    def spec(self, name: ParameterName) -> ParameterSpec:
        """A parameter of either sort. Raises `KeyError` for one that the model does not have."""
        return self.optional.get(name) or self.specs[name]

    def tensors(self, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must have, by the names of Hugging Face. `present`: names of
        those that it has, which tell how it keeps experts."""
        shapes: dict[str, tuple[int, ...]] = {}
        for spec in self.specs.values():
            if spec.places:
                shapes |= spec.place(present).tensors(spec.shape)
                continue
            tensor = spec.tensor_of(present)
            rows = max(shapes.get(tensor, (0,))[0], spec.first_row + spec.stored_rows)
            shapes[tensor] = (rows, *spec.shape[1:])
        return shapes

    def of_layer(self, layer: int | None) -> list[ParameterSpec]:
        """The parameters of one layer, or of none."""
        return [spec for spec in self.specs.values() if spec.name.layer == layer]

    def fused_shape(self, names: Iterable[ParameterName], axes: Iterable[Axis]) -> tuple[int, ...]:
        """The shape of an array with these axes that holds parameters of one layer, or of the whole model.

        Along `HEAD_PART` lie the queries of a kv head, its key and its value; along `GATE_OR_UP` and `KEY_OR_VALUE` the
        parameters.
        """
        wanted = list(names)
        lengths = {axis: size for name in wanted for axis, size in self.spec(name).lengths.items()}
        lengths[Axis.GATE_OR_UP] = lengths[Axis.KEY_OR_VALUE] = len(wanted)
        if Axis.HEADS in lengths and Axis.KV_HEADS in lengths:
            lengths[Axis.HEAD_PART] = lengths[Axis.HEADS] // lengths[Axis.KV_HEADS] + 2
        return tuple(lengths[axis] for axis in axes)

    def matrix_weights(self, layer: int | None) -> int:
        """Numbers in the matrices of one layer, experts included, or in those of none."""
        return sum(math.prod(spec.shape) for spec in self.of_layer(layer) if spec.is_matrix)

    def expert_weights(self, layer: int) -> int:
        """Numbers in the matrices of all experts of one layer."""
        return sum(math.prod(spec.shape) for spec in self.of_layer(layer) if spec.places and spec.is_matrix)


@lru_cache(maxsize=16)
def manifest_of(config: ModelConfig) -> Manifest:
    """The manifest of a model."""
    return Manifest(config)


_SCALES = frozenset(
    {
        Part.FINAL_NORM,
        Part.ATTENTION_NORM,
        Part.ATTENTION_POST_NORM,
        Part.FEED_FORWARD_NORM,
        Part.FEED_FORWARD_POST_NORM,
        Part.QUERY_NORM,
        Part.KEY_NORM,
        Part.QUERY_LATENT_NORM,
        Part.LATENT_NORM,
        Part.LAYER_SCALE,
        Part.STATE_NORM,
    }
)

_VOCABULARY = (Axis.VOCABULARY,)


def _specs(config: ModelConfig) -> Iterator[ParameterSpec]:
    table = ((_VOCABULARY, HIDDEN), ((config.vocab_size,), (config.hidden_size,)))
    yield from _named(config, [Declared(Part.EMBEDDING, Kind.WEIGHT, *table)], None)
    for number, layer in enumerate(config.layers):
        yield from _named(config, list(_layer(layer, config.hidden_size)), number)
    yield from _named(config, [norm_weight(Part.FINAL_NORM, config.hidden_size, config.final_norm.offset)], None)
    head = next(_named(config, [Declared(Part.HEAD, Kind.WEIGHT, *table)], None))
    if config.tie_word_embeddings:
        names = family_named(config.architecture).names
        head = replace(
            head,
            tensor=hf_name(names[Part.EMBEDDING], Kind.WEIGHT, None),
            gguf=gguf_name(names[Part.EMBEDDING], Kind.WEIGHT, None),
        )
    yield head


def _named(config: ModelConfig, parameters: list[Declared], layer: int | None) -> Iterator[ParameterSpec]:
    """Parts that share a tensor follow each other along its rows, but for one that is stored as another."""
    names = family_named(config.architecture).names
    assert layer is None or not WHOLE_MODEL & {parameter.part for parameter in parameters}
    rows: dict[str, int] = {}
    starts: dict[tuple[Part, Kind], int] = {}
    for parameter in parameters:
        name = names[parameter.stored_as or parameter.part]
        if parameter.part in OF_EXPERTS:
            yield _of_experts(parameter, name, names, layer)
            continue
        tensor = hf_name(name, parameter.kind, layer)
        if parameter.stored_as is None:
            starts[parameter.part, parameter.kind] = rows.get(tensor, 0)
        first = starts[parameter.stored_as or parameter.part, parameter.kind]
        spec = ParameterSpec(
            ParameterName(parameter.part, parameter.kind, layer),
            parameter.axes,
            parameter.sizes,
            tensor,
            gguf_name(name, parameter.kind, layer),
            first,
            parameter.offset,
            parameter.interleaved,
            parameter.rotated,
            parameter.stored_head,
            parameter.first_in_head,
            parameter.factors if any(factor != 1.0 for _, factor in parameter.factors) else (),
            parameter.sections,
            also=(hf_name(replace(name, hf=name.also), parameter.kind, layer),) if name.also else (),
        )
        rows[tensor] = max(rows.get(tensor, 0), first + spec.stored_rows)
        yield spec


def _optional(config: ModelConfig) -> Iterator[ParameterSpec]:
    for number, layer in enumerate(config.layers):
        for each in () if layer.attention is None else layer.attention.optional():
            tensor, *also = (f"model.layers.{number}.{name}" for name in OPTIONAL_NAMES[each.part, each.kind])
            name = ParameterName(each.part, each.kind, number)
            yield ParameterSpec(name, each.axes, each.sizes, tensor, None, also=tuple(also), default=each.default)


def _of_experts(parameter: Declared, name: TensorName, names: TensorNames, layer: int | None) -> ParameterSpec:
    """A parameter of experts: in a tensor for each, in one that it may share with other parts, or in one as in GGUF."""
    places = [ExpertsPlace(hf_name(name, parameter.kind, layer))] if EXPERT in name.hf else []
    for stacked in name.stacked:
        sharers = [part for part, other in names.items() if stacked in other.stacked]
        tensor = f"{name.layers}.{layer}.{stacked.hf}" + ("_bias" if parameter.kind is Kind.BIAS else "")
        turned = stacked.transposed and parameter.kind is Kind.WEIGHT
        at = sharers.index(parameter.part), len(sharers)
        places.append(ExpertsPlace(tensor, *at, turned, stacked.alternating))
    gguf = gguf_name(name, parameter.kind, layer)
    places += [] if gguf is None else [ExpertsPlace(gguf)]
    own = ParameterName(parameter.part, parameter.kind, layer)
    return ParameterSpec(own, parameter.axes, parameter.sizes, places[0].tensor, gguf, places=tuple(places))


def _layer(layer: LayerConfig, hidden: int) -> Iterator[Declared]:
    norms = (
        (Part.ATTENTION_NORM, layer.mixer_norms.pre),
        (Part.ATTENTION_POST_NORM, layer.mixer_norms.post),
        (Part.FEED_FORWARD_NORM, layer.feed_forward_norms.pre),
        (Part.FEED_FORWARD_POST_NORM, layer.feed_forward_norms.post),
    )
    for part, norm in norms:
        if norm is not None:
            yield norm_weight(part, hidden, norm.offset)
    for part_of_layer in layer.parts:
        yield from part_of_layer.parameters(hidden)
    if layer.learnt_scale:
        yield Declared(Part.LAYER_SCALE, Kind.WEIGHT, ((Axis.ONE,),), ((1,),))
