"""The configs and tensors of well-known models as they are published, without values: names and shapes follow from the
sizes in config.json. They are written by hand, and not made of the manifest that they test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A model before it is quantised: shapes of the weights that quantisers take, by layer, `(out, in)` or `(experts,
    out, in)`, and of all other tensors by their whole names. `unread`: beginnings of the names of layers that are not
    used."""

    linear: dict[str, Shape]
    plain: dict[str, Shape]
    unread: tuple[str, ...] = ()


LLAMA: Fields = {
    "architectures": ["LlamaForCausalLM"],
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "mlp_bias": False},
    **{"eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "llama", "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    "rope_scaling": {
        **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
    **{"rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    **{"transformers_version": "4.43.3", "vocab_size": 128256},
}
MISTRAL: Fields = {
    "architectures": ["MistralForCausalLM"],
    **{"attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768},
    **{"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
    **{"pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.37.0.dev0"},
    **{"use_cache": True, "vocab_size": 32000},
}
MIXTRAL: Fields = {
    **{name: value for name, value in MISTRAL.items() if name != "pad_token_id"},
    "architectures": ["MixtralForCausalLM"],
    **{"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False},
    **{"router_aux_loss_coef": 0.02, "transformers_version": "4.37.0.dev0"},
}
QWEN2: Fields = {
    "architectures": ["Qwen2ForCausalLM"],
    **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu"},
    **{"hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768},
    **{"max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28},
    **{"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072},
    **{"tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.41.1", "use_cache": True},
    **{"use_sliding_window": False, "vocab_size": 152064},
}
QWEN2_SMALL: Fields = QWEN2 | {
    **{"hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24, "num_attention_heads": 14},
    **{"num_hidden_layers": 24, "num_key_value_heads": 2, "sliding_window": 32768, "tie_word_embeddings": True},
    **{"torch_dtype": "bfloat16", "vocab_size": 151936},
}
QWEN3: Fields = {
    "architectures": ["Qwen3ForCausalLM"],
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645},
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02},
    **{"intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3"},
    **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06},
    **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False},
    "vocab_size": 151936,
}
QWEN3_SMALL: Fields = QWEN3 | {
    **{"hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16},
    **{"num_hidden_layers": 28, "tie_word_embeddings": True},
}
QWEN3_MOE: Fields = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    **{"decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48},
    **{"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4},
    **{"output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001},
}
GPT_OSS: Fields = {
    "architectures": ["GptOssForCausalLM"],
    **{"attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4},
    **{"head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    **{"model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24},
    **{"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_type": "yarn", "truncate": False},
    },
    **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088},
}
DEEPSEEK_V3: Fields = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    **{"attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 0},
    **{"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168},
    **{"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840},
    **{"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1},
    **{"pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
    **{"rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True},
    **{"tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16"},
    **{"transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280},
}


def dense(fields: Fields) -> Model:
    """Llama, Mistral, Qwen2 (biases of queries, keys and values) and Qwen3 (norms of heads)."""
    linear: dict[str, Shape] = {}
    plain = _tables(fields)
    for layer in _layers(fields):
        linear |= _attention(fields, layer) | _gated(f"{layer}.mlp", fields, fields["intermediate_size"])
        plain |= _norms(fields, layer)
    return Model(linear, plain)


def mixtral(fields: Fields) -> Model:
    linear: dict[str, Shape] = {}
    plain = _tables(fields)
    hidden, columns, experts = fields["hidden_size"], fields["intermediate_size"], fields["num_local_experts"]
    for layer in _layers(fields):
        linear |= _attention(fields, layer)
        for expert in range(experts):
            stem = f"{layer}.block_sparse_moe.experts.{expert}"
            linear |= {f"{stem}.w{number}": (columns, hidden) for number in (1, 3)} | {f"{stem}.w2": (hidden, columns)}
        plain |= _norms(fields, layer) | {f"{layer}.block_sparse_moe.gate.weight": (experts, hidden)}
    return Model(linear, plain)


def qwen3_moe(fields: Fields) -> Model:
    linear: dict[str, Shape] = {}
    plain = _tables(fields)
    for layer in _layers(fields):
        linear |= _attention(fields, layer)
        for expert in range(fields["num_experts"]):
            linear |= _gated(f"{layer}.mlp.experts.{expert}", fields, fields["moe_intermediate_size"])
        plain |= _norms(fields, layer) | {f"{layer}.mlp.gate.weight": (fields["num_experts"], fields["hidden_size"])}
    return Model(linear, plain)


def gpt_oss(fields: Fields) -> Model:
    """One tensor has the matrices of all experts, with rows of gate and up in turn. Attention is not quantised."""
    linear: dict[str, Shape] = {}
    plain = _tables(fields)
    hidden, columns, experts = fields["hidden_size"], fields["intermediate_size"], fields["num_local_experts"]
    for layer in _layers(fields):
        shapes = {"gate_up": (experts, 2 * columns, hidden), "down": (experts, hidden, columns)}
        linear |= {f"{layer}.mlp.experts.{name}_proj": shape for name, shape in shapes.items()}
        plain |= {f"{layer}.mlp.experts.{name}_proj_bias": shape[:2] for name, shape in shapes.items()}
        for stem, shape in (_attention(fields, layer) | {f"{layer}.mlp.router": (experts, hidden)}).items():
            plain |= {f"{stem}.weight": shape, f"{stem}.bias": shape[:1]}
        plain |= _norms(fields, layer) | {f"{layer}.self_attn.sinks": (fields["num_attention_heads"],)}
    return Model(linear, plain)


def deepseek_v3(fields: Fields) -> Model:
    """Behind the last layer is one that predicts a further token, with separate embeddings and a separate head."""
    linear: dict[str, Shape] = {}
    plain = _tables(fields)
    hidden, experts, columns = fields["hidden_size"], fields["n_routed_experts"], fields["moe_intermediate_size"]
    last = fields["num_hidden_layers"]
    for number in range(last + fields["num_nextn_predict_layers"]):
        layer = f"model.layers.{number}"
        linear |= _latent_attention(fields, layer)
        plain |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        plain[f"{layer}.self_attn.q_a_layernorm.weight"] = (fields["q_lora_rank"],)
        plain[f"{layer}.self_attn.kv_a_layernorm.weight"] = (fields["kv_lora_rank"],)
        if number < fields["first_k_dense_replace"]:
            linear |= _gated(f"{layer}.mlp", fields, fields["intermediate_size"])
            continue
        for expert in range(experts):
            linear |= _gated(f"{layer}.mlp.experts.{expert}", fields, columns)
        linear |= _gated(f"{layer}.mlp.shared_experts", fields, columns * fields["n_shared_experts"])
        plain[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        plain[f"{layer}.mlp.gate.e_score_correction_bias"] = (experts,)
    further = f"model.layers.{last}"
    table = (fields["vocab_size"], hidden)
    plain |= {f"{further}.embed_tokens.weight": table, f"{further}.shared_head.head.weight": table}
    plain |= {f"{further}.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    plain[f"{further}.eh_proj.weight"] = (hidden, 2 * hidden)
    return Model(linear, plain, unread=(f"{further}.",))


def _tables(fields: Fields) -> dict[str, Shape]:
    table = (fields["vocab_size"], fields["hidden_size"])
    head = {} if fields["tie_word_embeddings"] else {"lm_head.weight": table}
    return {"model.embed_tokens.weight": table, "model.norm.weight": table[1:], **head}


def _layers(fields: Fields) -> list[str]:
    return [f"model.layers.{number}" for number in range(fields["num_hidden_layers"])]


def _head_dim(fields: Fields) -> int:
    found: int = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return found


def _norms(fields: Fields, layer: str) -> dict[str, Shape]:
    """The norms of a layer, and the biases of Qwen2."""
    found: dict[str, Shape] = {
        f"{layer}.{name}_layernorm.weight": (fields["hidden_size"],) for name in ("input", "post_attention")
    }
    if fields["model_type"].startswith("qwen3"):
        found |= {f"{layer}.self_attn.{name}_norm.weight": (_head_dim(fields),) for name in "qk"}
    if fields["model_type"] == "qwen2":
        rows = _attention(fields, layer)
        found |= {f"{stem}.bias": shape[:1] for stem, shape in rows.items() if not stem.endswith("o_proj")}
    return found


def _attention(fields: Fields, layer: str) -> dict[str, Shape]:
    hidden, size = fields["hidden_size"], _head_dim(fields)
    queries, keys = size * fields["num_attention_heads"], size * fields["num_key_value_heads"]
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    return {f"{layer}.self_attn.{name}_proj": shape for name, shape in shapes.items()}


def _latent_attention(fields: Fields, layer: str) -> dict[str, Shape]:
    hidden, heads, latent = fields["hidden_size"], fields["num_attention_heads"], fields["kv_lora_rank"]
    plain, rotated, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    shapes = {
        "q_a_proj": (fields["q_lora_rank"], hidden),
        "q_b_proj": (heads * (plain + rotated), fields["q_lora_rank"]),
        "kv_a_proj_with_mqa": (latent + rotated, hidden),
        "kv_b_proj": (heads * (plain + value), latent),
        "o_proj": (hidden, heads * value),
    }
    return {f"{layer}.self_attn.{name}": shape for name, shape in shapes.items()}


def _gated(stem: str, fields: Fields, columns: int) -> dict[str, Shape]:
    hidden = fields["hidden_size"]
    shapes = {"gate": (columns, hidden), "up": (columns, hidden), "down": (hidden, columns)}
    return {f"{stem}.{name}_proj": shape for name, shape in shapes.items()}
