"""Layers with a recurrent state per sequence: short convolutions, gated delta nets, Mamba-2."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.linear import Linear
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.native_operations import divide_by_rms
from torch_backend.recurrent.interface import StepStates
from torch_backend.recurrent.scan import ScanInputs
from torch_backend.rounded_rows import Rounding, Rows

_NORM_OF_KEYS = 1e-6

_silu = partial(functional.silu, inplace=True)


class Convolution(Loadable):
    """See `convolve`. The kernel is stored as `[channels, 1, width]`."""

    def __init__(self, channels: int, width: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.declare("weight", (channels, 1, width), dtype, Part.CONVOLUTION)
        self.bias = (
            self.declare("bias", (channels,), dtype, Part.CONVOLUTION, kind=ParameterKind.BIAS) if bias else None
        )

    def forward(self, x: torch.Tensor, pool: torch.Tensor, step: StepStates) -> torch.Tensor:
        """`[T, channels]` → float32 `[T, channels]`; writes the last inputs to the pool."""
        return step.convolve(x, self.weight[:, 0], self.bias, pool)


class ShortConv(Loadable):
    """See `ShortConvConfig`."""

    def __init__(self, config: ShortConvConfig, options: PartOptions) -> None:
        super().__init__()
        shard, dtype, hidden_size = options.shard, options.dtype, options.hidden_size
        config = config.sharded(shard.over).of_one_device()
        inner, bias = config.channels, config.bias
        self.input = Linear(hidden_size, (3 * inner,), (Part.STATE_INPUT,), options, bias=bias)
        self.convolution = Convolution(inner, config.width, bias=bias, dtype=dtype)
        # One rank has the bias: the sum over ranks adds it once.
        self.output = Linear(inner, (hidden_size,), (Part.STATE_OUTPUT,), options, bias=bias and shard.first)

    @property
    def rounding(self) -> Rounding | None:
        return self.input.rounding

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        before, after, inner = self.input(x).chunk(3, dim=-1)
        found = self.convolution(before * inner, memory.states[0], _states(step))
        output: torch.Tensor = self.output((after.float() * found).to(x.dtype))
        return output


class GatedDeltaNet(Loadable):
    """See `GatedDeltaNetConfig`. One product computes queries, keys and values, the gate, rates and decays."""

    def __init__(self, config: GatedDeltaNetConfig, options: PartOptions) -> None:
        super().__init__()
        dtype, hidden_size = options.dtype, options.hidden_size
        config = config.sharded(options.shard.over).of_one_device()
        heads, inner = config.num_value_heads, config.num_value_heads * config.value_dim
        self._sizes = [config.channels, inner, heads, heads]
        parts = (Part.STATE_INPUT, Part.STATE_GATE, Part.UPDATE_RATE, Part.DECAY_INPUT)
        self.input = Linear(hidden_size, self._sizes, parts, options)
        self.decay_bias = self.declare("decay_bias", (heads,), torch.float32, Part.DECAY_BIAS)
        self.decay_log = self.declare("decay_log", (heads,), torch.float32, Part.DECAY_LOG)
        self.convolution = Convolution(config.channels, config.width, bias=False, dtype=dtype)
        self.norm = self.declare("norm", (config.value_dim,), dtype, Part.STATE_NORM)
        self.output = Linear(inner, (hidden_size,), (Part.STATE_OUTPUT,), options)
        self.config = config
        self._each = options.each

    @property
    def rounding(self) -> Rounding | None:
        return self.input.rounding

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        config, tokens = self.config, len(x)
        found, gate, rates, steps = torch.split(self.input(x), self._sizes, dim=-1)
        found = self._each(_silu, self.convolution(found, memory.states[0], _states(step)))
        all_keys = config.num_key_heads * config.key_dim
        queries, keys, values = torch.split(found, [all_keys, all_keys, self._sizes[1]], dim=-1)
        inputs = ScanInputs(
            _unit(queries.view(tokens, -1, config.key_dim)) * config.key_dim**-0.5,
            _unit(keys.view(tokens, -1, config.key_dim)),
            values.view(tokens, -1, config.value_dim),
            -self.decay_log.exp() * self._each(functional.softplus, steps.float() + self.decay_bias),
            self._each(torch.sigmoid, rates.float()),
        )
        outputs = _states(step).scan(inputs, memory.states[1])
        normed = divide_by_rms(outputs, config.norm.eps).to(x.dtype) * self.norm
        gated = normed.float() * self._each(functional.silu, gate.float()).view(outputs.shape)
        output: torch.Tensor = self.output(gated.view(tokens, -1).to(x.dtype))
        return output


class Mamba2(Loadable):
    """See `Mamba2Config`. The norm is over groups of the heads of all ranks."""

    def __init__(self, config: Mamba2Config, options: PartOptions) -> None:
        super().__init__()
        shard, dtype, hidden_size = options.shard, options.dtype, options.hidden_size
        config = config.sharded(shard.over).of_one_device()
        heads = (config.num_heads,)
        self._sizes = [config.inner, config.channels, config.num_heads]
        self.input = Linear(hidden_size, (sum(self._sizes),), (Part.STATE_INPUT,), options, bias=config.bias)
        self.decay_bias = self.declare("decay_bias", heads, torch.float32, Part.DECAY_BIAS)
        self.decay_log = self.declare("decay_log", heads, torch.float32, Part.DECAY_LOG)
        self.skip = self.declare("skip", heads, torch.float32, Part.SKIP)
        self.convolution = Convolution(config.channels, config.width, bias=config.conv_bias, dtype=dtype)
        self.norm = None
        if config.norm is not None:
            self.norm = self.declare("norm", (config.inner,), torch.float32, Part.STATE_NORM)
        bias = config.out_bias and shard.first
        self.output = Linear(config.inner, (hidden_size,), (Part.STATE_OUTPUT,), options, bias=bias)
        self.config = config
        self._parallel = options.parallel
        self._each = options.each

    @property
    def rounding(self) -> Rounding | None:
        return self.input.rounding

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        config, tokens = self.config, len(x)
        gate, found, steps = torch.split(self.input(x), self._sizes, dim=-1)
        found = self._each(_silu, self.convolution(found, memory.states[0], _states(step)))
        all_directions = config.num_groups * config.state_size
        values, written, read = torch.split(found, [config.inner, all_directions, all_directions], dim=-1)
        values = values.view(tokens, -1, config.head_dim)
        steps = self._each(functional.softplus, steps.float() + self.decay_bias).clamp(
            config.least_step, config.most_step
        )
        inputs = ScanInputs(
            read.view(tokens, -1, config.state_size),
            written.view(tokens, -1, config.state_size),
            values * steps[..., None],
            -self.decay_log.exp() * steps,
            None,
        )
        outputs = _states(step).scan(inputs, memory.states[1])
        outputs = outputs.addcmul(values, self.skip[:, None]).view(tokens, -1)
        gated = self._gated(outputs, self._each(functional.silu, gate.float()))
        output: torch.Tensor = self.output(gated.to(x.dtype))
        return output

    def _gated(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Applies the gate, and the norm if there is one, to outputs float32 `[T, inner]`."""
        config = self.config
        if config.norm is None or self.norm is None:
            return outputs * gate
        if not config.norm_before_gate:
            outputs = outputs * gate
        outputs = self._normed(outputs, config.norm.eps) * self.norm
        return outputs * gate if config.norm_before_gate else outputs

    def _normed(self, outputs: torch.Tensor, eps: float) -> torch.Tensor:
        """Divides each norm group of this rank's `[T, inner]` by its root mean square."""
        parts, ranks = self.config.norm_groups, self._parallel.size
        if parts % ranks == 0:
            return divide_by_rms(outputs.view(len(outputs), parts // ranks, -1), eps).view(outputs.shape)
        # Several ranks share a norm group: each adds its share of the group's mean square.
        sharers = ranks // parts
        means = outputs.new_zeros((len(outputs), parts))
        own = self._parallel.rank // sharers
        means[:, own] = outputs.square().mean(-1) / sharers
        return outputs * self._parallel.all_reduce(means)[:, own, None].add(eps).rsqrt()


def _states(step: LayerStep) -> StepStates:
    assert step.states is not None, "a step of a model that keeps states"
    return step.states


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Normalises float32 x over its last axis to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + _NORM_OF_KEYS).rsqrt()
