"""Rotary position embedding (Su et al. 2021) and the ways checkpoints stretch it to longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.model_config import RopeConfig, RopeKind

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """Angles of positions. Frequencies follow transformers' definitions for every kind.

    `dynamic` (NTK-aware scaling that grows with the sequence) needs a choice. transformers takes the length of the
    sequence so far and rotates the tokens of the current call by it, while keys cached by earlier calls keep
    the rotation they were given. Here each token at position p is always rotated as in a sequence of p + 1 tokens:
    that is transformers' own result when it decodes token by token, and for every token within the original
    context. It is the only choice under which a cached key does not depend on what came after it, so that chunking and
    prefix reuse change nothing. One call of transformers over a longer prompt differs: it rotates
    early keys by the prompt's length.
    """

    config: RopeConfig
    head_dim: int
    max_position: int

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines, float32 `[T, head_dim / 2]`, of positions int32 `[T]`."""
        frequencies: jax.Array | NDArray[np.float32] = self.frequencies().astype(np.float32)
        if self.config.kind is RopeKind.DYNAMIC:
            frequencies = frequencies * self._dynamic_slowdown(positions)
        angles = positions[:, None].astype(jnp.float32) * frequencies
        factor = self.attention_factor()
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    def frequencies(self) -> Frequencies:
        """Radians per position, `[head_dim / 2]`; those of the original context for `dynamic`."""
        rope = self.config
        base = rope.theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        match rope.kind:
            case RopeKind.DEFAULT | RopeKind.DYNAMIC:
                return base
            case RopeKind.LINEAR:
                return base / rope.factor
            case RopeKind.LLAMA3:
                return _llama3(base, rope, self._original_max())
            case RopeKind.YARN:
                return _yarn(base, rope, self._original_max())

    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by: YaRN's temperature, 1 for the other kinds."""
        rope = self.config
        if rope.kind is not RopeKind.YARN:
            return 1.0
        if rope.attention_factor is not None:
            return rope.attention_factor
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)

    def _original_max(self) -> int:
        return self.config.original_max_position or self.max_position

    def _dynamic_slowdown(self, positions: jax.Array) -> jax.Array:
        """What the frequencies of each position are multiplied by, `[T, head_dim / 2]`: 1 in the original context.

        The base grows by s ** (d / (d - 2)) with s = factor * length / original - (factor - 1); frequency i has the
        exponent -2i / d, hence s ** (-2i / (d - 2)).
        """
        factor, original = self.config.factor, self._original_max()
        lengths = jnp.maximum(positions + 1, original).astype(jnp.float32)
        stretch = factor * lengths / original - (factor - 1.0)
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / (self.head_dim - 2)
        return jnp.exp(-jnp.log(stretch)[:, None] * exponents)


def apply_rotary(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotates `x [T, ..., head_dim]`, whose pairs are (i, i + head_dim / 2), by tables `[T, head_dim / 2]`."""
    middle = (1,) * (x.ndim - 2)
    cosines = cosines.reshape(cosines.shape[0], *middle, -1)
    sines = sines.reshape(sines.shape[0], *middle, -1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return rotated.astype(x.dtype)


def _llama3(base: Frequencies, rope: RopeConfig, original_max: int) -> Frequencies:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / base
    turns = original_max / wavelengths
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return kept * base + (1 - kept) * base / rope.factor


def _yarn(base: Frequencies, rope: RopeConfig, original_max: int) -> Frequencies:
    """YaRN (Peng et al. 2023): pairs that turn often are kept, slow ones stretched by the factor, a ramp between."""
    head_dim = 2 * len(base)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original_max / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(len(base)) - low) / (high - low), 0.0, 1.0)
    return stretched * base / rope.factor + (1 - stretched) * base


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
