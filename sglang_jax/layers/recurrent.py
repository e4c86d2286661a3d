"""Layers with a recurrent state per sequence: short convolutions, gated delta nets, Mamba-2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import ScanInputs
from sglang_jax.kernels.states import convolve_states, scan_states
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import Norm, divide_by_rms
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions
from sglang_jax.layers.sharding import automatic_mesh, partition_spec

ConvolutionWeights = tuple[jax.Array, jax.Array | None]
"""A kernel `[channels, 1, width]`, and a bias `[channels]` or None."""

P = ParamSpec("P")
T = TypeVar("T")

_FLOAT32 = jnp.dtype(jnp.float32)
_NORM_OF_KEYS = 1e-6


class Convolution(nnx.Module):
    """See `kernels.causal_convolution`. The kernel is stored as `[channels, 1, width]`."""

    def __init__(self, channels: int, width: int, *, bias: bool, dtype: jnp.dtype) -> None:
        axes = [(Axis.CHANNELS, channels), (Axis.ONE, 1), (Axis.TAPS, width)]
        self.kernel = parameter(axes, dtype, Part.CONVOLUTION)
        self.bias = parameter(axes[:1], dtype, Part.CONVOLUTION, kind=ParameterKind.BIAS) if bias else None

    @property
    def weights(self) -> ConvolutionWeights:
        return self.kernel[...], None if self.bias is None else self.bias[...]


class ShortConv(nnx.Module):
    """See `ShortConvConfig`."""

    def __init__(self, config: ShortConvConfig, options: PartOptions) -> None:
        self.implementation = options.implementation
        hidden, inner = [(Axis.HIDDEN, options.hidden_size)], config.channels
        self.config = config
        self.input = _linear(hidden, (Axis.CHANNELS, 3 * inner), Part.STATE_INPUT, options, bias=config.bias)
        self.convolution = Convolution(inner, config.width, bias=config.bias, dtype=options.dtype)
        self.output = _linear([(Axis.CHANNELS, inner)], hidden[0], Part.STATE_OUTPUT, options, bias=config.bias)

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        run = _on_each_device(
            partial(_short_convolution, self.implementation),
            self.config.shards,
            [_CHANNELS, _WEIGHTS, _TAILS, _ALL],
            [_CHANNELS, _TAILS],
        )
        tiled = partial(in_tiles, rows=self.implementation.tile_rows)
        found, tails = run(tiled(self.input, x), self.convolution.weights, memory.states[0], step.batch.states)
        return tiled(self.output, found), replace(memory, states=(tails,))


class GatedDeltaNet(nnx.Module):
    """See `GatedDeltaNetConfig`."""

    def __init__(self, config: GatedDeltaNetConfig, options: PartOptions) -> None:
        dtype, self.implementation = options.dtype, options.implementation
        hidden = [(Axis.HIDDEN, options.hidden_size)]
        inner, heads = config.num_value_heads * config.value_dim, (Axis.STATE_HEADS, config.num_value_heads)
        self.config = config
        self.input = _linear(hidden, (Axis.CHANNELS, config.channels), Part.STATE_INPUT, options)
        self.gate = _linear(hidden, (Axis.CHANNELS, inner), Part.STATE_GATE, options)
        self.rate = _linear(hidden, heads, Part.UPDATE_RATE, options)
        self.decay = _linear(hidden, heads, Part.DECAY_INPUT, options)
        self.decay_bias = parameter([heads], _FLOAT32, Part.DECAY_BIAS)
        self.decay_log = parameter([heads], _FLOAT32, Part.DECAY_LOG)
        self.convolution = Convolution(config.channels, config.width, bias=False, dtype=dtype)
        self.norm = Norm([(Axis.HEAD_DIM, config.value_dim)], config.norm, dtype, Part.STATE_NORM)
        self.output = _linear([(Axis.CHANNELS, inner)], hidden[0], Part.STATE_OUTPUT, options)

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        run = _on_each_device(
            partial(_delta_net, self.config.of_one_device(), self.implementation),
            self.config.shards,
            [_CHANNELS, _OF_HEADS, _OF_HEADS, _WEIGHTS, _HEADS, _HEADS, _TAILS, _MATRICES, _ALL],
            [_HEAD_OUTPUTS, _TAILS, _MATRICES],
        )
        tiled = partial(in_tiles, rows=self.implementation.tile_rows)
        outputs, tails, matrices = run(
            *tiled(lambda x: (self.input(x), self.rate(x), self.decay(x)), x),
            self.convolution.weights,
            self.decay_bias[...],
            self.decay_log[...],
            *memory.states,
            step.batch.states,
        )
        return tiled(self._output, (x, outputs)), replace(memory, states=(tails, matrices))

    def _output(self, tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The part's output for tokens `[T, hidden]`, and outputs of the states `[T, heads, value_dim]`."""
        x, outputs = tokens
        gate = jax.nn.silu(self.gate(x).astype(jnp.float32)).reshape(outputs.shape)
        normed = self.norm(outputs.astype(x.dtype)).astype(jnp.float32) * gate
        return self.output(normed.reshape(x.shape[0], -1).astype(x.dtype))


