"""The parameters of a model: name, shape, axes and place in the checkpoint of each, all from its config.

Whatever deals with parameters follows from this list: the check of a checkpoint's tensors, both backends' loaders, the
names in GGUF files, random weights, Orbax checkpoints, and what the TPU tools count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.model_config import (
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    Mamba2Config,
    ModelConfig,
    RecurrentConfig,
    ShortConvConfig,
    SquaredReluConfig,
)
from sglang_jax.architectures.recurrent_shards import Sections, convolution_sections, input_sections
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import WHOLE_MODEL, Kind, Part, gguf_name, hf_name

Axes = tuple[tuple[Axis, ...], ...]
"""Of each axis of a tensor what it runs over, outermost first: (heads, head_dim) are the rows of a projection."""

Sizes = tuple[tuple[int, ...], ...]
"""Of `Axes`, in the same form, how far each runs."""

Factors = tuple[tuple[int, float], ...]
"""Numbers of rows, one run behind the other, and what each run is multiplied by."""


@dataclass(frozen=True, slots=True)
class ParameterName:
    """A parameter by what it is. `layer` is None for those of the whole model."""

    part: Part
    kind: Kind = Kind.WEIGHT
    layer: int | None = None


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
      (`recurrent_shards`). Empty where it has a part of the axis.
    - `block`, `blocks`: the tensor has so many blocks of rows for each head, of which this parameter is that one.
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
    block: int = 0
    blocks: int = 1
    factors: Factors = ()
    sections: Sections = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(math.prod(sizes) for sizes in self.sizes)

    @property
    def lengths(self) -> dict[Axis, int]:
        """How far each of its axes runs."""
        pairs = zip(self.axes, self.sizes, strict=True)
        return {axis: size for axes, sizes in pairs for axis, size in zip(axes, sizes, strict=True)}

    @property
    def is_scale(self) -> bool:
        """Its values multiply activations one by one, as those of norms do: 1 in a model that is not trained."""
        return self.name.part in _SCALES


class Manifest:
    """Every parameter of a model, in the order of the model."""

    def __init__(self, config: ModelConfig) -> None:
        self.specs: dict[ParameterName, ParameterSpec] = {spec.name: spec for spec in _specs(config)}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name and shape of every tensor that a checkpoint must have."""
        shapes: dict[str, tuple[int, ...]] = {}
        for spec in self.specs.values():
            rows = max(shapes.get(spec.tensor, (0,))[0], spec.first_row + spec.blocks * spec.shape[0])
            shapes[spec.tensor] = (rows, *spec.shape[1:])
        return shapes

    def of_layer(self, layer: int | None) -> list[ParameterSpec]:
        """The parameters of one layer, or of none."""
        return [spec for spec in self.specs.values() if spec.name.layer == layer]

    def fused_shape(self, names: Iterable[ParameterName], axes: Iterable[Axis]) -> tuple[int, ...]:
        """The shape of an array with these axes that holds parameters of one layer, or of the whole model.

        Along `HEAD_PART` lie the queries of a kv head, its key and its value; along `GATE_OR_UP` the matrices.
        """
        wanted = list(names)
        lengths = {axis: size for name in wanted for axis, size in self.specs[name].lengths.items()}
        lengths[Axis.GATE_OR_UP] = len(wanted)
        if Axis.HEADS in lengths and Axis.KV_HEADS in lengths:
            lengths[Axis.HEAD_PART] = lengths[Axis.HEADS] // lengths[Axis.KV_HEADS] + 2
        return tuple(lengths[axis] for axis in axes)

    def matrix_weights(self, layer: int | None) -> int:
        """Numbers in the matrices of one layer, or in those of none."""
        return sum(math.prod(spec.shape) for spec in self.of_layer(layer) if len(spec.shape) == 2)


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
        Part.LAYER_SCALE,
        Part.STATE_NORM,
    }
)

