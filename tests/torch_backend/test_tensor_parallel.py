"""Ranks together compute the same as one process, and each holds and reads only its shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_cases import FAMILIES
from helpers.parity_cases import TOLERANCE, prompts, transformers_logits
from helpers.quantized_checkpoints import Quantised, make_quantised_checkpoint
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.torch_ranks import run_ranks

from sglang_jax.architectures import LayerConfig
from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import ModelConfig, RopeConfig
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.reader import Array, Index
from sglang_jax.errors import ConfigError
from torch_backend.attention.native import NativeAttention
from torch_backend.layers.shard import ModelShard
from torch_backend.models import Transformer, build_model
from torch_backend.native_operations import NativeOperations
from torch_backend.weights import load_weights

EXPERTS = ("gpt_oss", "qwen2_moe")
"""With biases of experts, which one rank adds; with a shared expert."""

STEPS = ({0: 20, 1: 11}, {0: 1, 1: 9, 2: 7}, {0: 1, 2: 1, 1: 14})

FORM: dict[str, Any] = {
    "architecture": "qwen3",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(),
    "max_position": 128,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "eos_token_ids": (1,),
    "dtype": "float32",
}
CONFIG = dense_decoder(**FORM)

HYBRID_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {"conv_bias": True}),
    ("qwen3_5_text", {"linear_num_key_heads": 1}),
    ("qwen3_next", {"linear_num_key_heads": 1}),
    ("mamba2", {}),
    ("mamba2", {"n_groups": 1}),
    ("falcon_h1", {}),
    ("nemotron_h", {}),
]
"""Also with one key head, or one group whose norm covers all heads, for two ranks."""


@dataclass(frozen=True)
class OneOf:
    """One of several ranks, without the others."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is computed here")

    all_gather_last = all_reduce

    def minimum(self, value: int) -> int:
        return value

    def on_host(self) -> OneOf:
        return self