class Mamba2(nnx.Module):
    """See `Mamba2Config`."""

    def __init__(self, config: Mamba2Config, options: PartOptions) -> None:
        dtype, self.implementation = options.dtype, options.implementation
        hidden, inner = [(Axis.HIDDEN, options.hidden_size)], (Axis.CHANNELS, config.inner)
        heads = (Axis.STATE_HEADS, config.num_heads)
        self.config = config
        self.input = _linear(hidden, (Axis.CHANNELS, sum(config.parts)), Part.STATE_INPUT, options, bias=config.bias)
        self.decay_bias = parameter([heads], _FLOAT32, Part.DECAY_BIAS)
        self.decay_log = parameter([heads], _FLOAT32, Part.DECAY_LOG)
        self.skip = parameter([heads], _FLOAT32, Part.SKIP)
        self.convolution = Convolution(config.channels, config.width, bias=config.conv_bias, dtype=dtype)
        self.norm = None if config.norm is None else parameter([inner], _FLOAT32, Part.STATE_NORM)
        self.output = _linear([inner], hidden[0], Part.STATE_OUTPUT, options, bias=config.out_bias)

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        run = _on_each_device(
            partial(_mamba, self.config.of_one_device(), self.implementation),
            self.config.shards,
            [_CHANNELS, _WEIGHTS, _HEADS, _HEADS, _HEADS, _TAILS, _MATRICES, _ALL],
            [_CHANNELS, _CHANNELS, _TAILS, _MATRICES],
        )
        tiled = partial(in_tiles, rows=self.implementation.tile_rows)
        outputs, gate, tails, matrices = run(
            tiled(self.input, x),
            self.convolution.weights,
            self.decay_bias[...],
            self.decay_log[...],
            self.skip[...],
            *memory.states,
            step.batch.states,
        )
        output = tiled(self._output, (outputs, gate))
        return output.astype(x.dtype), replace(memory, states=(tails, matrices))

    def _output(self, tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The part's output for outputs of the states float32 `[T, inner]` and their gate, in whose dtype."""
        outputs, gate = tokens
        gated = self._gated(outputs, jax.nn.silu(gate.astype(jnp.float32)))
        return self.output(gated.astype(gate.dtype))

    def _gated(self, outputs: jax.Array, gate: jax.Array) -> jax.Array:
        """Outputs float32 `[T, inner]` times their gate, normalised if the config has a norm."""
        config = self.config
        if config.norm is None or self.norm is None:
            return outputs * gate
        if not config.norm_before_gate:
            outputs = outputs * gate
        parts = outputs.reshape(outputs.shape[0], -1, config.inner // config.norm_groups)
        outputs = divide_by_rms(parts, config.norm.eps).reshape(outputs.shape) * self.norm[...]
        return outputs * gate if config.norm_before_gate else outputs


def _linear(
    inputs: list[tuple[Axis, int]], output: tuple[Axis, int], part: Part, options: PartOptions, *, bias: bool = False
) -> Linear:
    return Linear(inputs, [output], (part,), options, bias=bias)


_CHANNELS = partition_spec((Axis.TOKENS, Axis.CHANNELS))
_OF_HEADS = partition_spec((Axis.TOKENS, Axis.STATE_HEADS))
_HEADS = partition_spec((Axis.STATE_HEADS,))
_WEIGHTS = partition_spec((Axis.CHANNELS,))
_HEAD_OUTPUTS = partition_spec((Axis.TOKENS, Axis.STATE_HEADS, Axis.HEAD_DIM))
_TAILS = partition_spec((Axis.PAGES, Axis.TAPS, Axis.CHANNELS))
_MATRICES = partition_spec((Axis.PAGES, Axis.STATE_HEADS))
_ALL = PartitionSpec()
"""The sharding of an argument or a result of `_on_each_device`: all of it on each device."""


def _on_each_device(
    run: Callable[P, T], shards: int, taken: Sequence[PartitionSpec], given: Sequence[PartitionSpec]
) -> Callable[P, T]:
    """Runs `run` on each device of the mesh with its shard of the arguments, without any exchange. So channels are
    divided as on one device, and kernels run for the device's heads."""
    mesh = automatic_mesh()
    if shards == 1 or mesh is None:
        return run
    return jax.shard_map(run, mesh=mesh, in_specs=tuple(taken), out_specs=tuple(given), check_vma=False)


def _short_convolution(
    implementation: AttentionImplementation, x: jax.Array, weights: ConvolutionWeights, pool: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """`[T, 3 * channels]` → `[T, channels]`, and the pool after the step."""
    before, after, inner = jnp.split(x, 3, axis=-1)
    kernel, bias = weights
    tiled = partial(in_tiles, rows=implementation.tile_rows)
    inputs = tiled(lambda both: both[0] * both[1], (before, inner))
    found, tails = convolve_states(implementation, inputs, kernel[:, 0], bias, pool, rows)
    return tiled(lambda both: (both[0].astype(jnp.float32) * both[1]).astype(x.dtype), (after, found)), tails


def _delta_net(
    config: GatedDeltaNetConfig,
    implementation: AttentionImplementation,
    x: jax.Array,
    rates: jax.Array,
    steps: jax.Array,
    weights: ConvolutionWeights,
    decay_bias: jax.Array,
    decay_log: jax.Array,
    tails: jax.Array,
    matrices: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[T, channels]` of queries, keys and values, and `[T, heads]` of rates and steps → float32 `[T, heads,
    value_dim]`, and the pools after the step."""
    kernel, bias = weights
    found, tails = convolve_states(implementation, x, kernel[:, 0], bias, tails, rows)

    def prepared(tokens: tuple[jax.Array, jax.Array, jax.Array]) -> ScanInputs:
        found, rates, steps = tokens
        queries, keys, values = _in_heads(config, jax.nn.silu(found))
        queries, keys = _unit(queries), _unit(keys)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + decay_bias)
        return ScanInputs(
            queries * config.key_dim**-0.5,
            keys,
            values,
            -jnp.exp(decay_log) * steps,
            jax.nn.sigmoid(rates.astype(jnp.float32)),
        )

    inputs = in_tiles(prepared, (found, rates, steps), implementation.tile_rows)
    outputs, matrices = scan_states(implementation, inputs, matrices, rows)
    return outputs, tails, matrices


def _in_heads(config: GatedDeltaNetConfig, x: jax.Array) -> list[jax.Array]:
    """`[T, channels]` → queries and keys `[T, num_key_heads, key_dim]`, values `[T, num_value_heads, value_dim]`."""
    tokens, heads, size = x.shape[0], config.num_key_heads, config.key_dim
    if size == config.value_dim:
        # Heads before their parts, as the convolution returns them on TPUs (`kernels.causal_convolution_pallas`).
        return jnp.split(x.reshape(tokens, -1, size), (heads, 2 * heads), axis=1)
    queries, keys, values = jnp.split(x, (heads * size, 2 * heads * size), axis=-1)
    return [part.reshape(tokens, -1, dim) for part, dim in ((queries, size), (keys, size), (values, config.value_dim))]


def _mamba(
    config: Mamba2Config,
    implementation: AttentionImplementation,
    x: jax.Array,
    weights: ConvolutionWeights,
    decay_bias: jax.Array,
    decay_log: jax.Array,
    skip: jax.Array,
    tails: jax.Array,
    matrices: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`[T, sum(config.parts)]` → the output float32 `[T, inner]`, its gate `[T, inner]`, and the pools after the
    step."""
    tokens, all_directions = x.shape[0], config.num_groups * config.state_size
    gate, found, steps = jnp.split(x, (config.inner, config.inner + config.channels), axis=-1)
    kernel, bias = weights
    found, tails = convolve_states(implementation, found, kernel[:, 0], bias, tails, rows)

    def prepared(tokens: tuple[jax.Array, jax.Array]) -> tuple[ScanInputs, jax.Array]:
        found, steps = tokens
        values, written, read = jnp.split(jax.nn.silu(found), (config.inner, config.inner + all_directions), axis=-1)
        values = values.reshape(len(found), -1, config.head_dim)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + decay_bias)
        steps = jnp.clip(steps, config.least_step, config.most_step)
        inputs = ScanInputs(
            read.reshape(len(found), -1, config.state_size),
            written.reshape(len(found), -1, config.state_size),
            values * steps[..., None],
            -jnp.exp(decay_log) * steps,
            None,
        )
        return inputs, values

    tiled = partial(in_tiles, rows=implementation.tile_rows)
    inputs, values = tiled(prepared, (found, steps))
    outputs, matrices = scan_states(implementation, inputs, matrices, rows)
    outputs = tiled(lambda both: both[0] + both[1] * skip[:, None], (outputs, values))
    return outputs.reshape(tokens, -1), gate, tails, matrices


def _unit(x: jax.Array) -> jax.Array:
    """float32 x with its last axis divided by its Euclidean norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_OF_KEYS)
