"""What the axes of weights and caches run over; both backends say by it how a model is spread over devices."""

from __future__ import annotations

from enum import StrEnum


class Axis(StrEnum):
    """What an axis of a weight or a cache runs over."""

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
    """Of the short vectors that keys, values and queries of latent attention are projected from."""
    EXPERTS = "experts"
    PAGES = "pages"
    PAGE_OFFSET = "page_offset"
    KEY_OR_VALUE = "key_or_value"
    CHANNELS = "channels"
    """Of what a recurrent layer reads: those of its convolution, or of all its heads."""
    STATE_HEADS = "state_heads"
    TAPS = "taps"
    """How far back a convolution reaches."""
    IN_BLOCKS = "in_blocks"
    """Blocks along the inputs of a matrix."""
    IN_BLOCK = "in_block"
    """What a block holds: bytes of its values."""
    IN_TILES = "in_tiles"
    """Of a matrix in blocks as a kernel reads it: tiles of it, blocks of a tile, what these hold."""
    ONE = "one"
    """Of what is a single number."""
