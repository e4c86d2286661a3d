"""Models, steps and logits for comparing both backends with transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers.parity_steps import STEPS as STEPS
from helpers.parity_steps import TOLERANCE as TOLERANCE
from helpers.parity_steps import prompts as prompts
from helpers.tiny_models import make_tiny_model
from transformers import PreTrainedModel

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.5,
    },
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_theta": ("llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100000.0}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "qwen3_biases": ("qwen3", {"attention_bias": True, "head_dim": 96, "tie_word_embeddings": True}),
}
VARIANTS = {name: ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()}
MODELS = ARCHITECTURES | VARIANTS

DYNAMIC: dict[str, Any] = {"max_position_embeddings": 16, "rope_parameters": ROPES["dynamic"]}
"""A llama whose sequences soon exceed the original context."""


def transformers_logits(architecture: str, tokens: np.ndarray, **overrides: Any) -> np.ndarray:
    """float32 logits of every token in one call."""
    return logits_of(make_tiny_model(architecture, **overrides), tokens)


def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """float32 logits of every token in one call."""
    with torch.no_grad():
        return model(torch.tensor(tokens[None], dtype=torch.long)).logits[0].numpy()


def decoded_logits(architecture: str, tokens: np.ndarray, prompt: int, **overrides: Any) -> np.ndarray:
    """float32 logits of a prompt in one call, and of the other tokens one by one over the cache."""
    model = make_tiny_model(architecture, **overrides)
    parts, cache = [], None
    ids = torch.tensor(tokens[None], dtype=torch.long)
    with torch.no_grad():
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            output = model(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits[0].numpy())
    return np.concatenate(parts)


def bfloat16_errors(architecture: str, sequences: list[np.ndarray], found: list[np.ndarray]) -> tuple[float, float]:
    """Mean squared errors against float32 arithmetic on the same bfloat16 weights: of `found`, and of transformers."""
    model = make_tiny_model(architecture).to(torch.bfloat16)
    errors, reference_errors = [], []
    with torch.no_grad():
        for tokens, logits in zip(sequences, found, strict=True):
            ids = torch.tensor(tokens[None], dtype=torch.long)
            rounded = model.to(torch.bfloat16)(ids).logits[0].float().numpy()
            exact = model.to(torch.float32)(ids).logits[0].numpy()
            errors.append(np.square(logits - exact).mean())
            reference_errors.append(np.square(rounded - exact).mean())
    return float(np.mean(errors)), float(np.mean(reference_errors))
