"""Nemotron-H (NVIDIA, 2025): each layer is Mamba-2, attention without positions, a feed-forward part, or a mixture of
experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sglang_jax.architectures.deepseek_experts_form import ExpertDefaults, read_balanced_sizes
from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import UngatedConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.mamba_form import check_mamba, is_set, mamba_names
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import EXPERT, LABELS_NAME, Part, Stacked, TensorName, with_model_prefix
from sglang_jax.errors import CheckpointError, quote

_NAME = "nemotron_h"
_LAYERS = "backbone.layers"
_EXPERT_DEFAULTS = ExpertDefaults(num_experts=8, chosen=2, size=7688, shared=1)
_MAMBA, _ATTENTION, _FEED_FORWARD, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_SPELLINGS = {
    **dict.fromkeys((_MAMBA, "mamba", "M"), _MAMBA),
    **dict.fromkeys((_ATTENTION, "attention", "*"), _ATTENTION),
    **dict.fromkeys((_FEED_FORWARD, "-"), _FEED_FORWARD),
    **dict.fromkeys((_EXPERTS, "E"), _EXPERTS),
}
_UNUSED = (
    "expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "norm_eps",
    "num_nextn_predict_layers",
    "time_step_limit",
    "use_mamba_kernels",
)
"""Fields that all files have and that do not matter here: of training heads, of kernels, and others that transformers'
class ignores."""

_OF_EXPERTS = (
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
)
"""Fields of experts, which all files have."""


def configure(fields: JsonFields) -> ModelConfig:
    kinds = _kinds(fields)
    for name in (*_UNUSED, *(() if _EXPERTS in kinds else _OF_EXPERTS)):
        fields.value(name)
    eps = fields.number("layer_norm_epsilon")
    norm = NormConfig(eps=1e-5 if eps is None else eps)
    norms, none = SublayerNorms(pre=norm), SublayerNorms()
    mamba, attention, feed_forward = _mamba(fields, norm), _attention(fields), _feed_forward(fields)
    layer_of = {
        _MAMBA: LayerConfig(mixer=mamba, feed_forward=None, mixer_norms=norms, feed_forward_norms=none),
        _ATTENTION: LayerConfig(mixer=attention, feed_forward=None, mixer_norms=norms, feed_forward_norms=none),
        _FEED_FORWARD: LayerConfig(mixer=None, feed_forward=feed_forward, mixer_norms=none, feed_forward_norms=norms),
    }
    if _EXPERTS in kinds:
        experts = _experts(fields, len(kinds))
        layer_of[_EXPERTS] = LayerConfig(mixer=None, feed_forward=experts, mixer_norms=none, feed_forward_norms=norms)
    ends = fields.integers("eos_token_id") if "eos_token_id" in fields.values else (2,)
    return ModelConfig(
        architecture=_NAME,
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=fields.required_integer("hidden_size"),
        layers=tuple(layer_of[kind] for kind in kinds),
        final_norm=norm,
        max_position=fields.size("max_position_embeddings", 4096),
        tie_word_embeddings=is_set(fields, "tie_word_embeddings", default=False),
        eos_token_ids=ends,
        bos_token_id=fields.integer("bos_token_id") if "bos_token_id" in fields.values else 1,
        dtype=fields.string("dtype") or fields.string("torch_dtype") or "float32",
    )


def _kinds(fields: JsonFields) -> list[str]:
    """The kind of each layer. Raises `CheckpointError` for unknown kinds."""
    pattern = fields.string("hybrid_override_pattern")
    found = fields.strings("layers_block_type") or fields.strings("layer_types") or tuple(pattern or "")
    unknown = sorted({one for one in found if one not in _SPELLINGS})
    count = fields.count("num_hidden_layers") or len(found)
    if not found or unknown or len(found) != count or count > MAX_LAYERS:
        seen = ", ".join(map(quote, unknown)) or f"{len(found)} entries for {count} layers"
        raise CheckpointError(
            f"{fields.file}: layers_block_type (or hybrid_override_pattern) has {seen}; supported: {_MAMBA} (M), "
            f"{_ATTENTION} (*), {_FEED_FORWARD} (-) or {_EXPERTS} (E) for each layer, at most {MAX_LAYERS}"
        )
    return [_SPELLINGS[one] for one in found]


def _mamba(fields: JsonFields, norm: NormConfig) -> Mamba2Config:
    groups = fields.size("n_groups", 8)
    bias = is_set(fields, "use_bias", default=False)
    least = fields.number("time_step_min")
    mamba = Mamba2Config(
        num_heads=fields.size("mamba_num_heads", 128),
        head_dim=fields.size("mamba_head_dim", 64),
        state_size=fields.size("ssm_state_size", 128),
        num_groups=groups,
        width=fields.size("conv_kernel", 4),
        norm=norm,
        norm_groups=groups,
        least_step=0.001 if least is None else least,
        bias=bias,
        out_bias=bias,
        conv_bias=is_set(fields, "use_conv_bias", default=True),
    )
    check_mamba(fields, mamba, mamba.inner, activation="mamba_hidden_act")
    return mamba


def _attention(fields: JsonFields) -> AttentionConfig:
    heads = fields.required_integer("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads) if "num_key_value_heads" in fields.values else 8
    head_dim = fields.count("head_dim") or fields.size("attention_head_dim", 128)
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.file}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, rope=None)


def _feed_forward(fields: JsonFields) -> UngatedConfig:
    if (activation := fields.string("mlp_hidden_act") or "relu2") != "relu2":
        raise CheckpointError(f"{fields.file}: mlp_hidden_act {activation!r} is not supported; supported: relu2")
    bias = is_set(fields, "mlp_bias", default=False)
    return UngatedConfig(size=fields.required_integer("intermediate_size"), bias=bias)


def _experts(fields: JsonFields, num_layers: int) -> ExpertsConfig:
    """The experts of those layers that have some: without gates, and perhaps with narrower inputs."""
    if is_set(fields, "mlp_bias", default=False):
        raise CheckpointError(f"{fields.file}: mlp_bias is true; only false is supported in models with experts")
    experts = read_balanced_sizes(fields, num_layers, _EXPERT_DEFAULTS)
    return replace(
        experts,
        shared_size=fields.size("moe_shared_expert_intermediate_size", 7688),
        squared_relu=True,
        latent=fields.count("moe_latent_size") or 0,
    )


def _name(tensor: str, *, bare: bool = False, stacked: tuple[Stacked, ...] = ()) -> TensorName:
    return TensorName(tensor, bare=bare, layers=_LAYERS, stacked=stacked)


_EACH = f"mixer.experts.{EXPERT}"


FAMILY = Family(
    name=_NAME,
    class_name="NemotronHForCausalLM",
    configure=configure,
    names={
        **mamba_names("mixer", _LAYERS),
        Part.EMBEDDING: TensorName("backbone.embeddings"),
        Part.FINAL_NORM: TensorName("backbone.norm_f"),
        Part.HEAD: TensorName("lm_head"),
        Part.LABELS: LABELS_NAME,
        Part.ATTENTION_NORM: _name("norm"),
        Part.FEED_FORWARD_NORM: _name("norm"),
        Part.QUERY: _name("mixer.q_proj"),
        Part.KEY: _name("mixer.k_proj"),
        Part.VALUE: _name("mixer.v_proj"),
        Part.OUTPUT: _name("mixer.o_proj"),
        Part.UP: _name("mixer.up_proj"),
        Part.DOWN: _name("mixer.down_proj"),
        Part.ROUTER: _name("mixer.gate"),
        Part.ROUTER_CORRECTION: _name("mixer.gate.e_score_correction_bias", bare=True),
        Part.EXPERTS_INPUT: _name("mixer.fc1_latent_proj"),
        Part.EXPERTS_OUTPUT: _name("mixer.fc2_latent_proj"),
        Part.EXPERT_UP: _name(f"{_EACH}.up_proj", stacked=(Stacked("mixer.experts.up_proj"),)),
        Part.EXPERT_DOWN: _name(f"{_EACH}.down_proj", stacked=(Stacked("mixer.experts.down_proj"),)),
        Part.SHARED_UP: _name("mixer.shared_experts.up_proj"),
        Part.SHARED_DOWN: _name("mixer.shared_experts.down_proj"),
    },
    without_head=partial(with_model_prefix, prefix="backbone."),
)
