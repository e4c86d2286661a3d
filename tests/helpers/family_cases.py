"""Tiny models of the families whose layers differ from Llama's, for both backends: their logits show each difference,
as every window is shorter than the sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from helpers.parity_cases import ARCHITECTURES, STEPS, TOLERANCE, logits_of, prompts, transformers_logits
from helpers.parity_steps import Paged as Paged
from helpers.parity_steps import check_resumed
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model


@dataclass(frozen=True)
class FamilyCase:
    """A model of `architecture` with some fields changed, in pages of `page_size` tokens."""

    architecture: str
    page_size: int
    changes: dict[str, Any] = field(default_factory=dict)


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

EXPERTS: dict[str, FamilyCase] = {
    "qwen3_moe": FamilyCase(
        "qwen3_moe",
        16,
        {"num_hidden_layers": 4, "head_dim": 32, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen2_moe": FamilyCase(
        "qwen2_moe",
        4,
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL, _GLOBAL],
        },
    ),
    "mixtral": FamilyCase("mixtral", 16, {"sliding_window": 9, "head_dim": 24}),
    "olmoe": FamilyCase("olmoe", 4, {}),
    "gpt_oss": FamilyCase(
        "gpt_oss",
        16,
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "granitemoe": FamilyCase(
        "granitemoe",
        1,
        {
            "embedding_multiplier": 3.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.7,
            "attention_bias": True,
        },
    ),
    "glm4_moe": FamilyCase("glm4_moe", 4, {"use_qk_norm": True, "attention_bias": True}),
    "ernie4_5_moe": FamilyCase("ernie4_5_moe", 1),
    "minimax_m2": FamilyCase("minimax_m2", 16, {"rotary_dim": 16}),
    "llama4_text": FamilyCase("llama4_text", 4),
}
"""Families with mixtures of experts."""

FAMILIES: dict[str, FamilyCase] = {
    "gemma": FamilyCase("gemma", 16, {"head_dim": 24, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "glm4": FamilyCase("glm4", 4, {"head_dim": 24, "num_attention_heads": 6, "rms_norm_eps": 1e-3}),
    "gemma2": FamilyCase(
        "gemma2",
        16,
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": FamilyCase(
        "gemma3_text",
        4,
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "layer_types": [_LOCAL, _LOCAL, _GLOBAL],
            "rope_parameters": {
                _GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _LOCAL: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma4": FamilyCase(
        "gemma4_text",
        16,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
            "final_logit_softcapping": 5.0,
        },
    ),
    "granite_swa": FamilyCase(
        "granite_swa",
        4,
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": [_GLOBAL, _LOCAL, _LOCAL, _GLOBAL],
            "layer_rope_theta": [0, 10000.0, 500.0, 10000.0],
            "embedding_multiplier": 3.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": FamilyCase("mistral", 1, {"sliding_window": 8}),
    "qwen2": FamilyCase("qwen2", 64, {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "phi3": FamilyCase("phi3", 16, {"sliding_window": 9}),
    "olmo2": FamilyCase("olmo2", 4, {}),
    "olmo3": FamilyCase(
        "olmo3",
        16,
        {
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL],
            "rope_parameters": {
                _GLOBAL: {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
                _LOCAL: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "seed_oss": FamilyCase("seed_oss", 16, {"head_dim": 32, "attention_out_bias": True}),
    "ministral": FamilyCase("ministral", 64, {"head_dim": 16, "sliding_window": 8, "layer_types": [_LOCAL, _GLOBAL]}),
    "ernie4_5": FamilyCase("ernie4_5", 1, {"head_dim": 32, "use_bias": True}),
    "smollm3": FamilyCase("smollm3", 1, {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "granite": FamilyCase(
        "granite",
        4,
        {
            "embedding_multiplier": 3.5,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "cohere2": FamilyCase(
        "cohere2",
        64,
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": [_LOCAL, _GLOBAL, _LOCAL],
            "logit_scale": 0.3,
            "attention_bias": True,
        },
    ),
    "exaone4": FamilyCase(
        "exaone4",
        16,
        {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": [_LOCAL, _GLOBAL, _LOCAL]},
    ),
    **EXPERTS,
}


_SQUARED_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "mlp_bias": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
}

HYBRIDS: dict[str, FamilyCase] = {
    "lfm2": FamilyCase("lfm2", 4, {"conv_bias": True}),
    "qwen3_5": FamilyCase("qwen3_5_text", 16),
    "qwen3_next": FamilyCase("qwen3_next", 4, {"attention_bias": True}),
    "mamba2": FamilyCase("mamba2", 4),
    "falcon_h1": FamilyCase("falcon_h1", 16),
    "granite_hybrid": FamilyCase("granitemoehybrid", 1),
    "granite_hybrid_experts": FamilyCase(
        "granitemoehybrid", 4, {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48}
    ),
    "qwen3_5_moe": FamilyCase("qwen3_5_moe_text", 16),
    "lfm2_moe": FamilyCase("lfm2_moe", 4),
    "nemotron_h": FamilyCase("nemotron_h", 4),
    "nemotron_h_experts": FamilyCase("nemotron_h", 16, _SQUARED_EXPERTS),
    "nemotron_h_latent": FamilyCase("nemotron_h", 1, _SQUARED_EXPERTS | {"moe_latent_size": 32}),
}
"""Families with layers that keep a recurrent state."""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

LATENT: dict[str, FamilyCase] = {
    "deepseek_v2": FamilyCase("deepseek_v2", 16, {"rope_parameters": _YARN}),
    "deepseek_v2_lite": FamilyCase(
        "deepseek_v2", 4, {"q_lora_rank": 24, "topk_method": "greedy", "v_head_dim": 16, "attention_bias": True}
    ),
    "deepseek_v3": FamilyCase(
        "deepseek_v3", 16, {"rope_parameters": _YARN, "num_hidden_layers": 3, "attention_bias": True}
    ),
    "deepseek_v3_in_halves": FamilyCase(
        "deepseek_v3", 1, {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 1e-3}
    ),
    "glm4_moe_lite": FamilyCase(
        "glm4_moe_lite",
        16,
        {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"], "rms_norm_eps": 1e-3},
    ),
    "minicpm3": FamilyCase(
        "minicpm3",
        4,
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.1, 1.5, 2.5, 6.0],
                "long_factor": [1.1, 1.5, 2.5, 6.0],
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "youtu": FamilyCase("youtu", 64, {"rope_parameters": _YARN}),
    "sarvam_mla": FamilyCase("sarvam_mla", 1, {"rope_parameters": _YARN}),
}
"""Families with latent attention."""


EVERY_FAMILY = FAMILIES | {
    f"{name}_without_windows" if name in FAMILIES else name: FamilyCase(kind, 4, changes)
    for name, (kind, changes) in ARCHITECTURES.items()
}

PAGE_SIZES = (1, 16, 64)
LONG = 70
"""Tokens of a prompt that fill a page of any size, and more."""

_MOST = 40
"""Tokens of a row in a step."""


def check_family(
    case: FamilyCase, folder: Path, load: Callable[[Path, int, int], Paged], page_sizes: Sequence[int] = ()
) -> None:
    """Checks that logits of whole prompts, chunks and decode rows equal transformers'; and that those of a request
    whose first tokens are already in pages are the same, for any number of these. In pages of the case's size, or of
    each of `page_sizes`.

    `load` takes a checkpoint, the page size, and the pages of a row.
    """
    checkpoint = make_tiny_checkpoint(folder, case.architecture, **case.changes)
    reference = make_tiny_model(case.architecture, **case.changes)
    sequences = prompts()
    expected = [logits_of(reference, tokens) for tokens in sequences]
    for page_size in page_sizes or (case.page_size,):
        _check_logits(load(checkpoint, page_size, -(-64 // page_size)), sequences, expected)


def _check_logits(model: Paged, sequences: list[np.ndarray], expected: list[np.ndarray]) -> None:
    found = model.run(sequences, STEPS)
    for logits, theirs in zip(found, expected, strict=True):
        assert logits.shape == theirs.shape
        assert np.abs(logits - theirs).max() < TOLERANCE
    cached = (16, 33, 5, 29)
    steps = ({0: 8, 1: 6, 2: 4, 3: 1}, {1: 1}, {1: 3})
    for again, logits, start in zip(model.run(sequences, steps, cached), found, cached, strict=True):
        assert np.abs(again - logits[start:]).max() < 2e-5


def check_hybrid(case: FamilyCase, folder: Path, load: Callable[[Path, int, int], Paged]) -> None:
    """Checks that logits of whole prompts, chunks and decode rows equal transformers'; and those of a request that
    resumes from the pages and the state of another, however these were computed.

    `load` as for `check_family`.
    """
    columns = -(-64 // case.page_size)
    model = load(make_tiny_checkpoint(folder, case.architecture, **case.changes), case.page_size, columns)
    check_resumed(model, [transformers_logits(case.architecture, tokens, **case.changes) for tokens in prompts()])


def check_alignments(
    case: FamilyCase,
    folder: Path,
    load: Callable[[Path, int, int], Paged],
    page_sizes: Sequence[int] = PAGE_SIZES,
    every: int = 1,
) -> None:
    """Checks that logits equal transformers' wherever a prompt is divided into chunks, and that they are the same for a
    request that matches the prompt up to the end of any page; for each page size. `every`: one of this many places is
    checked.

    `load` as for `check_family`.
    """
    checkpoint = make_tiny_checkpoint(folder, case.architecture, **case.changes)
    (tokens,) = prompts((LONG,))
    expected = logits_of(make_tiny_model(case.architecture, **case.changes), tokens)
    for page_size in page_sizes:
        model = load(checkpoint, page_size, -(-LONG // page_size))
        for place in range(1, LONG, every):
            (whole,) = model.run([tokens], _steps(0, place) + _steps(place, LONG))
            assert np.abs(whole - expected).max() < TOLERANCE, f"chunks that part at {place}, pages of {page_size}"
        for end in range(page_size, LONG, page_size * every):
            (rest,) = model.run([tokens], _steps(end, LONG), (end,))
            assert np.abs(rest - whole[end:]).max() < 2e-5, f"a hit of {end} tokens, pages of {page_size}"


def check_state_alignments(
    case: FamilyCase,
    folder: Path,
    load: Callable[[Path, int, int], Paged],
    page_sizes: Sequence[int] = PAGE_SIZES,
    every: int = 1,
) -> None:
    """`check_alignments` for models that keep states: a request that hits starts from the state of another."""
    checkpoint = make_tiny_checkpoint(folder, case.architecture, **case.changes)
    (tokens,) = prompts((LONG,))
    expected = logits_of(make_tiny_model(case.architecture, **case.changes), tokens)
    for page_size in page_sizes:
        model = load(checkpoint, page_size, -(-LONG // page_size))
        for place in range(1, LONG, every):
            (head,) = model.run([tokens], _steps(0, place))
            if place % page_size:
                (rest,) = model.run([tokens], _steps(place, LONG), (place,))
            else:
                model.share(0, 1)
                (rest,) = model.run([tokens, tokens], _steps(place, LONG, row=1), (0, place))
            found = np.concatenate((head, rest))
            assert np.abs(found - expected).max() < TOLERANCE, f"parted at {place}, pages of {page_size}"


def _steps(first: int, last: int, row: int = 0) -> list[dict[int, int]]:
    """Steps that compute tokens `[first, last)` of a row."""
    return [{row: min(_MOST, last - start)} for start in range(first, last, _MOST)]
