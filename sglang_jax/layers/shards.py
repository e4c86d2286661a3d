"""Layers and heads in a fixed number of shards, for results that do not depend on the number of devices.

Each device computes its shards in a loop, all in the same shapes, and the sum over shards is a binary tree, of which a
device sums a subtree. The idea is published for products on GPUs ("tree-based invariant kernels", Zhang et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.model_config import LayerConfig
from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, plan_writes
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.matrix import Matrix
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.part import LayerMemory, LayerPart, LayerStep
from sglang_jax.layers.sharding import (
    KV_AXES,
    MESH_AXIS,
    TENSOR,
    automatic_mesh,
    has_first_copy,
    parallelism_of,
    partition_spec,
    spec_of_state,
)

_WHOLE = PartitionSpec()


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards of a model: `total` on all devices. `implementation`: of attention."""

    total: int
    implementation: AttentionImplementation

    def apply(
        self, layer: LayerConfig, parts: Sequence[LayerPart], x: jax.Array, step: LayerStep, memory: LayerMemory
    ) -> tuple[jax.Array, LayerMemory]:
        """The sum of the outputs of parts of a layer that read the same input, `[T, hidden]`, and the layer's memory
        after the step, in which each shard has its own pages and slots: see `kv_cache_spec`."""
        weights = _Weights.of(tuple(parts))
        run = partial(self._on_device, weights, layer)
        mesh = automatic_mesh()
        if mesh is None:
            return run(weights.arrays, x, step, memory, devices=1)
        places = _memory_specs(layer, memory)
        return jax.shard_map(
            partial(run, devices=parallelism_of(mesh).devices),
            mesh=mesh,
            in_specs=(weights.specs, _WHOLE, _WHOLE, places),
            out_specs=(_WHOLE, places),
            check_vma=False,
        )(weights.arrays, x, step, memory)

    def _on_device(
        self,
        weights: _Weights,
        layer: LayerConfig,
        arrays: list[jax.Array],
        x: jax.Array,
        step: LayerStep,
        memory: LayerMemory,
        *,
        devices: int,
    ) -> tuple[jax.Array, LayerMemory]:
        own = self.total // devices

        def one(number: jax.Array, found: tuple[jax.Array, LayerMemory]) -> tuple[jax.Array, LayerMemory]:
            outputs, memory = found
            counted = memory.expert_tokens
            at = self._step_of_shard(layer, step, memory, number, own)
            output = None
            for part in weights.of_shard(arrays, number, own, devices):
                more, memory = part(x, at, memory)
                output = more if output is None else output + more
            assert output is not None
            if counted is not None:  # all shards choose the same experts, so one counts
                memory = replace(memory, expert_tokens=jnp.where(number == 0, memory.expert_tokens, counted))
            return lax.dynamic_update_index_in_dim(outputs, output, number, 0), memory

        outputs, memory = _loop(own, one, (jnp.zeros((own, *x.shape), x.dtype), memory))
        total = _tree(list(outputs.astype(jnp.float32)))
        if devices > 1:
            total = _tree(list(lax.all_gather(total, TENSOR)))
        return total.astype(x.dtype), memory

    def _step_of_shard(
        self, layer: LayerConfig, step: LayerStep, memory: LayerMemory, number: jax.Array, own: int
    ) -> LayerStep:
        """A step with the pages and state slots of a device's shard. Those of padding are 0 in every shard."""
        batch = step.batch
        if memory.pages is not None and layer.caches_heads:
            pages, page_size = memory.pages.shape[0] // own, memory.pages.shape[3]
            slots = _moved(batch.write_slots, number * (pages * page_size), page_size)
            batch = replace(
                batch,
                write_slots=slots,
                page_table=_moved(batch.page_table, number * pages, 1),
                write_plan=plan_writes(self.implementation, memory.pages, slots),
            )
        if memory.states and batch.states is not None:
            rows, first = batch.states, number * (memory.states[0].shape[0] // own)
            rows = replace(rows, begin=_moved(rows.begin, first, 1), own=_moved(rows.own, first, 1))
            batch = replace(batch, states=rows)
        return replace(step, batch=batch)

    def columns(
        self, matrix: Matrix, hidden: jax.Array, function: Callable[[Matrix, jax.Array], jax.Array]
    ) -> jax.Array:
        """A function of the head's matrix and hidden states `[m, hidden]`, by shards of the columns of its result
        `[m, vocab]`, which are on the devices of their shards."""
        weights = _Weights.of((matrix,))
        mesh = automatic_mesh()
        devices = 1 if mesh is None else parallelism_of(mesh).devices
        own = self.total // devices

        def run(arrays: list[jax.Array], hidden: jax.Array) -> jax.Array:
            def of_shard(number: jax.Array, hidden: jax.Array) -> jax.Array:
                [shard] = weights.of_shard(arrays, number, own, devices)
                return in_tiles(partial(function, shard), hidden, self.implementation.tile_rows)

            width = jax.eval_shape(of_shard, jnp.int32(0), hidden).shape[1]

            def one(number: jax.Array, found: jax.Array) -> jax.Array:
                return lax.dynamic_update_slice_in_dim(found, of_shard(number, hidden), number * width, 1)

            return _loop(own, one, jnp.zeros((len(hidden), own * width), jnp.float32))

        if mesh is None:
            return run(weights.arrays, hidden)
        columns = PartitionSpec(None, TENSOR)
        return jax.shard_map(run, mesh=mesh, in_specs=(weights.specs, _WHOLE), out_specs=columns, check_vma=False)(
            weights.arrays, hidden
        )


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of some modules, of which each device has those of adjacent shards."""

    graph: nnx.GraphDef[Any]
    structure: Any
    parameters: list[Parameter]
    arrays: list[jax.Array]

    @classmethod
    def of(cls, modules: tuple[Any, ...]) -> _Weights:
        graph, state = nnx.split(modules)
        arrays, structure = jax.tree.flatten(state)
        found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Parameter))
        return cls(graph, structure, found, arrays)

    @property
    def specs(self) -> list[PartitionSpec]:
        return [partition_spec(parameter.axes) for parameter in self.parameters]

    def of_shard(self, arrays: list[jax.Array], number: jax.Array, own: int, devices: int) -> tuple[Any, ...]:
        """The modules with the weights of this device's shard `number` of `own`."""

        def of(parameter: Parameter, array: jax.Array) -> jax.Array:
            axis = next((axis for axis, name in enumerate(parameter.axes) if own > 1 and MESH_AXIS[name]), None)
            if axis is not None:
                length = array.shape[axis] // own
                return lax.dynamic_slice_in_dim(array, number * length, length, axis)
            if parameter.kind is ParameterKind.BIAS and parameter.axes[-1] is Axis.HIDDEN:
                # One shard has the bias of an output: the sum over shards adds it once.
                first = number == 0
                if devices > 1:
                    first &= has_first_copy(parameter.axes)
                return jnp.where(first, array, jnp.zeros_like(array))
            return array

        shard = list(map(of, self.parameters, arrays))
        found: tuple[Any, ...] = nnx.merge(self.graph, jax.tree.unflatten(self.structure, shard))
        return found


def _moved(places: jax.Array, by: jax.Array, padding: int) -> jax.Array:
    """Places of another shard; those below `padding` stay."""
    return jnp.where(places < padding, places, places + by)


def _loop(count: int, body: Callable[[jax.Array, Any], Any], found: Any) -> Any:
    """Calls `body` for each of `count` numbers, in a loop whose length the compiler does not know."""
    return lax.fori_loop(jnp.int32(0), lax.optimization_barrier(jnp.int32(count)), body, found)


def _tree(parts: list[jax.Array]) -> jax.Array:
    """The sum of neighbours in pairs until one is left; a last one without a neighbour waits for the next round."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def _memory_specs(layer: LayerConfig, memory: LayerMemory) -> LayerMemory:
    """The sharding of each array of a layer's memory."""
    pages = partition_spec(KV_AXES) if layer.caches_heads else _WHOLE
    states = () if layer.recurrent is None else tuple(map(spec_of_state, layer.recurrent.state))
    return LayerMemory(
        None if memory.pages is None else pages,  # type: ignore[arg-type]
        states,  # type: ignore[arg-type]
        None if memory.expert_tokens is None else _WHOLE,  # type: ignore[arg-type]
    )
