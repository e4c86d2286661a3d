"""Token embeddings and the matrix that turns hidden states into logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.layers.parameter import matmul, matmul_outputs_first, parameter, put_outputs_first
from sglang_jax.layers.sharding import Axis


class Embedding(nnx.Module):
    """Rows of a table `[vocab, hidden]`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.table = parameter([(Axis.VOCABULARY, vocab_size), (Axis.HIDDEN, hidden_size)], dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[T]`, all within the vocabulary → `[T, hidden]`."""
        return self.table[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)


class Head(nnx.Module):
    """Logits by a matrix of its own: `[hidden, vocab]`, or `[vocab, hidden]` once changed to it."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> None:
        self.kernel = parameter([(Axis.HIDDEN, hidden_size), (Axis.VOCABULARY, vocab_size)], dtype)
        self.outputs_first = False

    def put_outputs_first(self) -> None:
        """Changes the matrix, once loaded, to `[vocab, hidden]`."""
        put_outputs_first(self.kernel, 1)
        self.outputs_first = True

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """`[T, hidden]` → float32 `[T, vocab]`."""
        return (matmul_outputs_first if self.outputs_first else matmul)(hidden, self.kernel[...])
