"""Checks fields of config.json that no code read: those that change outputs are refused. Also explains why an
architecture is not supported, by the fields that no family reads."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.feed_forward import Activation, UngatedActivation
from sglang_jax.architectures.registry import known_families, supported_classes
from sglang_jax.errors import CheckpointError, cut

logger = logging.getLogger(__name__)

_CHANGES_OUTPUTS = frozenset(
    {
        "alibi",
        "attention_k_eq_v",
        "attention_multiplier",
        "attn_logit_softcapping",
        "block_configs",
        "clip_qkv",
        "embedding_multiplier",
        "final_logit_softcapping",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "index_topk",
        "kv_lora_rank",
        "layer_rope_theta",
        "logit_scale",
        "logits_scaling",
        "no_rope_layers",
        "num_attention_heads_per_layer",
        "num_experts",
        "num_local_experts",
        "num_kv_shared_layers",
        "n_routed_experts",
        "parallel_attn",
        "partial_rotary_factor",
        "per_layer_config",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "rope_local_base_freq",
        "use_bidirectional_attention",
        "use_qk_norm",
    }
)
"""Fields that change the outputs of some family, and so possibly of any."""

_HARMLESS = frozenset(
    {
        "architectures",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "ep_size",
        "head_dim",
        "hidden_act",
        "id2label",
        "initializer_factor",
        "init_method",
        "initializer_range",
        "label2id",
        "layer_types",
        "mamba_chunk_size",
        "mamba_ssm_dtype",
        "max_window_layers",
        "mlp_bias",
        "attention_bias",
        "model_type",
        "moe_capacity",
        "moe_gate",
        "moe_use_aux_free",
        "mtp_hybrid_override_pattern",
        "multi_token_pred_lambda",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "num_logits_to_keep",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",
        "quantization_config",
        "rescale_prenorm_residual",
        "residual_in_fp32",
        "return_dict",
        "rope_interleaved",
        "rope_scaling",
        "rope_theta",
        "router_aux_loss_coef",
        "sep_token_id",
        "seq_aux",
        "sliding_window",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
        "use_sliding_window",
    }
)
_HARMLESS_ENDINGS = (
    "dropout",
    "dropout_prob",
    "dropout_rate",
    "_pdrop",
    "_initializer_range",
    "_init_std",
    "_token_id",
    "_token_index",
)


def check_unread(fields: JsonFields) -> None:
    """Checks the fields that were not read: raises `CheckpointError` for one that changes outputs, and logs unknown
    ones."""
    unread = {
        name: value
        for name, value in fields.values.items()
        if name not in fields.accessed and not _has_no_effect(value)
    }
    for name in sorted(_CHANGES_OUTPUTS & unread.keys()):
        raise CheckpointError(
            f"{fields.file}: {name} is {unread[name]!r:.80}, which {fields.value('model_type') or 'this architecture'} "
            "does not support here: outputs would be wrong"
        )
    unknown = [name for name in unread if not _is_harmless(name)]
    if unknown:
        logger.warning("%s: ignoring unknown fields: %s", fields.file, cut(", ".join(sorted(unknown))))


_MEANINGS = {
    "is_encoder_decoder": "an encoder in addition to the decoder",
    "num_mel_bins": "audio",
    "audio_config": "audio",
    "vision_config": "images",
    "index_topk": "sparse attention",
    "norm_epsilon": "an unsupported kind of norm",
    "layer_norm_epsilon": "an unsupported kind of norm",
    "num_attention_heads_per_layer": "a number of heads for each layer",
    "block_configs": "a configuration for each layer",
}
"""Meanings of some fields, for error texts."""

_ACTIVATIONS = {
    "hidden_act": frozenset(Activation) | frozenset(UngatedActivation),
    "hidden_activation": frozenset(Activation),
    "mlp_hidden_act": frozenset({"relu2"}),
}
"""Fields that name an activation function, and the names that some family supports."""

_MAX_LISTED = 8

_NUMBERS_OF_EXPERTS = (0, 8)
"""Some families require 0, others more."""

_COMMON_VALUES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "hidden_size_per_layer_input": 0,
    "num_heads": 8,
    "n_groups": 1,
    "mamba_n_heads": 8,
    "layers_block_type": ["full_attention"] * 4,
}


def unknown_family(fields: JsonFields) -> CheckpointError:
    """The error for an unsupported architecture: its name, the fields that no family reads, and what is supported."""
    match fields.value("architectures"):
        case None:
            name = fields.string("model_type") or "(neither architectures nor model_type given)"
        case [str(name)]:
            pass
        case other:
            name = f"{other!r:.80}"
    reasons = [*_relatives(fields), *_unread_by_all_families(fields)]
    if not reasons and fields.value("architectures") is not None:
        reasons = ["supported families have the same fields, so this file does not show the difference"]
    because = f": {'; '.join(reasons)}" if reasons else ""
    return CheckpointError(
        f"{fields.file}: architecture {cut(name)} is not supported{because}; supported: {supported_classes()}; "
        "the Torch backend may run others, with --model-impl transformers"
    )


def _relatives(fields: JsonFields) -> list[str]:
    """Supported families with the same `model_type`, or with that of its `text_config`."""
    by_name = {family.name: family.class_name for family in known_families()}
    found = []
    if (relative := by_name.get(str(fields.value("model_type")))) is not None:
        found.append(f"{relative}, with the same model_type, is supported")
    text = fields.value("text_config")
    if isinstance(text, dict) and (relative := by_name.get(str(text.get("model_type")))) is not None:
        found.append(f"its text_config is that of a {relative}, which is supported without the rest")
    return found


def _unread_by_all_families(fields: JsonFields) -> list[str]:
    """Describes the fields that no family reads, including those of `text_config`; fields in `_MEANINGS` come first."""
    text = fields.value("text_config")
    values = fields.values | text if isinstance(text, dict) else fields.values
    unknown = [
        name
        for name, value in values.items()
        if _is_unknown_activation(name, value)
        or (
            not (_has_no_effect(value) or _is_harmless(name) or name == "text_config")
            and (name in _MEANINGS or name not in _known_fields())
        )
    ]
    unknown.sort(key=lambda name: (name not in _MEANINGS, name))
    if not unknown:
        return []
    listed = [
        f"{cut(name)} {_abbreviate(values[name])}" + (f" ({_MEANINGS[name]})" if name in _MEANINGS else "")
        for name in unknown[:_MAX_LISTED]
    ]
    more = f" and {len(unknown) - _MAX_LISTED} more" if len(unknown) > _MAX_LISTED else ""
    return [f"no supported architecture has {', '.join(listed)}{more}"]


def _is_unknown_activation(name: str, value: object) -> bool:
    return name in _ACTIVATIONS and isinstance(value, str) and value not in _ACTIVATIONS[name]


def _abbreviate(value: object) -> str:
    match value:
        case dict():
            return "{...}"
        case list():
            return "[...]"
    return f"{value!r:.40}"


@cache
def _known_fields() -> frozenset[str]:
    found: set[str] = set()
    for family in known_families():
        for experts in _NUMBERS_OF_EXPERTS:
            fields = JsonFields({**_COMMON_VALUES, "num_local_experts": experts}, Path("config.json"))
            with suppress(CheckpointError):
                family.configure(fields)
            found |= fields.accessed
    return frozenset(found)


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith("_") or name.endswith(_HARMLESS_ENDINGS)


def _has_no_effect(value: object) -> bool:
    """Whether a value has no effect: false, empty, or a multiplier of 1."""
    if isinstance(value, bool):
        return not value
    return value in (None, 0, 1, [], {}, "")
