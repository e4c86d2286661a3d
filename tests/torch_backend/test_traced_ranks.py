"""Models of transformers sharded over ranks: they equal transformers, with sums over ranks where they belong."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.equal_ranks import EqualRanks
from helpers.torch_ranks import ThreadRank, on_threads, thread_ranks
from helpers.traced_graphs import called
from transformers import PreTrainedConfig

from sglang_jax.architectures import ModelConfig
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.transformers_config import transformers_model_config, under_usual_names
from sglang_jax.config import CompilePass, chosen_passes
from sglang_jax.errors import ConfigError
from torch_backend.compilation import twin
from torch_backend.compilation.expected_matches import ExpectedMatches
from torch_backend.compilation.hf_model import config_of, eager_model, empty_model
from torch_backend.compilation.manager import PASSES, PassManager
from torch_backend.compilation.rank_shard import shard_model
from torch_backend.compilation.step import all_gather
from torch_backend.compilation.trace import trace
from torch_backend.compilation.traced_model import TracedTransformer
from torch_backend.compilation.twin import check_twin, twin_config
from torch_backend.compilation.weights import RandomWeights
from torch_backend.layers.shard import ModelShard

ALL = PassManager(chosen_passes("all"))


def parts(family: str, ranks: list[ThreadRank], manager: PassManager, **values: Any) -> list[TracedTransformer]:
    """The tiny twin of a family, sharded over ranks."""
    config = twin_config({"model_type": family, **values}, len(ranks))
    weights = RandomWeights.of(eager_model(config, torch.float32))
    return [twin._rewritten(config, weights, manager, None, rank) for rank in ranks]


def described_by(config: PreTrainedConfig) -> ModelConfig:
    """The engine's description of a config."""
    known = under_usual_names(config.to_dict(), config.attribute_map)
    return transformers_model_config(JsonFields(known, Path("config.json")), (), "float32")


_SHARED = {"num_key_value_heads": 2, "tie_word_embeddings": True}
CASES: list[Any] = [
    ("llama", 2, {"attention_bias": True, "mlp_bias": True, "vocab_size": 129}, "all"),
    ("phi", 2, {}, "all"),
    pytest.param("qwen3", 4, _SHARED, "all", marks=pytest.mark.soak),
]
"""Biases that are added once, and a head that is not sharded; attention parallel to feed-forward, and a bias of the
head; ranks that share kv heads, norms of heads, and a tied head."""

LONG = ("qwen2", "mistral", "gemma2", "gemma3_text", "granite", "smollm3", "cohere", "gpt_neox", "starcoder2")


@pytest.mark.parametrize(
    ("family", "size", "values", "chosen"),
    [
        *CASES,
        *(pytest.param(name, 2, {}, "all", marks=pytest.mark.soak) for name in LONG),
        *(pytest.param(name, 2, {}, "none", marks=pytest.mark.soak) for name in ("llama", "gemma2")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_equal_transformers(family: str, size: int, values: dict[str, Any], chosen: str) -> None:
    ranks = thread_ranks(size)
    found = parts(family, ranks, PassManager(chosen_passes(chosen)), **values)
    config = twin_config({"model_type": family, **values}, size)
    eager = eager_model(config, torch.float32)
    weights = RandomWeights.of(eager)
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            parameter.copy_(weights.tensor(name))
    differences = on_threads([partial(twin._compare, eager, each) for each in found])
    assert max(differences) < twin._TOLERANCE
    blocks = 1 if family in ("phi", "gpt_neox") else 2
    assert {rank.sums for rank in ranks} == {blocks * config.num_hidden_layers * len(twin._STEPS)}


def test_ranks_that_do_not_sum_end_the_start() -> None:
    """The tiny twin detects it."""

    class Alone(EqualRanks):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ConfigError, match="a tiny llama, rewritten like this model, differs from transformers"):
        check_twin({"model_type": "llama"}, ALL, None, Alone())


@pytest.mark.parametrize(
    ("family", "fused", "apart"),
    [("llama", 4, 0), ("gemma2", 0, 4), ("granite", 0, 4), ("phi", 0, 2)],
)
def test_sums_over_ranks_are_counted(family: str, fused: int, apart: int) -> None:
    """gemma2 norms a sum before it adds it, and granite multiplies it; phi adds up two parts at once."""
    changes = {"residual_multiplier": 0.5} if family == "granite" else {}
    config = twin_config({"model_type": family} | changes, 2)
    described = described_by(config)
    model = empty_model(config, torch.float32)
    part = shard_model(model, described, ModelShard.of(described, 1, Parallelism(2)))
    program = trace(model)
    counts = ALL.run(program, ExpectedMatches.of_model(model, program, config.num_hidden_layers, part.marks))
    by_name = {each.name: (each.expected, each.found) for each in counts}
    assert by_name[CompilePass.COLLECTIVES] == (5, 5)
    assert by_name[CompilePass.ALL_REDUCE_ADD_NORM] == (fused, fused)
    assert called(program).count("all_reduce_add_rms_norm") == fused
    assert called(program).count("all_reduce") == apart
    assert [node.target for node in program.head.nodes].count(all_gather) == 1
    assert [each.rewrite(program) for each in PASSES] == [0] * len(PASSES)


@pytest.mark.parametrize(
    ("family", "size", "values", "reason"),
    [
        ("gpt2", 2, {"n_head": 4, "n_embd": 32}, "transformers has no plan of tensor parallelism for it: tp_size must"),
        ("phi3", 2, {}, r"has colwise_gather_output for layers\.\*\.self_attn\.qkv_proj; only colwise and rowwise"),
        (
            "llama",
            2,
            {"intermediate_size": 49},
            r"layers\.0\.mlp\.gate_proj of 49 columns cannot be spread over 2 proc",
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(family: str, size: int, values: dict[str, Any], reason: str) -> None:
    tiny = {"num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    if family != "gpt2":
        tiny |= {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = config_of({"model_type": family} | tiny | values)
    described = described_by(config)
    with pytest.raises(ConfigError, match=f"model_impl transformers cannot serve {family}: .*{reason}"):
        shard_model(empty_model(config, torch.float32), described, ModelShard.of(described, 0, Parallelism(size)))
