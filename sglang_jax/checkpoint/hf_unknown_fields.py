"""Fields of a config.json that its family did not ask for: refused if they change what the model computes."""

from __future__ import annotations

import logging

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.errors import CheckpointError

logger = logging.getLogger(__name__)

_CHANGES_OUTPUTS = frozenset(
    {
        "alibi",
        "attention_multiplier",
        "attn_logit_softcapping",
        "embedding_multiplier",
        "final_logit_softcapping",
        "kv_lora_rank",
        "logit_scale",
        "logits_scaling",
        "no_rope_layers",
        "num_experts",
        "num_local_experts",
        "num_kv_shared_layers",
        "n_routed_experts",
        "partial_rotary_factor",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "rope_local_base_freq",
        "use_bidirectional_attention",
        "use_qk_norm",
    }
)
"""What some family computes by, so that it means something in any."""

_HARMLESS = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "head_dim",
        "hidden_act",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "layer_types",
        "max_window_layers",
        "mlp_bias",
        "attention_bias",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "rope_interleaved",
        "rope_scaling",
        "rope_theta",
        "sep_token_id",
        "sliding_window",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
        "use_sliding_window",
    }
)
_HARMLESS_ENDINGS = ("_dropout", "_pdrop", "_initializer_range", "_init_std")


def check_unread(fields: JsonFields) -> None:
    """Looks at what nobody asked for; says once in the log which fields are not known at all.

    **Raises:** `CheckpointError` naming the field and its value.
    """
    unread = {
        name: value for name, value in fields.values.items() if name not in fields.asked and not _says_nothing(value)
    }
    for name in sorted(_CHANGES_OUTPUTS & unread.keys()):
        raise CheckpointError(
            f"{fields.file}: {name} is {unread[name]!r:.80}, which {fields.value('model_type') or 'this architecture'} "
            "does not have here: its outputs would be wrong"
        )
    unknown = [name for name in unread if not (name in _HARMLESS or name.startswith("_"))]
    unknown = [name for name in unknown if not name.endswith(_HARMLESS_ENDINGS)]
    if unknown:
        logger.warning("%s: fields that are not understood, and ignored: %s", fields.file, ", ".join(sorted(unknown)))


def _says_nothing(value: object) -> bool:
    """A value by which a field changes nothing: false, empty, a multiplier of 1."""
    if isinstance(value, bool):
        return not value
    return value in (None, 0, 1, [], {}, "")
