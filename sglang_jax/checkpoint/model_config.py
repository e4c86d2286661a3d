"""One description of a model for both backends, from whichever file it came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RopeKind(StrEnum):
    """How rotary frequencies are scaled. Names are those of `rope_scaling.rope_type` in HF configs."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its long-context variants.

    Fields that a kind does not use keep their default. `original_max_position` is the context length before scaling.
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


class Architecture(StrEnum):
    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer.

    `head_dim` need not be `hidden_size // num_heads`. `eos_token_ids` joins what config.json and
    generation_config.json say. `max_position` is the longest context that the checkpoint declares.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
