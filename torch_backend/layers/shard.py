"""Which part of a model a process holds."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_jax.checkpoint import ModelConfig
from sglang_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Whole heads, columns of the feed-forward layer, and rows of the vocabulary that belong to one rank.

    With more ranks than kv heads, neighbouring ranks hold the same kv head. `vocabulary_rows` is the same on every
    rank, ceil(vocab / size): what lies past the vocabulary's end is padding that no token and no logit uses.
    """

    first: bool
    heads: range
    kv_heads: range
    intermediate: range
    vocabulary: range
    vocabulary_rows: int

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> ModelShard:
        """The part of `rank`.

        **Raises:** `ConfigError` if heads or the feed-forward layer cannot be divided by `size`.
        """
        kv_heads = config.num_kv_heads
        if config.num_heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(
                f"{config.num_heads} heads and {kv_heads} kv heads cannot be spread over {size} processes: "
                "choose a tensor parallel size that divides the heads and divides, or is a multiple of, the kv heads"
            )
        if config.intermediate_size % size:
            raise ConfigError(
                f"a feed-forward layer of {config.intermediate_size} columns cannot be spread over {size} processes: "
                "choose a tensor parallel size that divides it"
            )
        rows = -(-config.vocab_size // size)
        first_row = min(rank * rows, config.vocab_size)
        return cls(
            first=rank == 0,
            heads=_part(config.num_heads, rank, size),
            kv_heads=_part(kv_heads, rank, size) if size <= kv_heads else _one(rank * kv_heads // size),
            intermediate=_part(config.intermediate_size, rank, size),
            vocabulary=range(first_row, min(first_row + rows, config.vocab_size)),
            vocabulary_rows=rows,
        )


def _part(length: int, rank: int, size: int) -> range:
    share = length // size
    return range(rank * share, (rank + 1) * share)


def _one(index: int) -> range:
    return range(index, index + 1)
