"""Logits that do not depend on the number of ranks, bit for bit, on the Torch backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT, prompts, transformers_logits
from helpers.fixed_rows import differences
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.torch_ranks import on_threads, thread_ranks

from torch_backend.parallel import SINGLE, TensorParallel

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
STEPS = ({0: 20, 1: 11}, {0: 1, 1: 9, 2: 7}, {0: 1, 2: 1, 1: 14})
EIGHT: Mapping[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


def logits_of_rank(folder: Path, parallel: TensorParallel, shards: int, **options: Any) -> list[np.ndarray]:
    torch.set_num_threads(1)
    model = TorchPagedModel(folder, parallel=parallel, fixed=True, num_shards=shards, **options)
    return model.run(prompts()[:3], STEPS)


@pytest.mark.parametrize(
    ("name", "changes", "shards", "numba", "dtype"),
    [
        ("llama", {**EIGHT, "tie_word_embeddings": True, "vocab_size": 385, "mlp_bias": True}, 8, False, FLOAT32),
        ("falcon_h1", {}, 2, False, FLOAT32),
        soak("llama", {**EIGHT, "attention_bias": True}, 8, True, FLOAT32),
        soak("llama", EIGHT, 8, False, BFLOAT16),
        soak("cohere2", {}, 4, False, FLOAT32),
        soak("gemma2", EIGHT, 8, True, FLOAT32),
        soak("gpt_oss", EIGHT, 8, False, BFLOAT16),
        soak("qwen2_moe", {}, 4, True, FLOAT32),
        soak("deepseek_v3", {}, 4, False, FLOAT32),
        soak("qwen3_5", {}, 2, False, FLOAT32),
        soak("mamba2", {}, 2, False, FLOAT32),
        soak(
            "llama",
            {
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 16,
                "intermediate_size": 120,
                "hidden_size": 72,
            },
            3,
            False,
            FLOAT32,
        ),
    ],
)
def test_logits_do_not_depend_on_the_number_of_ranks(
    name: str, changes: dict[str, Any], shards: int, numba: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every divisor of the number of shards as a number of ranks; and one rank in other steps."""
    case = CASES.get(name)
    architecture, defaults, page_size = (
        ("llama", {}, 4) if case is None else (case.architecture, case.changes, case.page_size)
    )
    folder = make_tiny_checkpoint(tmp_path, architecture, **defaults | changes)
    columns = -(-64 // page_size)
    options = {"dtype": dtype, "numba": numba, "page_size": page_size, "columns": columns}
    found = {
        size: on_threads(
            [
                lambda rank=rank: logits_of_rank(folder, rank, shards, **options)
                for rank in (thread_ranks(size) if size > 1 else [SINGLE])
            ]
        )
        for size in range(1, shards + 1)
        if shards % size == 0
    }
    [expected] = found[1]
    for ranks in found.values():
        for logits in ranks:
            assert all(map(np.array_equal, logits, expected))
    if dtype == FLOAT32 and case is None:
        for tokens, logits in zip(prompts()[:3], expected, strict=True):
            wanted = transformers_logits(architecture, tokens, **defaults | changes)
            assert np.abs(logits - wanted[: len(logits)]).max() < 1e-3
    model = TorchPagedModel(folder, fixed=True, num_shards=shards, **options)
    assert differences(model, prompts()[:3], 48, states=name in HYBRIDS) == 0
