"""The parameters of a model, derived from its config: the name, shape, axes and place in the checkpoint of each.

Used by everything that handles parameters: the check of a checkpoint's tensors, both backends' loaders, GGUF files,
random weights, Orbax checkpoints, and the TPU tools.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.part import (
    HIDDEN,
    Axes,
    Declared,
    Factors,
    FusedHeads,
    Sizes,
    linear,
    norm_parameters,
)
from sglang_jax.architectures.kinds.sections import Sections
from sglang_jax.architectures.model_config import LayerConfig, LearntPositions, ModelConfig
from sglang_jax.architectures.pooling import Pooler
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import (
    EXPERT,
    OF_EXPERTS,
    OPTIONAL_NAMES,
    WHOLE_MODEL,
    ParameterKind,
    Part,
    TensorName,
    TensorNames,
    gguf_name,
    hf_name,
)


@dataclass(frozen=True, slots=True)
class ParameterName:
    """Identifies a parameter. `layer`: None for one of the whole model."""

    part: Part
    kind: ParameterKind = ParameterKind.WEIGHT
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertsPlace:
    """Where a checkpoint stores a parameter of all experts of a layer.

    - `tensor`: the name of the tensor with all experts; or, with `{expert}` for an expert's number, of one per expert.
    - `part`, `parts`: this is part `part` of `parts` in the tensor's rows. `transposed`, `alternating`: see `Stacked`.
    """

    tensor: str
    part: int = 0
    parts: int = 1
    transposed: bool = False
    alternating: bool = False

    @property
    def tensor_per_expert(self) -> bool:
        return EXPERT in self.tensor

    def tensor_of(self, expert: int) -> str:
        """The name of the tensor that holds `expert`."""
        return self.tensor.replace(EXPERT, str(expert))

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors with a parameter of shape `[experts, rows, ...]`."""
        experts, rows, *rest = shape
        if self.tensor_per_expert:
            return {self.tensor_of(expert): shape[1:] for expert in range(experts)}
        sides = (rows * self.parts, *rest)
        return {self.tensor: (experts, *(sides[::-1] if self.transposed else sides))}


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, and where a checkpoint stores it.

    - `axes`, `sizes`: see `kinds.part.Axes`, `Sizes`; as stored, so matrices are [out, in].
    - `tensor`: the Hugging Face name of the tensor that holds it, from row `first_row` on. `gguf`: its name in GGUF
      files, or None.
    - `offset`: added to the stored values.
    - `interleaved`: the rotary pairs of each head are stored as adjacent rows; otherwise, in halves. When loaded, pairs
      are half a head apart.
    - `rotated_rows`: only this many rows at the start of each stored head rotate; when loaded, they are in both halves
      of the head. 0: all or none rotate.
    - `factors`: the multipliers of runs of rows, applied when the parameter is loaded. Empty if all are 1.
    - `sections`: runs of channels along the first axis, each of which is sharded separately (see `kinds.sections`).
      Empty if the axis is sharded as a whole.
    - `fused_heads`: the tensor stores several parameters head by head, and these rows belong to this one. None: all
      rows of the tensor's heads belong to the parameter.
    - `places`: alternative places of a parameter of experts; `tensor` and `gguf` name the first and the last.
    - `also`: other Hugging Face names that the tensor may have.
    - `as_row`: the tensor of a vector of n numbers is `[1, n]`.
    - `default`: its value if a checkpoint lacks the tensor; None if the tensor is required.
    """

    name: ParameterName
    axes: Axes
    sizes: Sizes
    tensor: str
    gguf: str | None
    first_row: int = 0
    offset: float = 0.0
    interleaved: bool = False
    rotated_rows: int = 0
    fused_heads: FusedHeads | None = None
    factors: Factors = ()
    sections: Sections = ()
    places: tuple[ExpertsPlace, ...] = ()
    also: tuple[str, ...] = ()
    as_row: bool = False
    default: float | None = None

    def tensor_of(self, names: Container[str]) -> str:
        """The name of its tensor in a checkpoint with tensors `names`; `tensor` if it has none."""
        return next((name for name in self.spellings if name in names), self.tensor)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All Hugging Face names that its tensor may have."""
        return (self.tensor, *self.also)

    def place(self, names: Container[str]) -> ExpertsPlace:
        """Where a checkpoint with tensors `names` stores a parameter of experts; the first place if it does not."""
        return next((place for place in self.places if place.tensor_of(0) in names), self.places[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as stored."""
        return tuple(math.prod(sizes) for sizes in self.sizes)

    @property
    def stored_rows(self) -> int:
        """Rows of its tensor from `first_row` on, including rows of other parameters between those of its heads."""
        fused = self.fused_heads
        return self.shape[0] if fused is None else self.shape[0] // fused.own * fused.stored

    @property
    def lengths(self) -> dict[Axis, int]:
        """The length of each of its axes."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return {axis: size for axes, sizes in pairs for axis, size in zip(axes, sizes, strict=True)}

    @property
    def is_matrix(self) -> bool:
        """Whether it is a weight matrix, or one per expert."""
        return len(self.shape) == (3 if self.places else 2) and self.name.kind is ParameterKind.WEIGHT

    @property
    def is_scale(self) -> bool:
        """Whether it multiplies activations elementwise, like the weight of a norm: 1 in an untrained model."""
        return self.name.part in _SCALES and self.name.kind is ParameterKind.WEIGHT


class Manifest:
    """The parameters of a model, in the order of the model."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @cached_property
    def specs(self) -> dict[ParameterName, ParameterSpec]:
        """Parameters that a checkpoint must have."""
        return {spec.name: spec for spec in _specs(self._config)}

    @cached_property
    def optional(self) -> dict[ParameterName, ParameterSpec]:
        """Parameters that a checkpoint may lack. Their names need no family: transformers' models may have none."""
        return {spec.name: spec for spec in _optional(self._config)}

    def spec(self, name: ParameterName) -> ParameterSpec:
        """A required or optional parameter. Raises `KeyError` for an unknown one."""
        return self.optional.get(name) or self.specs[name]

    def tensors(self, present: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """The Hugging Face names and shapes of the tensors that a checkpoint must have. `present`: names of the tensors
        that it has, which show how it stores experts."""
        shapes: dict[str, tuple[int, ...]] = {}
        for spec in self.specs.values():
            if spec.places:
                shapes |= spec.place(present).tensors(spec.shape)
                continue
            tensor = spec.tensor_of(present)
            rows = max(shapes.get(tensor, (0,))[0], spec.first_row + spec.stored_rows)
            shapes[tensor] = (1, rows) if spec.as_row else (rows, *spec.shape[1:])
        return shapes

    def of_layer(self, layer: int | None) -> list[ParameterSpec]:
        """The required parameters of a layer, or, for None, those outside of layers."""
        return [spec for spec in self.specs.values() if spec.name.layer == layer]

    def fused_shape(self, names: Iterable[ParameterName], axes: Iterable[Axis]) -> tuple[int, ...]:
        """The shape of an array with these axes that holds several parameters of one layer, or of the whole model.

        `HEAD_PART` runs over the queries of a kv head, its key and its value; `GATE_OR_UP` and `KEY_OR_VALUE` run over
        the parameters.
        """
        wanted = list(names)
        lengths = {axis: size for name in wanted for axis, size in self.spec(name).lengths.items()}
        lengths[Axis.GATE_OR_UP] = lengths[Axis.KEY_OR_VALUE] = len(wanted)
        if Axis.HEADS in lengths and Axis.KV_HEADS in lengths:
            lengths[Axis.HEAD_PART] = lengths[Axis.HEADS] // lengths[Axis.KV_HEADS] + 2
        if Axis.HEADS in lengths:
            lengths[Axis.WHOLE_HEADS] = lengths[Axis.HEADS]
        return tuple(lengths[axis] for axis in axes)

    def matrix_weights(self, layer: int | None) -> int:
        """Numbers in the matrices of a layer, including experts, or, for None, in those outside of layers."""
        return sum(math.prod(spec.shape) for spec in self.of_layer(layer) if spec.is_matrix)

    def expert_weights(self, layer: int) -> int:
        """Numbers in the matrices of all experts of one layer."""
        return sum(math.prod(spec.shape) for spec in self.of_layer(layer) if spec.places and spec.is_matrix)


@lru_cache(maxsize=16)
def manifest_of(config: ModelConfig) -> Manifest:

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
    added = _learnt_positions(config.learnt_positions, config.hidden_size)
    yield from _named(config, [Declared(Part.EMBEDDING, ParameterKind.WEIGHT, *table), *added], None)
    for number, layer in enumerate(config.layers):
        yield from _named(config, list(_layer(layer, config.hidden_size)), number)
    yield from _named(config, list(norm_parameters(Part.FINAL_NORM, config.hidden_size, config.final_norm)), None)
    if config.pooler is not None:
        yield from _named(config, list(_classifier(config.pooler, config.hidden_size)), None)
        return
    head = next(_named(config, [Declared(Part.HEAD, ParameterKind.WEIGHT, *table)], None))
    if config.tie_word_embeddings:
        names = family_named(config.architecture).names
        head = replace(
            head,
            tensor=hf_name(names[Part.EMBEDDING], ParameterKind.WEIGHT, None),
            gguf=gguf_name(names[Part.EMBEDDING], ParameterKind.WEIGHT, None),
        )
    yield head


def _learnt_positions(learnt: LearntPositions | None, hidden: int) -> Iterator[Declared]:
    if learnt is None:
        return
    tables = [(Part.POSITION_EMBEDDING, Axis.POSITIONS, learnt.rows)]
    if learnt.token_types:
        tables.append((Part.TYPE_EMBEDDING, Axis.TOKEN_TYPES, learnt.token_types))
    for part, axis, rows in tables:
        yield Declared(part, ParameterKind.WEIGHT, ((axis,), HIDDEN), ((rows,), (hidden,)))


def _classifier(pooler: Pooler, hidden: int) -> Iterator[Declared]:
    if not pooler.labels:
        return
    inputs = (Axis.POOLED,) if pooler.dense else HIDDEN
    if pooler.dense:
        yield from linear(Part.POOLER, ((hidden,), (hidden,)), (inputs, HIDDEN), bias=True)
    sizes = (len(pooler.labels),), (hidden,)
    yield from linear(Part.LABELS, sizes, ((Axis.LABELS,), inputs), pooler.bias)


def _named(config: ModelConfig, parameters: list[Declared], layer: int | None) -> Iterator[ParameterSpec]:
    """Adds names. Parameters that share a tensor follow each other along its rows, except those with `stored_as`."""
    names = family_named(config.architecture).names
    assert layer is None or not WHOLE_MODEL & {parameter.part for parameter in parameters}
    rows: dict[str, int] = {}
    starts: dict[tuple[Part, ParameterKind], int] = {}
    for parameter in parameters:
        name = names[parameter.stored_as or parameter.part]
        if parameter.part in OF_EXPERTS:
            yield _of_experts(parameter, name, names, layer)
            continue
        tensor = hf_name(name, parameter.kind, config.num_layers - 1 if name.in_last_layer else layer)
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
            parameter.rotated_rows,
            parameter.fused_heads,
            parameter.factors if any(factor != 1.0 for _, factor in parameter.factors) else (),
            parameter.sections,
            also=(hf_name(replace(name, hf=name.also), parameter.kind, layer),) if name.also else (),
            as_row=name.as_row,
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
    """A parameter of experts: stored as a tensor per expert, stacked, perhaps with other parts, or as in GGUF."""
    places = [ExpertsPlace(hf_name(name, parameter.kind, layer))] if EXPERT in name.hf else []
    for stacked in name.stacked:
        sharers = [part for part, other in names.items() if stacked in other.stacked]
        tensor = f"{name.layers}.{layer}.{stacked.hf}" + ("_bias" if parameter.kind is ParameterKind.BIAS else "")
        transposed = stacked.transposed and parameter.kind is ParameterKind.WEIGHT
        at = sharers.index(parameter.part), len(sharers)
        places.append(ExpertsPlace(tensor, *at, transposed, stacked.alternating))
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
            yield from norm_parameters(part, hidden, norm)
    for part_of_layer in layer.parts:
        yield from part_of_layer.parameters(hidden)
    if layer.learnt_scale:
        yield Declared(Part.LAYER_SCALE, ParameterKind.WEIGHT, ((Axis.ONE,),), ((1,),))
