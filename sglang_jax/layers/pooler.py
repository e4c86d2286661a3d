"""What a model gives for a text: a vector, or scores of labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from numpy.typing import NDArray

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.pooling import Pooler
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.layers.parameter import matmul, parameter
from sglang_jax.runner.plan import MAX_SUMMED, SUM_STEP, Float64

_FLOAT32 = jnp.dtype(jnp.float32)

LIMBS = 4
_LIMB_BITS = 8


class PooledHead(nnx.Module):
    """Vectors, or scores by a matrix `[hidden, labels]` in float32, perhaps after a dense layer; on every device."""

    def __init__(self, pooler: Pooler, hidden_size: int) -> None:
        hidden, labels = (Axis.HIDDEN, hidden_size), (Axis.LABELS, len(pooler.labels))
        has_labels = bool(pooler.labels)
        has_dense, has_bias = has_labels and pooler.dense, has_labels and pooler.bias
        pooled = (Axis.POOLED, hidden_size) if has_dense else hidden
        bias = ParameterKind.BIAS
        self.dense = parameter([hidden, pooled], _FLOAT32, Part.POOLER) if has_dense else None
        self.dense_bias = parameter([pooled], _FLOAT32, Part.POOLER, kind=bias) if has_dense else None
        self.labels = parameter([pooled, labels], _FLOAT32, Part.LABELS) if has_labels else None
        self.bias = parameter([labels], _FLOAT32, Part.LABELS, kind=bias) if has_bias else None

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """`[m, hidden]` → float32 `[m, width]`."""
        hidden = hidden.astype(jnp.float32)
        if self.labels is None:
            return hidden
        if self.dense is not None and self.dense_bias is not None:
            hidden = jnp.tanh(matmul(hidden, self.dense[...]) + self.dense_bias[...])
        found = matmul(hidden, self.labels[...])
        return found if self.bias is None else found + self.bias[...]


def sums_of_sequences(hidden: jax.Array, sequences: jax.Array, count: int) -> jax.Array:
    """The sums of `hidden` `[T, hidden]` over the tokens of each of `count` sequences, `sequences` int32 `[T]` (`count`
    for padding), as `LIMBS` numbers each, float32 `[count, LIMBS, hidden]`: see `whole_sums`.

    Each number is rounded to a multiple of `SUM_STEP`, an integer of 32 bits, and cut into bytes. Products of bytes by
    0 or 1 are exact in any precision, and so are their sums below 2**24: 65,536 tokens, in any order.
    """
    hidden = hidden.astype(jnp.float32)
    fits = jnp.abs(hidden) < MAX_SUMMED
    steps = jnp.where(fits, jnp.round(hidden / SUM_STEP), 0.0).astype(jnp.int32)
    limbs = [lax.bitwise_and(lax.shift_right_logical(steps, _LIMB_BITS * place), 0xFF) for place in range(LIMBS - 1)]
    limbs.append(lax.shift_right_arithmetic(steps, _LIMB_BITS * (LIMBS - 1)))  # with the sign
    own = (sequences == jnp.arange(count, dtype=jnp.int32)[:, None]).astype(jnp.bfloat16)
    cut = jnp.stack([limb.astype(jnp.bfloat16) for limb in limbs], axis=1)
    sums = jnp.einsum("st,tlh->slh", own, cut, preferred_element_type=jnp.float32)
    bad = jnp.einsum("st,th->sh", own, (~fits).astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return jnp.where(bad[:, None] > 0, jnp.nan, sums)


def whole_sums(limbs: NDArray[np.float32]) -> Float64:
    """The exact sums, float64 `[..., hidden]`, of which `limbs` `[..., LIMBS, hidden]` are the bytes."""
    weights = SUM_STEP * 2.0 ** (_LIMB_BITS * np.arange(LIMBS))
    return (limbs.astype(np.float64) * weights[:, None]).sum(axis=-2)
