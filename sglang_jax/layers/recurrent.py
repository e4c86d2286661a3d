"""Layers that keep a recurrent state of each sequence: short convolutions, gated delta nets, Mamba-2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.model_config import (
    GatedDeltaNetConfig,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
)
from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.kernels.causal_convolution import convolve
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs
from sglang_jax.kernels.states import scan_states
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import Norm, divide_by_rms
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.weight_format import WeightFormat

States = tuple[jax.Array, ...]
"""A layer's pools, `[slots, ...]` each, in the order of its config's `state`."""

_FLOAT32 = jnp.dtype(jnp.float32)
_NORM_OF_KEYS = 1e-6


def recurrent_layer(
    config: RecurrentConfig, hidden_size: int, *, dtype: jnp.dtype, implementation: AttentionImplementation
) -> RecurrentLayer:
    """The layer of a config, whose states are computed as `implementation` says (see `scan_states`)."""
    match config:
        case ShortConvConfig():
            return ShortConv(config, hidden_size, dtype=dtype)
        case GatedDeltaNetConfig():
            return GatedDeltaNet(config, hidden_size, dtype=dtype, implementation=implementation)
        case Mamba2Config():
            return Mamba2(config, hidden_size, dtype=dtype, implementation=implementation)


class Convolution(nnx.Module):
    """See `kernels.causal_convolution`. The kernel is stored as `[channels, 1, width]`."""

    def __init__(self, channels: int, width: int, *, bias: bool, dtype: jnp.dtype) -> None:
        axes = [(Axis.CHANNELS, channels), (Axis.ONE, 1), (Axis.TAPS, width)]
        self.kernel = parameter(axes, dtype, Part.CONVOLUTION)
        self.bias = parameter(axes[:1], dtype, Part.CONVOLUTION, kind=Kind.BIAS) if bias else None

    def __call__(self, x: jax.Array, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
        """`[T, channels]` → float32 `[T, channels]`, and the pool of last inputs after the step."""
        bias = None if self.bias is None else self.bias[...]
        found, tails = convolve(x, self.kernel[...][:, 0], bias, rows.read(pool), rows)
        return found, rows.write(pool, tails)


class ShortConv(nnx.Module):
    """See `ShortConvConfig`."""

    def __init__(self, config: ShortConvConfig, hidden_size: int, *, dtype: jnp.dtype) -> None:
        hidden, inner = [(Axis.HIDDEN, hidden_size)], config.channels
        self.input = _linear(hidden, (Axis.CHANNELS, 3 * inner), Part.STATE_INPUT, bias=config.bias, dtype=dtype)
        self.convolution = Convolution(inner, config.width, bias=config.bias, dtype=dtype)
        self.output = _linear([(Axis.CHANNELS, inner)], hidden[0], Part.STATE_OUTPUT, bias=config.bias, dtype=dtype)

    def __call__(self, x: jax.Array, rows: StateRows, states: States) -> tuple[jax.Array, States]:
        """`[T, hidden]` → `[T, hidden]`, and the layer's pools after the step."""
        before, after, inner = jnp.split(self.input(x), 3, axis=-1)
        found, tails = self.convolution(before * inner, states[0], rows)
        return self.output((after.astype(jnp.float32) * found).astype(x.dtype)), (tails,)

    def arrange(self, wanted: WeightFormat) -> None:
        """Every matrix, once loaded, in another format."""
        self.input.arrange(wanted)
        self.output.arrange(wanted)


class GatedDeltaNet(nnx.Module):
    """See `GatedDeltaNetConfig`."""

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        hidden_size: int,
        *,
        dtype: jnp.dtype,
        implementation: AttentionImplementation,
    ) -> None:
        self.implementation = implementation
        hidden = [(Axis.HIDDEN, hidden_size)]
        inner, heads = config.num_value_heads * config.value_dim, (Axis.STATE_HEADS, config.num_value_heads)
        self.config = config
        self.input = _linear(hidden, (Axis.CHANNELS, config.channels), Part.STATE_INPUT, dtype=dtype)
        self.gate = _linear(hidden, (Axis.CHANNELS, inner), Part.STATE_GATE, dtype=dtype)
        self.rate = _linear(hidden, heads, Part.UPDATE_RATE, dtype=dtype)
        self.decay = _linear(hidden, heads, Part.DECAY_INPUT, dtype=dtype)
        self.decay_bias = parameter([heads], _FLOAT32, Part.DECAY_BIAS)
        self.decay_log = parameter([heads], _FLOAT32, Part.DECAY_LOG)
        self.convolution = Convolution(config.channels, config.width, bias=False, dtype=dtype)
        self.norm = Norm([(Axis.CHANNELS, config.value_dim)], config.norm, dtype, Part.STATE_NORM)
        self.output = _linear([(Axis.CHANNELS, inner)], hidden[0], Part.STATE_OUTPUT, dtype=dtype)

    def __call__(self, x: jax.Array, rows: StateRows, states: States) -> tuple[jax.Array, States]:
        """`[T, hidden]` → `[T, hidden]`, and the layer's pools after the step."""
        config, tokens = self.config, x.shape[0]
        found, tails = self.convolution(self.input(x), states[0], rows)
        found = jax.nn.silu(found)
        all_keys = config.num_key_heads * config.key_dim
        queries, keys, values = jnp.split(found, (all_keys, 2 * all_keys), axis=-1)
        queries, keys = (_unit(x.reshape(tokens, -1, config.key_dim)) for x in (queries, keys))
        steps = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.decay_bias[...])
        inputs = ScanInputs(
            queries * config.key_dim**-0.5,
            keys,
            values.reshape(tokens, -1, config.value_dim),
            -jnp.exp(self.decay_log[...]) * steps,
            jax.nn.sigmoid(self.rate(x).astype(jnp.float32)),
        )
        outputs, matrices = scan_states(self.implementation, inputs, states[1], rows)
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32)).reshape(outputs.shape)
        normed = self.norm(outputs.astype(x.dtype)).astype(jnp.float32) * gate
        return self.output(normed.reshape(tokens, -1).astype(x.dtype)), (tails, matrices)

    def arrange(self, wanted: WeightFormat) -> None:
        """Every matrix, once loaded, in another format."""
        for linear in (self.input, self.gate, self.rate, self.decay, self.output):
            linear.arrange(wanted)


