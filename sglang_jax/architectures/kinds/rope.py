"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RopeKind(StrEnum):
    """The scaling of rotary frequencies, named as in `rope_scaling.rope_type` of HF configs."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    PROPORTIONAL = "proportional"
    """Only the first pairs of a head rotate, with the frequencies of a whole head (Gemma 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its long-context variants.

    Fields that a kind does not use keep their default.

    - `original_max_position`: the context length before scaling.
    - `rotated_pairs`: the fraction of pairs that rotate (`PROPORTIONAL`).
    - `partial_rotary_factor`: the fraction of a head, from its start, that rotates like a head of that size; the rest
      has no positions.
    - `divisors`: divide the frequency of each pair before scaling; empty if all are 1.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    rotated_pairs: float = 1.0
    partial_rotary_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def longest_context(self, max_position: int) -> int:
        """Tokens of the longest context with this scaling, for a model that declares `max_position`. YaRN, `dynamic`
        and `linear` scaling stretch the original context by their factor; with YaRN, the model was tuned to it."""
        if self.kind not in (RopeKind.YARN, RopeKind.DYNAMIC, RopeKind.LINEAR):
            return max_position
        return max(max_position, int((self.original_max_position or max_position) * self.factor))

    def rotated_numbers(self, head_dim: int) -> int:
        """Numbers of a head that rotate."""
        return int(head_dim * self.partial_rotary_factor)
