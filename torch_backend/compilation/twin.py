"""The twin: a tiny random model with a config's structure, rewritten and compared with transformers' own results. With
it, each start verifies on this machine, with its versions of transformers and torch, that a model's rewritten graph
computes what transformers does: over pages, in chunks, token by token, and in steps that mix both."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import num_paged_groups
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.transformers_config import transformers_model_config, under_usual_names
from sglang_jax.errors import ConfigError
from torch_backend.attention.native import NativeAttention
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.compilation.expected_matches import ExpectedMatches
from torch_backend.compilation.hf_model import config_of, eager_model, empty_model
from torch_backend.compilation.manager import PassManager
from torch_backend.compilation.rank_shard import shard_model
from torch_backend.compilation.trace import trace
from torch_backend.compilation.traced_model import TracedTransformer, check_sites
from torch_backend.compilation.weights import RandomWeights
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.shard import ModelShard
from torch_backend.native_operations import NativeOperations
from torch_backend.parallel import SINGLE, TensorParallel

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Limit for logits in float32, relative to the largest (or to 1)."""

_HEAD_DIM = 16
_VOCABULARY = 128
_INTERMEDIATE = 48
_WINDOW = 6
_PAGE = 4
_COLUMNS = 8
_STEPS: Sequence[Mapping[int, int]] = ({0: 9}, {0: 1, 1: 10}, {0: 1, 1: 1}, {1: 1, 0: 7}, {1: 5, 0: 3}, {0: 1})
"""Tokens of each of two sequences by step; sequences that decode are first."""


def check_twin(
    values: Mapping[str, Any], manager: PassManager, dump: Path | None = None, parallel: TensorParallel = SINGLE
) -> None:
    """Compares the twin of a config of `values`, sharded over the ranks of `parallel`, whose sums are on the host, with
    transformers. Its graphs are written to the folder `dump`. Raises `ConfigError` if the two differ, or if the twin
    cannot be created, traced or rewritten."""
    begin = time.perf_counter()
    config = twin_config(values, parallel.size)
    eager = eager_model(config, torch.float32)
    weights = RandomWeights.of(eager)
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            parameter.copy_(weights.tensor(name))
    difference = _compare(eager, _rewritten(config, weights, manager, dump, parallel))
    if not difference < _TOLERANCE:
        raise ConfigError(
            f"model_impl transformers: a tiny {config.model_type}, rewritten like this model, differs from "
            f"transformers by {difference:.2g} of its largest logit (limit {_TOLERANCE:g}), so outputs would be "
            "wrong. Try --compile-passes none to find out whether a pass causes it; --dump-graphs DIR shows each pass"
        )
    logger.info(
        "A tiny %s, rewritten in the same way, differs from transformers by at most %.1g (%.1f s)",
        config.model_type,
        difference,
        time.perf_counter() - begin,
    )


def twin_config(values: Mapping[str, Any], ranks: int = 1) -> PreTrainedConfig:
    """The config with few small heads, a small vocabulary and window, and the fewest layers that include each kind; all
    else is the model's. It can be sharded over `ranks` if the model can."""
    whole = config_of(values)
    names = whole.attribute_map
    full = under_usual_names(whole.to_dict(), names)
    full_kv_heads = full.get("num_key_value_heads") or full["num_attention_heads"]
    group = full["num_attention_heads"] // full_kv_heads
    kv_heads = min(full_kv_heads, 2 * ranks)  # a single one would not show which queries read which keys
    head_dim = (
        full["hidden_size"] // full["num_attention_heads"] if _has_lists(full.get("rope_parameters")) else _HEAD_DIM
    )
    layers = _layers_of_each_kind(full)
    tiny: dict[str, Any] = {
        "hidden_size": kv_heads * group * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "vocab_size": ranks * _VOCABULARY + full["vocab_size"] % ranks,
    }
    optional = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": math.lcm(_INTERMEDIATE, ranks),
        "sliding_window": _WINDOW,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    tiny |= {name: new for name, new in optional.items() if full.get(name) is not None}
    cut = {name: each[:layers] for name, each in values.items() if _is_by_layer(each, full["num_hidden_layers"])}
    own = {names.get(name, name): new for name, new in tiny.items()}
    return config_of({**values, **cut, **own})


