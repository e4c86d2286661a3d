"""Small checkpoints with random weights, written by transformers' own classes.

Every parameter is random (norms and biases too, which transformers starts at 1 and 0), so that a forgotten bias, a
swapped norm or a transposed matrix changes the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from helpers.parity_steps import TINY_VOCAB_SIZE as TINY_VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dogs wander there",
    "what is the capital of france? the capital of france is paris.",
    "one two three four five six seven eight nine ten, counting again and again",
    "answering questions in the morning, reading and writing in the evening",
)

_SMALL_CONFIG: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
}
_GROUPED_EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
}

_ARCHITECTURE_CONFIG: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 32,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        **_EXPERTS,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "use_bias": True,
        "time_step_limit": (0.2, 2.0),
    },
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.7, 1.3],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 1.1, 1.2, 0.7, 0.8],
        "ssm_in_multiplier": 1.4,
        "ssm_out_multiplier": 0.6,
        "projectors_bias": True,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 3.5,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.4,
        "logits_scaling": 1.7,
    },
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "use_bias": True,
        "mlp_bias": True,
        "time_step_min": 0.2,
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        **_EXPERTS,
    },
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.7,
        **_EXPERTS,
    },
    "glm4_moe": {**_GROUPED_EXPERTS, "head_dim": 32},
    "ernie4_5_moe": {
        "num_hidden_layers": 4,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 2,
    },
    "minimax_m2": {**_LOCAL_EXPERTS, "intermediate_size": 48, "head_dim": 32},
    "llama4_text": {
        **_LOCAL_EXPERTS,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "head_dim": 16,
        "no_rope_layers": [1, 0, 1, 1],
        "interleave_moe_layer_step": 2,
    },
    "qwen3_moe": {"moe_intermediate_size": 48, **_EXPERTS},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, **_EXPERTS},
    "mixtral": {**_LOCAL_EXPERTS, "intermediate_size": 48},
    "olmoe": {**_EXPERTS, "intermediate_size": 48},
    "gpt_oss": {**_LOCAL_EXPERTS, "intermediate_size": 48, "head_dim": 16},
    "granitemoe": {**_LOCAL_EXPERTS, "intermediate_size": 48},
    "deepseek_v2": {**_LATENT, **_GROUPED_EXPERTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_GROUPED_EXPERTS},
    "glm4_moe_lite": {**_LATENT, **_GROUPED_EXPERTS},
    "minicpm3": {**_LATENT, "scale_emb": 3.5, "scale_depth": 0.7, "dim_model_base": 40},
    "youtu": _LATENT,
    "sarvam_mla": {**_LATENT, **_GROUPED_EXPERTS, "q_lora_rank": None},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16},
}


def make_tiny_tokenizer(folder: Path, vocab_size: int = TINY_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer of at most `vocab_size` tokens and saves it in `folder`.

    Ids 0, 1, 2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>` (the end of sequence); every byte has a token.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"a byte-level vocabulary needs at least {least} tokens, got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def tiny_fields(architecture: str, **overrides: Any) -> dict[str, Any]:
    """Fields of the config of a tiny model; `overrides` take precedence."""
    return _SMALL_CONFIG | _ARCHITECTURE_CONFIG.get(architecture, {}) | overrides


def make_tiny_model(architecture: str, *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A `...ForCausalLM` of transformers on the CPU, in float32, with all parameters sampled from `seed`.

    `config_overrides` are fields of the architecture's config: `rope_parameters`, `tie_word_embeddings`, `head_dim`...
    """
    config = transformers.AutoConfig.for_model(architecture, **tiny_fields(architecture, **config_overrides))
    return randomise(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), architecture, seed)


def randomise(model: PreTrainedModel, architecture: str, seed: int = 0) -> PreTrainedModel:
    """Samples all parameters of a text model of `architecture` from `seed`, also one inside a model for images."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(word in name for word in ("visual", "vision", "projector")):
                continue
            noise = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            scaled = _scaled(name, noise, architecture)
            zero_centred = architecture in ("gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
            if zero_centred and name.endswith("norm.weight") and "linear_attn" not in name:
                scaled -= 1.0  # they multiply by 1 + w
            parameter.copy_(torch.from_numpy(scaled))
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "e_score_correction_bias", "expert_bias")):
                noise = generator.standard_normal(tuple(buffer.shape), dtype=np.float32)
                buffer.copy_(torch.from_numpy(_scaled(name, noise)))
    return model.eval()


def make_tiny_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Writes config, generation config, safetensors and tokenizer of a tiny model into `folder`; returns `folder`.

    Llama, mistral, qwen2 or qwen3: hidden size 64, 2 layers, 4 heads, 2 kv heads, 384 tokens, context 512. A small
    `max_shard_size` (such as "50KB") splits the weights over several files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(architecture, seed=seed, **config_overrides)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    make_tiny_tokenizer(folder, model.config.vocab_size)
    return folder


def _scaled(name: str, noise: np.ndarray, architecture: str = "") -> np.ndarray:
    """Scales unit noise as the parameter's role requires, keeping activations near 1."""
    if name.endswith(("norm.weight", "Norm.weight", "norm_f.weight", "layer_scalar", "mixer.D", "mamba.D")):
        return 1.0 + 0.2 * noise
    if name.endswith(("sinks", "dt_bias", "A_log")):
        return noise
    if "conv" in name and noise.ndim == 3:
        return noise / np.sqrt(noise.shape[-1], dtype=np.float32)
    if name.endswith((".bias", "_bias")):
        return 0.2 * noise
    if "embed" in name or "lm_head" in name:
        return 0.3 * noise
    if noise.ndim == 3:  # experts; of gpt-oss and Llama 4, [experts, in, out]
        inputs = noise.shape[1] if architecture in ("gpt_oss", "llama4_text") else noise.shape[2]
        return noise / np.sqrt(inputs, dtype=np.float32)
    return noise / np.sqrt(noise.shape[1], dtype=np.float32)
