"""Feed-forward layers, with and without a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.feed_forward import (
    Activation,
    FeedForwardConfig,
    UngatedActivation,
    UngatedConfig,
)
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    Activation.SILU: jax.nn.silu,
    Activation.GELU_TANH: partial(jax.nn.gelu, approximate=True),
}

_UNGATED: dict[UngatedActivation, Callable[[jax.Array], jax.Array]] = {
    UngatedActivation.SQUARED_RELU: lambda x: jnp.square(jax.nn.relu(x)),
    UngatedActivation.RELU: jax.nn.relu,
    UngatedActivation.GELU: partial(jax.nn.gelu, approximate=False),
    UngatedActivation.GELU_TANH: partial(jax.nn.gelu, approximate=True),
}


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020), gate and up in one product `[hidden, 2, intermediate]`."""

    def __init__(self, config: FeedForwardConfig, options: PartOptions) -> None:
        hidden = [(Axis.HIDDEN, options.hidden_size)]
        inner = [(Axis.INTERMEDIATE, config.size)]
        both = [(Axis.GATE_OR_UP, 2), *inner]
        self.gate_up = Linear(hidden, both, (Part.GATE, Part.UP), options, bias=config.bias)
        self.down = Linear(inner, hidden, (Part.DOWN,), options, bias=config.bias)
        self.activation, self.tile_rows = config.activation, options.implementation.tile_rows

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        return in_tiles(self._outputs, x, self.tile_rows), memory

    def _outputs(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up(x)
        gate, up = gate_up[:, 0], gate_up[:, 1]
        activated = ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype)
        return self.down(activated * up, of_outputs=True)


class Ungated(nnx.Module):
    """See `UngatedConfig`."""

    def __init__(self, config: UngatedConfig, options: PartOptions) -> None:
        hidden, inner = [(Axis.HIDDEN, options.hidden_size)], [(Axis.INTERMEDIATE, config.size)]
        self.up = Linear(hidden, inner, (Part.UP,), options, bias=config.bias)
        self.down = Linear(inner, hidden, (Part.DOWN,), options, bias=config.bias)
        self.activation, self.tile_rows = config.activation, options.implementation.tile_rows

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        return in_tiles(self._outputs, x, self.tile_rows), memory

    def _outputs(self, x: jax.Array) -> jax.Array:
        up = self.up(x)
        if self.activation is not UngatedActivation.SQUARED_RELU:
            up = up.astype(jnp.float32)
        return self.down(_UNGATED[self.activation](up).astype(x.dtype), of_outputs=True)
