"""Names of the axes of weights and caches, by which both backends shard a model over devices."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """The meaning of an axis of a weight or a cache."""

    TOKENS = "tokens"
    HIDDEN = "hidden"
    VOCABULARY = "vocabulary"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    HEAD_PART = "head_part"
    HEAD_DIM = "head_dim"
    GATE_OR_UP = "gate_or_up"
    INTERMEDIATE = "intermediate"
    LATENT = "latent"
    """The latent vectors from which keys, values and queries of latent attention are projected."""
    EXPERTS = "experts"
    PAGES = "pages"
    PAGE_OFFSET = "page_offset"
    KEY_OR_VALUE = "key_or_value"
    CHANNELS = "channels"
    """Channels of a recurrent layer: those of its convolution, or those of all its heads."""
    STATE_HEADS = "state_heads"
    TAPS = "taps"
    """Taps of a convolution."""
    IN_BLOCKS = "in_blocks"
    """Blocks along the inputs of a block-quantised matrix."""
    SHARDED_IN_BLOCKS = "sharded_in_blocks"
    """The same, or inputs, of a matrix whose inputs are divided among devices."""
    IN_BLOCK = "in_block"
    """Bytes of a block."""
    IN_TILES = "in_tiles"
    """Tiles along the inputs of a block-quantised matrix, as a kernel reads it."""
    ONE = "one"
    """An axis of length 1."""