_VOCABULARY, _HIDDEN, _INTERMEDIATE = (Axis.VOCABULARY,), (Axis.HIDDEN,), (Axis.INTERMEDIATE,)
_CHANNELS, _STATE_HEADS = (Axis.CHANNELS,), (Axis.STATE_HEADS,)
_HEADS, _KV_HEADS = (Axis.HEADS, Axis.HEAD_DIM), (Axis.KV_HEADS, Axis.HEAD_DIM)


@dataclass(frozen=True, slots=True)
class _Shaped:
    """A parameter before it has a name."""

    part: Part
    kind: Kind
    axes: Axes
    sizes: Sizes
    offset: float = 0.0
    interleaved: bool = False
    stored_as: Part | None = None
    """The part whose tensor this is as well."""
    rotated: int = 0
    block: int = 0
    blocks: int = 1
    factors: Factors = ()
    sections: Sections = ()


def _specs(config: ModelConfig) -> Iterator[ParameterSpec]:
    table = ((_VOCABULARY, _HIDDEN), ((config.vocab_size,), (config.hidden_size,)))
    yield from _named(config, [_Shaped(Part.EMBEDDING, Kind.WEIGHT, *table)], None)
    for number, layer in enumerate(config.layers):
        yield from _named(config, list(_layer(layer, config.hidden_size)), number)
    yield from _named(config, [_norm(Part.FINAL_NORM, config.hidden_size, config.final_norm.offset)], None)
    head = next(_named(config, [_Shaped(Part.HEAD, Kind.WEIGHT, *table)], None))
    if config.tie_word_embeddings:
        names = family_named(config.architecture).names
        head = replace(
            head,
            tensor=hf_name(names[Part.EMBEDDING], Kind.WEIGHT, None),
            gguf=gguf_name(names[Part.EMBEDDING], Kind.WEIGHT, None),
        )
    yield head


def _named(config: ModelConfig, parameters: list[_Shaped], layer: int | None) -> Iterator[ParameterSpec]:
    """Parts that share a tensor follow each other along its rows, but for one that is stored as another."""
    names = family_named(config.architecture).names
    assert layer is None or not WHOLE_MODEL & {parameter.part for parameter in parameters}
    rows: dict[str, int] = {}
    starts: dict[tuple[Part, Kind], int] = {}
    for parameter in parameters:
        name = names[parameter.stored_as or parameter.part]
        tensor = hf_name(name, parameter.kind, layer)
        if parameter.stored_as is None:
            first = starts[parameter.part, parameter.kind] = rows.get(tensor, 0)
            rows[tensor] = first + parameter.blocks * math.prod(parameter.sizes[0])
        else:
            first = starts[parameter.stored_as, parameter.kind]
        yield ParameterSpec(
            ParameterName(parameter.part, parameter.kind, layer),
            parameter.axes,
            parameter.sizes,
            tensor,
            gguf_name(name, parameter.kind, layer),
            first,
            parameter.offset,
            parameter.interleaved,
            parameter.rotated,
            parameter.block,
            parameter.blocks,
            parameter.factors if any(factor != 1.0 for _, factor in parameter.factors) else (),
            parameter.sections,
        )


def _layer(layer: LayerConfig, hidden: int) -> Iterator[_Shaped]:
    norms = (
        (Part.ATTENTION_NORM, layer.mixer_norms.pre),
        (Part.ATTENTION_POST_NORM, layer.mixer_norms.post),
        (Part.FEED_FORWARD_NORM, layer.feed_forward_norms.pre),
        (Part.FEED_FORWARD_POST_NORM, layer.feed_forward_norms.post),
    )
    for part, norm in norms:
        if norm is not None:
            yield _norm(part, hidden, norm.offset)
    if layer.attention is not None:
        yield from _attention(layer.attention, hidden)
    if layer.recurrent is not None:
        yield from _recurrent(layer.recurrent, hidden)
    if layer.feed_forward is not None:
        yield from _feed_forward(layer.feed_forward, hidden)
    if layer.learnt_scale:
        yield _Shaped(Part.LAYER_SCALE, Kind.WEIGHT, ((Axis.ONE,),), ((1,),))


