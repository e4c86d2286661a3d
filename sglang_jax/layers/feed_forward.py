"""The gated feed-forward layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.sharding import Axis


class FeedForward(nnx.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`, gate and up in one product `[hidden, 2, intermediate]`."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        hidden = [(Axis.HIDDEN, config.hidden_size)]
        inner = [(Axis.INTERMEDIATE, config.intermediate_size)]
        self.gate_up = Linear(hidden, [(Axis.GATE_OR_UP, 2), *inner], bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[T, hidden]` → `[T, hidden]`."""
        gate_up = self.gate_up(x)
        gate, up = gate_up[:, 0], gate_up[:, 1]
        return self.down(jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up, of_outputs=True)
