"""EXAONE 4 (2025): norms after each block and of each query and key head. In models with windows, layers with full
attention have no positions."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import POST_NORM_NAMES
from sglang_jax.errors import CheckpointError

_NAME = "exaone4"
_DEFAULTS = Defaults(num_kv_heads=32, max_position=2048, eps=1e-5, bos_token_id=0, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    window = fields.count_or("sliding_window", 4096)
    norms = SublayerNorms(post=common.norm())
    attention = replace(common.attention(), qk_norm=QKNorm(norm=common.norm()))
    sees_all = attention if window is None else replace(attention, rope=None)
    sliding = replace(attention, window=None if window is None else common.effective_window(window))
    layers = [
        LayerConfig(
            mixer=sliding if slides else sees_all,
            feed_forward=common.feed_forward(),
            mixer_norms=norms,
            feed_forward_norms=norms,
        )
        for slides in common.sliding_layers(every=None if window is None else _every(fields))
    ]
    return common.model(_NAME, layers)


def _every(fields: JsonFields) -> int:
    """Every how many layers one has full attention: a number, or the length of a pattern such as LLLG."""
    pattern = fields.value("sliding_window_pattern")
    match pattern:
        case None:
            return 4
        case int() if pattern > 0:
            return pattern
        case str() if pattern and pattern == "L" * (len(pattern) - 1) + "G":
            return len(pattern)
    raise CheckpointError(
        f"{fields.file}: sliding_window_pattern is {pattern!r:.80}, it must be a number of layers, or L's and one G"
    )


FAMILY = Family(
    name=_NAME,
    class_name="Exaone4ForCausalLM",
    configure=configure,
    names=POST_NORM_NAMES,
    gguf=GgufForm(name="exaone4", fields={"sliding_window": "attention.sliding_window"}),
)
