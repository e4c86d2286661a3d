"""Rows of activations rounded to 8 bits, for products with 8-bit matrices in steps of many rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sglang_jax.checkpoint.encoding import Encoding

MinRoundedRows = Callable[[Encoding], int | None]
"""Minimum rows of a step whose activations are rounded in products with matrices of an encoding; None if none are."""

_LEAST = 1e-30
"""Instead of the largest magnitude of a row of zeros. Its reciprocal is still a float32."""


def never_rounded(encoding: Encoding) -> int | None:
    """A `MinRoundedRows`: activations stay as they are."""
    return None


def round_rows(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """`x [T, *in]` → values `[T, *in]` in `dtype`, int8 or float8_e4m3fn, and float32 scales `[T]`: each row's largest
    magnitude over that of the type. A row with a number that is not finite has such a scale."""
    of_row, integers = tuple(range(1, x.ndim)), dtype == jnp.int8
    most = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
    largest = jnp.maximum(jnp.abs(x).max(of_row, keepdims=True).astype(jnp.float32), _LEAST)
    values = x.astype(jnp.float32) * (most / largest)
    return (jnp.round(values) if integers else values).astype(dtype), largest.reshape(-1) / most
