"""Latent attention over paged latent vectors: queries are multiplied by what makes keys, and not the keys made.

A score is `(W_k c) . q`, where c is the latent vector of a token, W_k a head's key projection and q its query: it is
`c . (W_k^T q)`. So attention sees one kv head for all query heads, whose keys are the latent vectors with the rotated
keys behind them, and whose values are the latent vectors, which the heads' value projections turn into values
afterwards. Queries are rounded to the type of activations once more than in the expanded form.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.kernels.ragged_paged_attention import AttentionOptions
from sglang_jax.layers.attention import write_and_attend
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import Norm
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions
from sglang_jax.layers.rotary import apply_rotary


class LatentAttention(nnx.Module):
    """Projections to latent vectors, cache write, attention, values, output projection."""

    def __init__(self, config: LatentAttentionConfig, options: PartOptions) -> None:
        dtype, self.implementation = options.dtype, options.implementation
        self.config = config
        inputs = hidden = [(Axis.HIDDEN, options.hidden_size)]
        latent, heads = [(Axis.LATENT, config.latent)], (Axis.HEADS, config.num_heads)
        keys, rotated, values = (
            [heads, (Axis.HEAD_DIM, size)] for size in (config.key_dim, config.rotary_dim, config.value_dim)
        )
        self.query_latent = self.query_latent_norm = None
        if config.query_latent is not None:
            inputs = [(Axis.LATENT, config.query_latent)]
            self.query_latent = Linear(hidden, inputs, (Part.QUERY_LATENT,), options, bias=config.bias)
            self.query_latent_norm = Norm(inputs, config.norm, dtype, Part.QUERY_LATENT_NORM)
        query = Part.QUERY if config.query_latent is None else Part.QUERY_UP
        self.query = Linear(inputs, keys, (query,), options)
        self.query_rotated = Linear(inputs, rotated, (Part.QUERY_ROTATED,), options)
        self.latent = Linear(hidden, latent, (Part.LATENT,), options, bias=config.bias)
        self.latent_norm = Norm(latent, config.norm, dtype, Part.LATENT_NORM)
        self.key_rotated = Linear(hidden, rotated[1:], (Part.KEY_ROTATED,), options, bias=config.bias)
        self.key_up = parameter([*keys, *latent], dtype, Part.KEY_UP)
        self.value_up = parameter([*values, *latent], dtype, Part.VALUE_UP)
        self.output = Linear(values, hidden, (Part.OUTPUT,), options, bias=config.out_bias)

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """See `LayerPart`. The pages come back with the step's latent vectors."""
        assert memory.pages is not None, "a layer with attention"
        of_queries = x
        if self.query_latent is not None and self.query_latent_norm is not None:
            of_queries = self.query_latent_norm(self.query_latent(x))
        absorbed = _by_head("thk,hkl->thl", self.query(of_queries), self.key_up[...])
        queries, keys = self.query_rotated(of_queries), self.key_rotated(x)[:, None]
        if step.rotary is not None:
            queries, keys = apply_rotary(queries, *step.rotary), apply_rotary(keys, *step.rotary)
        latent = self.latent_norm(self.latent(x))[:, None]
        attended, kv_pages = write_and_attend(
            self.implementation,
            jnp.concatenate([absorbed, queries], axis=-1),
            jnp.concatenate([latent, keys], axis=-1),
            None,
            memory.pages,
            step.batch,
            scale=self.config.scale,
            options=AttentionOptions(),
        )
        values = _by_head("thl,hvl->thv", attended[..., : self.config.latent], self.value_up[...])
        return self.output(values), replace(memory, pages=kv_pages)


def _by_head(form: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product for each head, in the type of `x`; sums are float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jnp.einsum(form, x.astype(kernel.dtype), kernel, precision=precision, preferred_element_type=jnp.float32)
    return product.astype(x.dtype)
