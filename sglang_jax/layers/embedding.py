"""Token embeddings and the matrix that turns hidden states into logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.weight_format import InputsFirst, WeightFormat


class Embedding(nnx.Module):
    """Rows of a table `[vocab, hidden]`."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.table = parameter([(Axis.VOCABULARY, vocab_size), (Axis.HIDDEN, hidden_size)], dtype, Part.EMBEDDING)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[T]`, all within the vocabulary → `[T, hidden]`."""
        return self.table[...].at[tokens].get(mode="promise_in_bounds", wrap_negative_indices=False)


class Head(nnx.Module):
    """Logits by a matrix of its own, loaded as `[hidden, vocab]`."""

    def __init__(self, hidden_size: int, vocab_size: int, dtype: jnp.dtype) -> None:
        self.kernel = parameter([(Axis.HIDDEN, hidden_size), (Axis.VOCABULARY, vocab_size)], dtype, Part.HEAD)
        self.format: WeightFormat = InputsFirst()

    def arrange(self, wanted: WeightFormat) -> None:
        """Changes the matrix, once loaded, to another format."""
        wanted.arrange(self.kernel, 1)
        self.format = wanted

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """`[T, hidden]` → float32 `[T, vocab]`."""
        return self.format.multiply(hidden, self.kernel[...])
