"""Layers with a recurrent state per sequence: short convolutions, gated delta nets, Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import HIDDEN, Declared, FusedHeads, linear, side_by_side
from sglang_jax.architectures.kinds.sections import Section, Sections, can_share
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.errors import ConfigError

_CHANNELS, _STATE_HEADS = (Axis.CHANNELS,), (Axis.STATE_HEADS,)


class StateDtype(StrEnum):
    ACTIVATIONS = "activations"
    """The dtype of the model's activations."""
    RECURRENT = "recurrent"
    """`mamba_ssm_dtype`, by default float32."""


CONV_STATE = "conv_state"
"""Name of the state array of convolutions: the last inputs, `[width - 1, channels]`."""
SSM_STATE = "ssm_state"
"""Name of the state array with a matrix per head."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of a layer's recurrent state. `shape`: that of one slot; `sharded_axis`: its axis that is sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype
    sharded_axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution (LFM2): `out(c * conv(b * x))`. b, c and x are projections of the input; the
    convolution runs over the last `width` tokens of each channel separately.

    - `bias`: of both projections and of the convolution.
    - `shards`: devices that share the layer (`sharded`); the channels of its parameters are ordered by device.
    """

    channels: int
    width: int
    bias: bool = False
    shards: int = 1

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution."""
        return (_conv_state(self.width, self.channels),)

    @property
    def input_sections(self) -> Sections:
        """Sections of the rows of the input projection."""
        return self.convolution_sections * 3

    @property
    def convolution_sections(self) -> Sections:
        return (Section(self.channels, 1),)

    def parameters(self, hidden: int) -> Iterator[Declared]:
        yield from _input(self, hidden, self.bias)
        yield from _convolution(self, self.bias)
        yield from _output(self.channels, hidden, self.bias)

    def sharded(self, over: Parallelism) -> ShortConvConfig:
        size = over.devices
        if size == 1:
            return self
        if self.channels % size:
            raise _indivisible(f"a short convolution of {self.channels} channels", "the channels", size)
        return replace(self, shards=size)

    def of_one_device(self) -> ShortConvConfig:
        """The part of the layer that each device computes."""
        return replace(self, channels=self.channels // self.shards, shards=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetConfig:
    """A gated delta net (Yang et al. 2024): each head has a matrix `[key_dim, value_dim]`, which decays at each token
    and is then corrected towards the token's value at the token's key.

    Queries, keys and values pass through a convolution over the last `width` tokens and a SiLU; each key head serves
    `num_value_heads / num_key_heads` neighbouring value heads. `norm` applies to each head's output, which is then
    multiplied by the SiLU of a gate.

    - `fused_by_key_head`: a checkpoint has two projections. For each key head, one has the rows of its query, its key,
      its value heads and their gates; the other has those of the update rates and decays of its value heads.
    - `shards`: as in `ShortConvConfig`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm: NormConfig
    fused_by_key_head: bool = False
    shards: int = 1

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, all keys, all values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution, and each head's matrix."""
        matrix = (self.num_value_heads, self.key_dim, self.value_dim)
        return (_conv_state(self.width, self.channels), StateArray(SSM_STATE, matrix, StateDtype.RECURRENT, 0))

    @property
    def input_sections(self) -> Sections:
        """Sections of the rows of the projection to queries, keys and values."""
        return self.convolution_sections

    @property
    def convolution_sections(self) -> Sections:
        keys = Section(self.num_key_heads, self.key_dim)
        return (keys, keys, Section(self.num_value_heads, self.value_dim))

    def parameters(self, hidden: int) -> Iterator[Declared]:
        heads, inner = self.num_value_heads, self.num_value_heads * self.value_dim
        yield from self._projections(hidden)
        yield from (_of_state_heads(part, heads) for part in (Part.DECAY_BIAS, Part.DECAY_LOG))
        # All heads share this weight, so it is replicated.
        norm = (((Axis.HEAD_DIM,),), ((self.value_dim,),))
        yield Declared(Part.STATE_NORM, ParameterKind.WEIGHT, *norm, self.norm.offset)
        yield from _convolution(self, bias=False)
        yield from _output(inner, hidden, bias=False)

    def _projections(self, hidden: int) -> Iterator[Declared]:
        """To queries, keys and values; gates; update rates; and decays."""
        heads, inner = self.num_value_heads, self.num_value_heads * self.value_dim
        (states,) = _input(self, hidden, bias=False)
        (gates,) = linear(Part.STATE_GATE, ((inner,), (hidden,)), (_CHANNELS, HIDDEN), False)
        rates, decays = (
            next(linear(part, ((heads,), (hidden,)), (_STATE_HEADS, HIDDEN), False))
            for part in (Part.UPDATE_RATE, Part.DECAY_INPUT)
        )
        if self.fused_by_key_head:
            shared, key = heads // self.num_key_heads, self.key_dim
            values = shared * self.value_dim
            stored, ahead = 2 * key + 2 * values, 2 * key + values
            runs = ((0, key), (key, key), (2 * key, values))
            states = replace(states, fused_heads=FusedHeads(stored, runs))
            gates = replace(gates, fused_heads=FusedHeads(stored, ((ahead, values),)), stored_as=Part.STATE_INPUT)
            of_rates, of_decays = side_by_side(shared, shared)
            rates = replace(rates, fused_heads=of_rates)
            decays = replace(decays, fused_heads=of_decays, stored_as=Part.UPDATE_RATE)
        yield from (states, gates, rates, decays)

    def sharded(self, over: Parallelism) -> GatedDeltaNetConfig:
        size = over.devices
        if size == 1:
            return self
        keys = self.num_key_heads
        if self.num_value_heads % size or not can_share(keys, size):
            raise _indivisible(
                f"a delta net of {self.num_value_heads} value heads and {keys} key heads",
                "the value heads, and that divides or is a multiple of the key heads",
                size,
            )
        return replace(self, num_key_heads=max(keys, size), shards=size)

    def of_one_device(self) -> GatedDeltaNetConfig:
        """The part of the layer that each device computes."""
        keys, values = self.num_key_heads // self.shards, self.num_value_heads // self.shards
        return replace(self, num_key_heads=keys, num_value_heads=values, shards=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Mamba-2 (Dao and Gu 2024): each head has a matrix `[state_size, head_dim]`, which decays at each token, and to
    which the token's input is added along a direction of the state.

    One projection computes a gate, the input, the directions that are written and read, and each head's step size.
    A group of adjacent heads shares directions. Inputs and directions pass through a convolution over the last
    `width` tokens and a SiLU.

    - `norm`: applied to each of `norm_groups` parts of the output; None without a norm. `norm_before_gate`: before the
      output is multiplied by the SiLU of the gate, and otherwise after.
    - `least_step`, `most_step`: bounds of step sizes.
    - `bias`: of the input projection; `out_bias`: of the output projection; `conv_bias`: of the convolution.
    - `input_multiplier`, `output_multiplier`: of the layer's input and output; `part_multipliers`: of the parts of
      the projection: gate, input, directions written, directions read, step sizes.
    - `shards`: as in `ShortConvConfig`.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    width: int
    norm: NormConfig | None
    norm_groups: int = 1
    norm_before_gate: bool = False
    least_step: float = 0.0
    most_step: float = math.inf
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    input_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_multiplier: float = 1.0
    shards: int = 1

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Rows of each part of the input projection."""
        directions = self.num_groups * self.state_size
        return (self.inner, self.inner, directions, directions, self.num_heads)

    @property
    def channels(self) -> int:
        """Channels of the convolution: all inputs, all directions written, all directions read."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution, and each head's matrix."""
        matrix = (self.num_heads, self.state_size, self.head_dim)
        return (_conv_state(self.width, self.channels), StateArray(SSM_STATE, matrix, StateDtype.RECURRENT, 0))

    @property
    def input_sections(self) -> Sections:
        """Sections of the rows of the input projection: the gate, the channels of the convolution, step sizes."""
        gate, heads = Section(self.num_heads, self.head_dim), Section(self.num_heads, 1)
        return (gate, *self.convolution_sections, heads)

    @property
    def convolution_sections(self) -> Sections:
        directions = Section(self.num_groups, self.state_size)
        return (Section(self.num_heads, self.head_dim), directions, directions)

    def parameters(self, hidden: int) -> Iterator[Declared]:
        for parameter in _input(self, hidden, self.bias):
            scale = self.input_multiplier if parameter.kind is ParameterKind.WEIGHT else 1.0
            pairs = zip(self.parts, self.part_multipliers, strict=True)
            yield replace(parameter, factors=tuple((rows, by * scale) for rows, by in pairs))
        yield from (_of_state_heads(part, self.num_heads) for part in (Part.DECAY_BIAS, Part.DECAY_LOG, Part.SKIP))
        if self.norm is not None:
            yield Declared(Part.STATE_NORM, ParameterKind.WEIGHT, (_CHANNELS,), ((self.inner,),), self.norm.offset)
        yield from _convolution(self, self.conv_bias)
        yield from _output(self.inner, hidden, self.out_bias, self.output_multiplier)

    def sharded(self, over: Parallelism) -> Mamba2Config:
        size = over.devices
        if size == 1:
            return self
        groups, parts = self.num_groups, self.norm_groups if self.norm is not None else size
        if self.num_heads % size or not can_share(groups, size) or not can_share(parts, size):
            raise _indivisible(
                f"Mamba-2 of {self.num_heads} heads in {groups} groups"
                + (f" with a norm over {parts} parts" if self.norm is not None else ""),
                "the heads, and that divides or is a multiple of the groups"
                + (" and the parts" if self.norm is not None else ""),
                size,
            )
        return replace(self, num_groups=max(groups, size), shards=size)

    def of_one_device(self) -> Mamba2Config:
        """The part of the layer that each device computes, apart from the norm."""
        heads, groups = self.num_heads // self.shards, self.num_groups // self.shards
        return replace(self, num_heads=heads, num_groups=groups, shards=1)


RecurrentConfig = ShortConvConfig | GatedDeltaNetConfig | Mamba2Config
"""Layers that mix tokens through a recurrent state."""


def _conv_state(width: int, channels: int) -> StateArray:
    """The inputs of a convolution that its next output needs, oldest first."""
    return StateArray(CONV_STATE, (width - 1, channels), StateDtype.ACTIVATIONS, 1)


def _input(config: RecurrentConfig, hidden: int, bias: bool) -> Iterator[Declared]:
    """The input projection: to the channels of the convolution, and to others that are computed with them."""
    rows = sum(section.units * section.rows for section in config.input_sections)
    for parameter in linear(Part.STATE_INPUT, ((rows,), (hidden,)), (_CHANNELS, HIDDEN), bias):
        yield replace(parameter, sections=config.input_sections, factors=())


def _convolution(config: RecurrentConfig, bias: bool) -> Iterator[Declared]:
    taps = ((config.channels,), (1,), (config.width,))
    axes = (_CHANNELS, (Axis.ONE,), (Axis.TAPS,))
    kernel = Declared(Part.CONVOLUTION, ParameterKind.WEIGHT, axes, taps, sections=config.convolution_sections)
    yield kernel
    if bias:
        yield replace(kernel, kind=ParameterKind.BIAS, axes=axes[:1], sizes=taps[:1])


def _output(inner: int, hidden: int, bias: bool, by: float = 1.0) -> Iterator[Declared]:
    yield from linear(Part.STATE_OUTPUT, ((hidden,), (inner,)), (HIDDEN, _CHANNELS), bias, output_scale=by)


def _of_state_heads(part: Part, heads: int) -> Declared:
    return Declared(part, ParameterKind.WEIGHT, (_STATE_HEADS,), ((heads,),))


def _indivisible(what: str, divides: str, size: int) -> ConfigError:
    return ConfigError(f"{what} cannot be spread over {size} devices: choose a tp_size that divides {divides}")
