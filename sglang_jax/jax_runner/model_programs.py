"""The programs of a model, from the shapes of its weights, so that they can be built before weights are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.draft_model import DraftModel
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.step import DeviceState, KVCaches, ModelFunctions, Weights, empty_rows
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import named_sharding
from sglang_jax.models import Transformer
from sglang_jax.models.kv_cache import KVCacheSpec
from sglang_jax.runner.page_tables import TableLayout
from sglang_jax.runner.plan import RunnerSpec

T = TypeVar("T")


def programs_of(
    model: Transformer,
    parallel: TensorParallel,
    cache: KVCacheSpec,
    spec: RunnerSpec,
    config: EngineConfig,
    mesh: Mesh,
    draft: tuple[Transformer, TensorParallel, KVCacheSpec] | None = None,
) -> Programs:
    """The programs of a model, none of which is built yet. `model`, and that of `draft`: shapes, which are changed from
    the layout of loading to that of computing, so load weights into another model of the same config."""
    functions, placed = _placed(model, parallel, mesh)
    kv, draft_model, table = cache.memory(mesh), None, TableLayout.of(spec)
    if draft is not None:
        own, own_parallel, own_cache = draft
        own_functions, own_placed = _placed(own, own_parallel, mesh)
        windows = tuple(pool.window for pool in spec.pools if pool.draft)
        draft_model = DraftModel(own_functions, table.draft, len(own_placed), own_parallel.config.num_layers, windows)
        placed, kv = [*placed, *own_placed], (*kv, *own_cache.memory(mesh))
    rows = replicated_shapes(jax.eval_shape(partial(empty_rows, spec, None, drafted=draft is not None)), mesh)
    return Programs(
        functions,
        placed,
        DeviceState(kv, *rows),
        Buckets.ladder(
            spec.max_rows, spec.token_budget, config.page_size, len(spec.pools), pools=spec.pooling is not None
        ),
        config.page_size,
        mesh,
        table,
        spec.max_samples - 1,
        draft_model,
    )


def _placed(
    model: Transformer, parallel: TensorParallel, mesh: Mesh
) -> tuple[ModelFunctions, list[jax.ShapeDtypeStruct]]:
    """Changes a model to the layout of computing. Returns its functions, and the shapes of its weights with their
    shardings."""
    model.repack(parallel.size)
    functions, weights = split_model(model)
    functions = replace(functions, shards_on_device=parallel.shards_on_device)
    return functions, [
        jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=named_sharding(mesh, parameter.axes))
        for weight, parameter in zip(weights, parameters(model), strict=True)
    ]


def split_model(model: Transformer) -> tuple[ModelFunctions, Weights]:
    """A model as functions of a flat list of its weights, which is fast to pass in every step."""
    graph, state = nnx.split(model)
    weights, structure = jax.tree.flatten(state)

    def merge(weights: Weights) -> Transformer:
        return nnx.merge(graph, jax.tree.unflatten(structure, weights))

    def forward(weights: Weights, batch: ForwardBatch, kv: KVCaches) -> tuple[jax.Array, KVCaches]:
        return merge(weights)(batch, kv)

    def logits(weights: Weights, hidden: jax.Array) -> jax.Array:
        return merge(weights).logits(hidden)

    pooler = model.config.pooler
    pooling = None if pooler is None else pooler.pooling
    return ModelFunctions(forward, logits, model.attention.tile_rows, pooling=pooling), weights


def parameters(model: Transformer) -> list[Parameter]:
    return jax.tree.leaves(nnx.state(model), is_leaf=lambda node: isinstance(node, Parameter))


def replicated_shapes(arrays: T, mesh: Mesh) -> T:
    everywhere = NamedSharding(mesh, PartitionSpec())
    shape = partial(jax.ShapeDtypeStruct, sharding=everywhere)
    return cast(T, jax.tree.map(lambda array: shape(array.shape, array.dtype), arrays))
