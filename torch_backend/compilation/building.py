"""Builds a model for the runner from a checkpoint of a transformers model."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.opening import Checkpoint
from sglang_jax.config import EngineConfig
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.compilation.expected_matches import ExpectedMatches
from torch_backend.compilation.hf_model import config_of, empty_model
from torch_backend.compilation.manager import PassManager
from torch_backend.compilation.rank_shard import shard_model
from torch_backend.compilation.trace import trace
from torch_backend.compilation.traced_model import ReadWeight, TracedTransformer, check_sites
from torch_backend.compilation.twin import check_twin
from torch_backend.compilation.weights import CheckpointWeights, RandomWeights, has_own_head
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations
from torch_backend.parallel import SINGLE, TensorParallel


def build_traced(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    attention: AttentionImplementation,
    parallel: TensorParallel = SINGLE,
) -> tuple[TracedTransformer, ReadWeight]:
    """Returns a model, or a rank's shard, without values, and the function that reads them, for its `load`. All ranks
    must call it. Raises `ConfigError` if the model cannot be traced, differs from its config, or cannot be sharded, if
    a pass finds too few places, or if the tiny twin differs from transformers; `CheckpointError` for tensors that do
    not fit."""
    assert checkpoint.transformers_config is not None
    manager = PassManager(config.passes)
    dump = config.dump_graphs if parallel.rank == 0 else None
    shard = ModelShard.of(checkpoint.config, parallel.rank, Parallelism(parallel.size))
    values = checkpoint.transformers_config
    empty = empty_model(config_of(values), dtype)
    if checkpoint.reader is not None and has_own_head(empty, checkpoint.reader):
        values = {**values, "tie_word_embeddings": False}
        empty = empty_model(config_of(values), dtype)
    weights: CheckpointWeights | RandomWeights
    if checkpoint.reader is None:  # dummy weights
        weights = RandomWeights.of(empty, config.random_seed)
    else:
        weights = CheckpointWeights.of(empty, checkpoint.reader)
    part = shard_model(empty, checkpoint.config, shard)
    weights = replace(weights, cuts=part.cuts)
    check_twin(values, manager, None if dump is None else dump / "twin", parallel.on_host())
    program = trace(empty)
    manager.run(program, ExpectedMatches.of_model(empty, program, checkpoint.config.num_layers, part.marks), dump)
    check_sites(program, checkpoint.config, shard)
    model = TracedTransformer(
        program, checkpoint.config, device=device, operations=operations, attention=attention, parallel=parallel
    )
    return model, weights.read