def _attention(attention: AttentionConfig, hidden: int) -> Iterator[_Shaped]:
    queries, keys = (attention.num_heads, attention.head_dim), (attention.num_kv_heads, attention.head_dim)
    rope = attention.rope
    partly = 0 if rope is None or rope.rotated == 1.0 else rope.rotated_numbers(attention.head_dim)
    order = _Order(attention.interleaved_rope, partly)
    blocks = 2 if attention.output_gate else 1
    taken = attention.input_multiplier
    query = _linear(Part.QUERY, (queries, (hidden,)), (_HEADS, _HIDDEN), attention.bias, order=order, taken=taken)
    yield from (replace(parameter, blocks=blocks) for parameter in query)
    if attention.output_gate:
        gate = _linear(
            Part.OUTPUT_GATE, (queries, (hidden,)), (_HEADS, _HIDDEN), attention.bias, stored_as=Part.QUERY, taken=taken
        )
        yield from (replace(parameter, block=1, blocks=blocks) for parameter in gate)
    key, given = attention.key_multiplier, attention.output_multiplier
    key_sizes, key_axes = (keys, (hidden,)), (_KV_HEADS, _HIDDEN)
    yield from _linear(Part.KEY, key_sizes, key_axes, attention.bias, order=order, taken=taken, given=key)
    stored_as = Part.KEY if attention.values_are_keys else None
    yield from _linear(Part.VALUE, key_sizes, key_axes, attention.bias, stored_as=stored_as, taken=taken)
    yield from _linear(Part.OUTPUT, ((hidden,), queries), (_HIDDEN, _HEADS), attention.out_bias, given=given)
    qk_norm = attention.qk_norm
    if qk_norm is not None:
        sides = ((Part.QUERY_NORM, queries, _HEADS), (Part.KEY_NORM, keys, _KV_HEADS))
        for part, sizes, axes in sides:
            first = 0 if qk_norm.whole else 1
            norm = _Shaped(part, Kind.WEIGHT, (axes[first:],), (sizes[first:],), qk_norm.norm.offset)
            yield replace(norm, interleaved=order.interleaved, rotated=order.rotated)
    if attention.sinks:
        yield _Shaped(Part.SINKS, Kind.WEIGHT, ((Axis.HEADS,),), ((attention.num_heads,),))


def _recurrent(mixer: RecurrentConfig, hidden: int) -> Iterator[_Shaped]:
    inputs = input_sections(mixer)
    rows = sum(section.units * section.rows for section in inputs)
    bias = False if isinstance(mixer, GatedDeltaNetConfig) else mixer.bias
    for linear in _linear(Part.STATE_INPUT, ((rows,), (hidden,)), (_CHANNELS, _HIDDEN), bias):
        yield replace(linear, sections=inputs, factors=_input_factors(mixer, linear.kind))
    match mixer:
        case ShortConvConfig():
            inner, out_bias, conv_bias, given = mixer.channels, mixer.bias, mixer.bias, 1.0
        case GatedDeltaNetConfig():
            inner, out_bias, conv_bias, given = mixer.num_value_heads * mixer.value_dim, False, False, 1.0
            yield from _linear(Part.STATE_GATE, ((inner,), (hidden,)), (_CHANNELS, _HIDDEN), False)
            for part in (Part.UPDATE_RATE, Part.DECAY_INPUT):
                yield from _linear(part, ((mixer.num_value_heads,), (hidden,)), (_STATE_HEADS, _HIDDEN), False)
            yield from (_of_state_heads(part, mixer.num_value_heads) for part in (Part.DECAY_BIAS, Part.DECAY_LOG))
            # One for all heads, so every device has it.
            norm = (((Axis.HEAD_DIM,),), ((mixer.value_dim,),))
            yield _Shaped(Part.STATE_NORM, Kind.WEIGHT, *norm, mixer.norm.offset)
        case Mamba2Config():
            inner, out_bias, conv_bias = mixer.inner, mixer.out_bias, mixer.conv_bias
            given = mixer.output_multiplier
            for part in (Part.DECAY_BIAS, Part.DECAY_LOG, Part.SKIP):
                yield _of_state_heads(part, mixer.num_heads)
            if mixer.norm is not None:
                yield _Shaped(Part.STATE_NORM, Kind.WEIGHT, (_CHANNELS,), ((inner,),), mixer.norm.offset)
    channels, taps = convolution_sections(mixer), ((mixer.channels,), (1,), (mixer.width,))
    kernel = _Shaped(Part.CONVOLUTION, Kind.WEIGHT, (_CHANNELS, (Axis.ONE,), (Axis.TAPS,)), taps, sections=channels)
    yield kernel
    if conv_bias:
        yield replace(kernel, kind=Kind.BIAS, axes=kernel.axes[:1], sizes=taps[:1])
    yield from _linear(Part.STATE_OUTPUT, ((hidden,), (inner,)), (_HIDDEN, _CHANNELS), out_bias, given=given)


