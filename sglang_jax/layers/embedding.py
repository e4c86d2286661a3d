"""Token embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.layers.parameter import parameter


class Embedding(nnx.Module):
    """Rows of a table `[vocab, hidden]`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.table = parameter([(Axis.VOCABULARY, vocab_size), (Axis.HIDDEN, hidden_size)], dtype, Part.EMBEDDING)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[T]`, all within the vocabulary → `[T, hidden]`."""
        return self.table[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)