class CountingReader(DummyReader):
    """Counts the values read from each tensor."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, seed=4)
        self.values: Counter[str] = Counter()

    def read(self, name: str, index: Index | None = None) -> Array:
        found = super().read(name, index)
        self.values[name] += found.size
        return found


def load(config: ModelConfig, rank: int, size: int) -> tuple[Transformer, CountingReader]:
    """With plain matrices, so that tests can inspect them."""
    parallel, reader = OneOf(rank, size), CountingReader(config)
    model = build_model(
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        operations=NativeOperations(),
        attention=NativeAttention(),
        parallel=parallel,
    )
    load_weights(model, reader, config, pack=False)
    return model, reader


def test_two_processes_compute_what_one_does_and_transformers(tmp_path: Path) -> None:
    """Biases that must be added once, one kv head for two ranks, a vocabulary not divisible by two, norms of sums over
    ranks, and parallel mixers whose sum is reduced once; recurrent layers of each kind.

    Against transformers: norms over the heads of all ranks, also of one kv head that both have; layers some of
    which have fewer kv heads than there are ranks, and norms of values; sinks of each rank's heads.

    Matrices of 8 bits, of which each rank has a shard with the scales of its rows.
    """
    one_process: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", {"vocab_size": 385}),
        *((FAMILIES[name].architecture, FAMILIES[name].changes) for name in ("gemma2", "cohere2")),
        *HYBRID_FORMS,
    ]
    names = ("olmo2", "gemma4", "granite_swa", *EXPERTS)
    transformers = [
        *((each.architecture, each.changes) for each in map(FAMILIES.get, names)),
        ("olmo2", {"num_key_value_heads": 1}),
    ]
    cases = [*one_process, *transformers]
    folders = [make_tiny_checkpoint(tmp_path / str(number), name, **more) for number, (name, more) in enumerate(cases)]
    for number, (name, kind) in enumerate((("qwen3", Quantised.FP8_TENSOR), ("qwen2_moe", Quantised.INT8_W8A8))):
        folders.insert(0, tmp_path / f"8 bits {number}")
        make_quantised_checkpoint(folders[0], name, kind)
    cases, one_process = [("", {})] * 2 + cases, [("", {})] * 2 + one_process
    sequences = prompts()[:3]
    # Once more in four shards, whose logits are the same bits with one process.
    folders, options = [*folders, folders[3]], [{}] * len(folders) + [{"fixed": True, "num_shards": 4}]
    of_experts = [number for number, (name, _) in enumerate(cases) if name in ("gpt_oss", "qwen2_moe")]
    options = [{"expert_parts": 2} if number in of_experts[1:] else each for number, each in enumerate(options)]
    ranks = run_ranks(folders, 2, sequences, STEPS, tmp_path, options)
    in_shards = TorchPagedModel(folders[-1], **options[-1]).run(sequences, STEPS)
    assert all(np.array_equal(*both) for found in ranks for both in zip(found[-1], in_shards, strict=True))
    for number, (architecture, changes) in enumerate(cases):
        if number < len(one_process):
            expected, tolerance = TorchPagedModel(folders[number]).run(sequences, STEPS), 1e-5
        else:
            expected, tolerance = [transformers_logits(architecture, each, **changes) for each in sequences], TOLERANCE
        for found in ranks:
            for logits, wanted in zip(found[number], expected, strict=True):
                assert len(logits)
                assert np.abs(logits - wanted[: len(logits)]).max() < tolerance


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shards_make_up_the_whole(size: int) -> None:
    whole, _ = load(CONFIG, 0, 1)
    parts = [load(CONFIG, rank, size)[0] for rank in range(size)]
    layer, layers = whole.decoder_layers[1], [part.decoder_layers[1] for part in parts]

    vocabulary = torch.cat([part.embeddings[0].matrix.weight for part in parts])
    assert torch.equal(vocabulary[:97], whole.embeddings[0].matrix.weight)
    assert not vocabulary[97:].any()
    heads = torch.cat([part.head.linears[0].matrix.weight for part in parts])
    assert torch.equal(heads[:97], whole.head.linears[0].matrix.weight)

    for value, values in (
        (layer.attention.output.matrix.weight, [part.attention.output.matrix.weight for part in layers]),
        (layer.feed_forward.down.matrix.weight, [part.feed_forward.down.matrix.weight for part in layers]),
    ):
        assert torch.equal(torch.cat(values, dim=1), value)
    gates, ups = zip(*(part.feed_forward.gate_up.matrix.weight.chunk(2) for part in layers), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), layer.feed_forward.gate_up.matrix.weight)

    queries, keys, values = layer.attention.qkv.matrix.weight.view(12, 16, 32).split([8, 2, 2])
    for rank, part in enumerate(layers):
        mine = part.attention.qkv.matrix.weight.view(-1, 16, 32)
        per_rank, kv = 8 // size, ModelShard.of(CONFIG, rank, Parallelism(size)).kv_heads(2)
        assert len(kv) == max(2 // size, 1)
        expected = (queries[rank * per_rank : (rank + 1) * per_rank], keys[kv], values[kv])
        assert torch.equal(mine, torch.cat(expected))
        # each of its heads finds its own kv head among the rank's
        assert kv.start == rank * per_rank // 4

    assert [part.feed_forward.down.matrix.bias is None for part in layers] == [False] + [True] * (size - 1)
    assert [part.attention.output.matrix.bias is None for part in layers] == [False] + [True] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_reads_only_its_shard(size: int) -> None:
    _, whole = load(CONFIG, 0, 1)
    _, part = load(CONFIG, 1, size)
    first_alone = {name for name in whole.values if name.endswith(("o_proj.bias", "down_proj.bias"))}
    rows = -(-97 // size)
    assert part.values.keys() == whole.values.keys() - first_alone
    for name in part.values:
        kind = name.split(".")[-2]
        if kind.endswith("norm"):
            share = 1
        elif kind in ("k_proj", "v_proj"):
            share = min(size, 2)
        else:
            share = size
        if kind in ("embed_tokens", "lm_head"):
            assert part.values[name] == len(range(97)[rows : 2 * rows]) * 32
        else:
            assert part.values[name] == whole.values[name] // share, name


@pytest.mark.parametrize(
    ("change", "size"),
    [({"num_heads": 6}, 4), ({"num_kv_heads": 4, "num_heads": 12}, 6), ({"intermediate_size": 50}, 4)],
)
def test_models_that_cannot_be_sharded_are_refused(change: dict[str, int], size: int) -> None:
    config = dense_decoder(**FORM | change)
    with pytest.raises(ConfigError, match=rf"over {size} devices: choose a tp_size"):
        ModelShard.of(config, 0, Parallelism(size))


@pytest.mark.parametrize("size", [2, 4])
def test_layers_are_sharded_by_their_own_heads(size: int) -> None:
    def changed(layer: LayerConfig, **heads: int) -> LayerConfig:
        return replace(layer, mixer=replace(layer.mixer, **heads))

    first, second = CONFIG.layers
    config = replace(CONFIG, layers=(changed(first, num_heads=4, num_kv_heads=4), changed(second, num_kv_heads=1)))
    whole, _ = load(config, 0, 1)
    parts = [load(config, rank, size)[0] for rank in range(size)]
    for number, (heads, kv_heads) in enumerate(((4, 4), (8, 1))):
        split = (
            whole.decoder_layers[number].attention.qkv.matrix.weight.view(-1, 16, 32).split([heads, kv_heads, kv_heads])
        )
        for rank, part in enumerate(parts):
            own = part.decoder_layers[number].attention.qkv.matrix.weight.view(-1, 16, 32)
            mine = slice(rank * heads // size, (rank + 1) * heads // size)
            kv = slice(0, 1) if kv_heads == 1 else slice(rank * kv_heads // size, (rank + 1) * kv_heads // size)
            assert torch.equal(own, torch.cat([split[0][mine], split[1][kv], split[2][kv]]))
    with pytest.raises(ConfigError, match="8 heads and 3 kv heads cannot be spread over 2"):
        ModelShard.of(replace(CONFIG, layers=(first, changed(second, num_kv_heads=3))), 0, Parallelism(2))