def _has_lists(rope: object) -> bool:
    """Whether rotary frequencies are listed one by one, for heads of one size."""
    return isinstance(rope, dict) and any(isinstance(each, list) for each in rope.values())


def _is_by_layer(value: object, layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers


def _layers_of_each_kind(full: Mapping[str, Any]) -> int:
    count: int = full["num_hidden_layers"]
    kinds = list(zip(*(each for each in full.values() if _is_by_layer(each, count)), strict=True))
    last = max((kinds.index(kind) for kind in kinds), default=0)
    return min(count, max(2, last + 1))


def _rewritten(
    config: PreTrainedConfig,
    weights: RandomWeights,
    manager: PassManager,
    dump: Path | None,
    parallel: TensorParallel = SINGLE,
) -> TracedTransformer:
    """The twin, or a rank's shard of it, rewritten by the passes."""
    known = under_usual_names(config.to_dict(), config.attribute_map)
    described = transformers_model_config(JsonFields(known, Path("config.json")), (), "float32")
    model = empty_model(config, torch.float32)
    shard = ModelShard.of(described, parallel.rank, Parallelism(parallel.size))
    part = shard_model(model, described, shard)
    program = trace(model)
    manager.run(program, ExpectedMatches.of_model(model, program, described.num_layers, part.marks), dump)
    check_sites(program, described, shard)
    twin = TracedTransformer(
        program,
        described,
        device=torch.device("cpu"),
        operations=NativeOperations(),
        attention=NativeAttention(),
        parallel=parallel,
    )
    twin.load(replace(weights, cuts=part.cuts).read, pack=False)
    return twin


def _compare(eager: PreTrainedModel, twin: TracedTransformer) -> float:
    """The largest difference of two models' logits over `_STEPS`, relative to the largest logit."""
    counts = [sum(step.get(row, 0) for step in _STEPS) for row in range(2)]
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, _VOCABULARY, (count,), generator=generator) for count in counts]
    with torch.inference_mode():
        expected = [eager(input_ids=text[None], use_cache=False).logits[0] for text in texts]
        memory = [_empty_pages(twin, number) for number in range(twin.config.num_layers)]
        # Pages in random order, so that no page number is correct by chance.
        table = 1 + torch.randperm(2 * _COLUMNS, generator=generator).int().view(2, _COLUMNS)
        done, worst = [0, 0], 0.0
        for step in _STEPS:
            batch = _batch(texts, done, step, table, num_paged_groups(twin.config))
            found = twin.logits(twin(batch, memory))
            for (row, count), part in zip(step.items(), torch.split(found, list(step.values())), strict=True):
                worst = max(worst, float((part - expected[row][done[row] : done[row] + count]).abs().max()))
                done[row] += count
    return worst / max(1.0, *(float(each.abs().max()) for each in expected))


def _empty_pages(twin: TracedTransformer, layer: int) -> LayerMemory:
    """Pages of a layer full of NaN, which shows reads of slots that were never written."""
    attention = twin.config.layers[layer].kv_attention
    assert attention is not None
    kv_heads = len(twin.shard.kv_heads(attention.num_kv_heads))
    shape = (1 + 2 * _COLUMNS, kv_heads, _PAGE, attention.head_dim)
    return LayerMemory(KVPages(torch.full(shape, torch.nan), torch.full(shape, torch.nan)))


def _batch(
    texts: Sequence[torch.Tensor], done: Sequence[int], step: Mapping[int, int], table: torch.Tensor, groups: int
) -> ForwardBatch:
    rows = list(step)
    places = [torch.arange(done[row], done[row] + count) for row, count in step.items()]
    slots = [table[row][place // _PAGE].long() * _PAGE + place % _PAGE for row, place in zip(rows, places, strict=True)]
    same = GroupPages(torch.cat(slots), table[rows])
    starts = torch.tensor([0, *step.values()]).cumsum(0)
    decoding = [count == 1 for count in step.values()]
    return ForwardBatch(
        tokens=torch.cat([texts[row][place] for row, place in zip(rows, places, strict=True)]).int(),
        positions=torch.cat(places).int(),
        write_slots=same.write_slots,
        page_table=same.page_table,
        kv_lens=torch.tensor([done[row] + count for row, count in step.items()], dtype=torch.int32),
        query_starts=starts.int(),
        num_decode=next((number for number, single in enumerate(decoding) if not single), len(decoding)),
        further=(same,) * (groups - 1),
    )