class Mamba2(nnx.Module):
    """See `Mamba2Config`."""

    def __init__(
        self,
        config: Mamba2Config,
        hidden_size: int,
        *,
        dtype: jnp.dtype,
        implementation: AttentionImplementation,
    ) -> None:
        self.implementation = implementation
        hidden, inner = [(Axis.HIDDEN, hidden_size)], (Axis.CHANNELS, config.inner)
        heads = (Axis.STATE_HEADS, config.num_heads)
        self.config = config
        self.input = _linear(
            hidden, (Axis.CHANNELS, sum(config.parts)), Part.STATE_INPUT, bias=config.bias, dtype=dtype
        )
        self.decay_bias = parameter([heads], _FLOAT32, Part.DECAY_BIAS)
        self.decay_log = parameter([heads], _FLOAT32, Part.DECAY_LOG)
        self.skip = parameter([heads], _FLOAT32, Part.SKIP)
        self.convolution = Convolution(config.channels, config.width, bias=config.conv_bias, dtype=dtype)
        self.norm = None if config.norm is None else parameter([inner], _FLOAT32, Part.STATE_NORM)
        self.output = _linear([inner], hidden[0], Part.STATE_OUTPUT, bias=config.out_bias, dtype=dtype)

    def __call__(self, x: jax.Array, rows: StateRows, states: States) -> tuple[jax.Array, States]:
        """`[T, hidden]` → `[T, hidden]`, and the layer's pools after the step."""
        config, tokens = self.config, x.shape[0]
        gate, found, steps = jnp.split(self.input(x), (config.inner, config.inner + config.channels), axis=-1)
        found, tails = self.convolution(found, states[0], rows)
        all_directions = config.num_groups * config.state_size
        values, written, read = jnp.split(jax.nn.silu(found), (config.inner, config.inner + all_directions), axis=-1)
        values = values.reshape(tokens, -1, config.head_dim)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + self.decay_bias[...])
        steps = jnp.clip(steps, config.least_step, config.most_step)
        inputs = ScanInputs(
            read.reshape(tokens, -1, config.state_size),
            written.reshape(tokens, -1, config.state_size),
            values * steps[..., None],
            -jnp.exp(self.decay_log[...]) * steps,
            None,
        )
        outputs, matrices = scan_states(self.implementation, inputs, states[1], rows)
        outputs = (outputs + values * self.skip[...][:, None]).reshape(tokens, -1)
        gated = self._gated(outputs, jax.nn.silu(gate.astype(jnp.float32)))
        return self.output(gated.astype(x.dtype)), (tails, matrices)

    def _gated(self, outputs: jax.Array, gate: jax.Array) -> jax.Array:
        """Outputs float32 `[T, inner]` by their gate, normed where the config has a norm."""
        config = self.config
        if config.norm is None or self.norm is None:
            return outputs * gate
        if not config.norm_before_gate:
            outputs = outputs * gate
        parts = outputs.reshape(outputs.shape[0], config.norm_groups, -1)
        outputs = divide_by_rms(parts, config.norm.eps).reshape(outputs.shape) * self.norm[...]
        return outputs * gate if config.norm_before_gate else outputs

    def arrange(self, wanted: WeightFormat) -> None:
        """Every matrix, once loaded, in another format."""
        self.input.arrange(wanted)
        self.output.arrange(wanted)


RecurrentLayer = ShortConv | GatedDeltaNet | Mamba2


def _linear(
    inputs: list[tuple[Axis, int]], output: tuple[Axis, int], part: Part, *, bias: bool = False, dtype: jnp.dtype
) -> Linear:
    return Linear(inputs, [output], (part,), bias=bias, dtype=dtype)


def _unit(x: jax.Array) -> jax.Array:
    """Each last axis of float32 x over its length."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_OF_KEYS)
