"""Frequencies of rotary position embedding (Su et al. 2021), with the scaling for longer contexts that configs name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind

Frequencies = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DynamicStretch:
    """Multipliers of a position's frequencies under `dynamic` scaling (NTK-aware, growing with the sequence).

    transformers rotates all tokens of a call by the current length of the sequence, while keys cached by earlier calls
    keep their rotation. Here a token at position p is always rotated as in a sequence of p + 1 tokens, so that a cached
    key does not depend on later tokens, and chunking and prefix reuse change nothing. transformers gives the same
    result when it decodes token by token, and within the original context; one call over a longer prompt differs,
    because it rotates early keys by the prompt's length.

    With n tokens more than `original_max_position`, or n = 0, the base grows by s ** (d / (d - 2)) where
    s = 1 + `growth` * n. Frequency i has the exponent -2i / d, hence the multiplier s ** `exponents[i]`.

    - `exponents`: `[head_dim / 2]`, -2i / (d - 2).
    """

    original_max_position: int
    growth: float
    exponents: Frequencies


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Frequencies of a model's positions, as transformers defines them for every kind.

    A token at position p is rotated by the angles p * `frequencies()`, multiplied by its `dynamic_stretch()` where
    there is one; cosines and sines are multiplied by `attention_factor()`.
    """

    config: RopeConfig
    head_dim: int
    max_position: int

    def frequencies(self) -> Frequencies:
        """Radians per position, `[head_dim / 2]`; for `dynamic`, those within the original context. Pairs that do not
        rotate have 0; if only a part of a head rotates, they are the last."""
        rope = self.config
        rotated = rope.rotated_numbers(self.head_dim)
        base = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
        turning = self._of_rotated(base / np.array(rope.divisors) if rope.divisors else base)
        return np.concatenate((turning, np.zeros((self.head_dim - rotated) // 2)))

    def _of_rotated(self, base: Frequencies) -> Frequencies:
        rope = self.config
        match rope.kind:
            case RopeKind.DEFAULT | RopeKind.DYNAMIC:
                return base
            case RopeKind.LINEAR:
                return base / rope.factor
            case RopeKind.PROPORTIONAL:
                turning = int(rope.rotated_pairs * self.head_dim // 2)
                return np.where(np.arange(len(base)) < turning, base / rope.factor, 0.0)
            case RopeKind.LLAMA3:
                return _llama3(base, rope, self._original_max())
            case RopeKind.YARN:
                return _yarn(base, rope, self._original_max())

    def attention_factor(self) -> float:
        """The factor of cosines and sines: YaRN's temperature, or 1 for the other kinds."""
        rope = self.config
        if rope.kind is not RopeKind.YARN:
            return 1.0
        if rope.attention_factor is not None:
            return rope.attention_factor
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        return _yarn_scale(rope.factor, 1.0)

    def dynamic_stretch(self) -> DynamicStretch | None:
        """The multipliers for `dynamic`; None for other kinds, whose frequencies do not depend on the position."""
        if self.config.kind is not RopeKind.DYNAMIC:
            return None
        original = self._original_max()
        exponents = -np.arange(0, self.head_dim, 2, dtype=np.float64) / (self.head_dim - 2)
        return DynamicStretch(original, growth=self.config.factor / original, exponents=exponents)

    def _original_max(self) -> int:
        return self.config.original_max_position or self.max_position


def _llama3(base: Frequencies, rope: RopeConfig, original_max: int) -> Frequencies:
    """Llama 3.1: stretches long wavelengths by the factor, keeps short ones, and blends those between."""
    wavelengths = 2 * math.pi / base
    turns = original_max / wavelengths
    kept: Frequencies = np.clip(
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0
    )
    return kept * base + (1 - kept) * base / rope.factor


def _yarn(base: Frequencies, rope: RopeConfig, original_max: int) -> Frequencies:
    """YaRN (Peng et al. 2023): keeps fast pairs, stretches slow ones by the factor, with a ramp between."""
    head_dim = 2 * len(base)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original_max / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched: Frequencies = np.clip((np.arange(len(base)) - low) / (high - low), 0.0, 1.0)
    return stretched * base / rope.factor + (1 - stretched) * base


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