def _input_factors(mixer: RecurrentConfig, kind: Kind) -> Factors:
    """What the parts of a Mamba-2's projection are multiplied by; of the weight as well what the layer takes."""
    if not isinstance(mixer, Mamba2Config):
        return ()
    taken = mixer.input_multiplier if kind is Kind.WEIGHT else 1.0
    pairs = zip(mixer.parts, mixer.part_multipliers, strict=True)
    return tuple((rows, factor * taken) for rows, factor in pairs)


def _of_state_heads(part: Part, heads: int) -> _Shaped:
    return _Shaped(part, Kind.WEIGHT, (_STATE_HEADS,), ((heads,),))


def _feed_forward(feed_forward: FeedForwardConfig | SquaredReluConfig, hidden: int) -> Iterator[_Shaped]:
    inner, outer = (feed_forward.size,), (hidden,)
    if isinstance(feed_forward, SquaredReluConfig):
        yield from _linear(Part.UP, (inner, outer), (_INTERMEDIATE, _HIDDEN), feed_forward.bias)
        yield from _linear(Part.DOWN, (outer, inner), (_HIDDEN, _INTERMEDIATE), feed_forward.bias)
        return
    for part, given in ((Part.GATE, feed_forward.gate_multiplier), (Part.UP, 1.0)):
        yield from _linear(part, (inner, outer), (_INTERMEDIATE, _HIDDEN), feed_forward.bias, given=given)
    given = feed_forward.output_multiplier
    yield from _linear(Part.DOWN, (outer, inner), (_HIDDEN, _INTERMEDIATE), feed_forward.bias, given=given)


@dataclass(frozen=True, slots=True)
class _Order:
    """How the rows of each head are stored: see `ParameterSpec`."""

    interleaved: bool = False
    rotated: int = 0


_AS_STORED = _Order()


def _linear(
    part: Part,
    sizes: Sizes,
    axes: Axes,
    bias: bool,
    *,
    order: _Order = _AS_STORED,
    stored_as: Part | None = None,
    taken: float = 1.0,
    given: float = 1.0,
) -> Iterator[_Shaped]:
    """A matrix, and its bias if it has one. `taken`, `given`: what its input and its output are multiplied by."""
    rows = math.prod(sizes[0])
    own = _Shaped(part, Kind.WEIGHT, axes, sizes, 0.0, order.interleaved, stored_as, order.rotated)
    yield replace(own, factors=((rows, taken * given),))
    if bias:
        yield replace(own, kind=Kind.BIAS, axes=axes[:1], sizes=sizes[:1], factors=((rows, given),))


def _norm(part: Part, size: int, offset: float) -> _Shaped:
    return _Shaped(part, Kind.WEIGHT, (_HIDDEN,), ((size,),), offset)
