"""Mixtures of experts: a router, experts, and possibly a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.reader import Role
from sglang_jax.kernels.experts import (
    ExpertBlocks,
    ExpertChoice,
    ExpertGroups,
    ExpertMatrices,
    ExpertProducts,
    ExpertWeights,
    multiply_experts,
)
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.block_matrix import BlockMatrix, BlockProduct
from sglang_jax.layers.feed_forward import ACTIVATIONS
from sglang_jax.layers.grouped_matrix import GroupedExperts, GroupProduct
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.parameter import Parameter, matmul, parameter
from sglang_jax.layers.part import LayerMemory, LayerStep, PartOptions
from sglang_jax.layers.sharding import TENSOR, automatic_mesh, has_first_copy, partition_spec

_FLOAT32 = jnp.dtype(jnp.float32)
_NUMBERED = (Axis.ROUTED, Axis.EXPERTS)
"""The experts as a router numbers them, and as devices have them."""


class Experts(nnx.Module):
    """See `ExpertsConfig`. The router is float32."""

    def __init__(self, config: ExpertsConfig, options: PartOptions) -> None:
        self.config = config
        self.for_tpu, self.tile_rows = options.implementation.for_tpu, options.implementation.tile_rows
        self.dtype, routed, experts = (options.dtype, *((axis, config.num_experts) for axis in _NUMBERED))
        stream, inner = (Axis.HIDDEN, options.hidden_size), (Axis.EXPERT_INTERMEDIATE, config.size)
        hidden = (Axis.LATENT, config.latent) if config.latent else stream

        def bias(part: Part, *axes: tuple[Axis, int], wanted: bool = config.bias) -> Parameter | None:
            return parameter(axes, _FLOAT32, part, kind=ParameterKind.BIAS) if wanted else None

        self.router = parameter([stream, routed], _FLOAT32, Part.ROUTER)
        self.router_bias = bias(Part.ROUTER, routed, wanted=config.router_bias)
        self.correction = bias(Part.ROUTER_CORRECTION, routed, wanted=config.correction)

        self.input = Linear([stream], [hidden], (Part.EXPERTS_INPUT,), options) if config.latent else None
        self.output = Linear([hidden], [stream], (Part.EXPERTS_OUTPUT,), options) if config.latent else None
        columns = {**dict.fromkeys(config.inner_parts, hidden), Part.EXPERT_DOWN: inner}
        in_groups = {part: _in_groups(part, column, options) for part, column in columns.items()}

        def matrices(
            part: Part, row: tuple[Axis, int], column: tuple[Axis, int]
        ) -> tuple[Parameter | BlockMatrix | GroupedExperts, Parameter | None]:
            """The matrices of all experts, and a scale per row if they have 8 bits."""
            encoding, sizes = options.encoding_of(part), [experts, inner, hidden]
            product, grouped = _product_of(part, options), in_groups[part]
            if grouped is not None and None not in in_groups.values():
                return GroupedExperts(grouped, experts, column, row, part), None
            if isinstance(product, BlockProduct) and product.serves_stacks(row[1], column[1]):
                return BlockMatrix(product, [column], [experts, row], (part,), options.dtype), None
            if encoding is None or encoding.block is not None:
                return parameter(sizes, options.dtype, part), None
            values = parameter(sizes, jnp.dtype(encoding.values.value), part, role=Role.VALUES)
            return values, parameter([experts, row], _FLOAT32, part, role=Role.SCALES)

        gated = Part.EXPERT_GATE in config.inner_parts
        self.gate, self.gate_scales = matrices(Part.EXPERT_GATE, inner, hidden) if gated else (None, None)
        self.gate_bias = bias(Part.EXPERT_GATE, experts, inner, wanted=config.bias and gated)
        self.up, self.up_scales = matrices(Part.EXPERT_UP, inner, hidden)
        self.up_bias = bias(Part.EXPERT_UP, experts, inner)
        self.down, self.down_scales = matrices(Part.EXPERT_DOWN, hidden, inner)
        self.down_bias = bias(Part.EXPERT_DOWN, experts, hidden)
        self.shared = SharedExpert(config, options) if config.shared_size else None

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """See `LayerPart`. Padding chooses no expert."""
        config = self.config
        choice = ExpertChoice(*in_tiles(self._choose, (x, step.padding), self.tile_rows))
        weights = self._weights()
        inputs = x if self.input is None else in_tiles(self.input, x, self.tile_rows)
        if config.scores_of_inputs:
            inputs, choice = inputs.astype(jnp.float32) * choice.scores, choice.unweighted()
        found = _on_each_device(self._multiply_own, inputs.astype(self.dtype), weights, choice)
        if self.output is not None:
            found = in_tiles(self._to_stream, found, self.tile_rows)
        if self.shared is not None:
            found = found + self.shared(x)
        if memory.expert_tokens is not None:
            chosen = choice.tokens_of(config.num_experts)
            memory = replace(memory, expert_tokens=_add_to_words(memory.expert_tokens, chosen))
        return found.astype(x.dtype), memory

    def _to_stream(self, latents: jax.Array) -> jax.Array:
        """Float32 `[T, latent]` → float32 `[T, hidden]`."""
        assert self.output is not None
        return self.output(latents.astype(self.dtype)).astype(jnp.float32)

    def _products(self, tokens: int, weights: ExpertWeights) -> ExpertProducts:
        if weights.in_groups:
            return ExpertProducts.GROUPS
        if self.tile_rows is not None:
            return ExpertProducts.TILES
        if not self.for_tpu:
            return ExpertProducts.of(self.config, tokens, for_tpu=False)
        sizes = tokens, self.config.chosen, self.config.num_experts
        fits = self.dtype == jnp.bfloat16 and weights.part(*sizes) is not None
        return ExpertProducts.of(self.config, tokens, for_tpu=True, fits=fits, widened=weights.widened)

    def _multiply_own(self, x: jax.Array, weights: ExpertWeights, choice: ExpertChoice) -> jax.Array:
        """`multiply_experts` by those experts whose `weights` this device has; the others count as not chosen."""
        experts = self.config.num_experts
        if weights.count < experts:
            choice = choice.among(weights.count, jax.lax.axis_index("expert") * weights.count)
        products = self._products(len(x), weights)
        found = multiply_experts(products, x, weights, choice, self._gated, self.tile_rows, experts)
        biases = weights.down_bias
        if biases is None:
            return found
        return found + in_tiles(lambda scores: matmul(scores, biases), choice.by_expert(weights.count), self.tile_rows)

    def _choose(self, tokens: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The fields of an `ExpertChoice` for tokens `[T, hidden]`, of which some are padding, bool `[T]`."""
        x, padding = tokens
        logits = matmul(x.astype(jnp.float32), self.router[...])
        if self.router_bias is not None:
            logits = logits + self.router_bias[...]
        correction = None if self.correction is None else self.correction[...]
        choice = choose_experts(self.config, logits, correction, padding)
        return choice.experts, choice.scores

    def _weights(self) -> ExpertWeights:
        scales = (self.gate_scales, self.up_scales, self.down_scales)
        further = (self.gate_bias, self.up_bias, self.down_bias, *scales)
        gate = None if self.gate is None else self._matrices(self.gate)
        up, down = map(self._matrices, (self.up, self.down))
        return ExpertWeights(gate, up, down, *(None if array is None else array[...] for array in further))

    def _matrices(self, stack: Parameter | BlockMatrix | GroupedExperts) -> ExpertMatrices:
        if isinstance(stack, GroupedExperts):
            return ExpertGroups(stack.weights(), stack.folds, stack.product.interpret)
        if isinstance(stack, BlockMatrix):
            return ExpertBlocks(self.config.num_experts, stack.multiply_one)
        return stack[...]

    def _gated(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        if gate is None:
            return jnp.square(jax.nn.relu(up))
        clamped = self.config.clamped
        if clamped is None:
            return ACTIVATIONS[self.config.activation](gate) * up
        gate, up = jnp.minimum(gate, clamped.limit), jnp.clip(up, -clamped.limit, clamped.limit)
        return (up + 1) * gate * jax.nn.sigmoid(clamped.alpha * gate)


class SharedExpert(nnx.Module):
    """A feed-forward layer for every token, as one of the experts, whose output may have a gate."""

    def __init__(self, config: ExpertsConfig, options: PartOptions) -> None:
        hidden, inner = [(Axis.HIDDEN, options.hidden_size)], [(Axis.INTERMEDIATE, config.shared_size)]
        rows = inner if config.squared_relu else [(Axis.GATE_OR_UP, 2), *inner]
        self.gate_up = Linear(hidden, rows, config.shared_parts, options)
        self.down = Linear(inner, hidden, (Part.SHARED_DOWN,), options)
        one = [*hidden, (Axis.ONE, 1)]
        self.router = parameter(one, _FLOAT32, Part.SHARED_ROUTER) if config.shared_gate else None
        self.activation = None if config.squared_relu else config.activation
        self.tile_rows = options.implementation.tile_rows

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[T, hidden]` → float32 `[T, hidden]`."""
        return in_tiles(self._outputs, x, self.tile_rows)

    def _outputs(self, x: jax.Array) -> jax.Array:
        found = self.down(self._inner(self.gate_up(x)), of_outputs=True).astype(jnp.float32)
        if self.router is None:
            return found
        return found * jax.nn.sigmoid(matmul(x.astype(jnp.float32), self.router[...]))

    def _inner(self, gate_up: jax.Array) -> jax.Array:
        if self.activation is None:
            return jnp.square(jax.nn.relu(gate_up))
        activated = ACTIVATIONS[self.activation](gate_up[:, 0].astype(jnp.float32)).astype(gate_up.dtype)
        return activated * gate_up[:, 1]


def _product_of(part: Part, options: PartOptions) -> BlockProduct | GroupProduct | None:
    encoding = options.encoding_of(part)
    return None if encoding is None else options.block_products(encoding)


def _in_groups(part: Part, inputs: tuple[Axis, int], options: PartOptions) -> GroupProduct | None:
    """The kernel of the matrices of all experts with these inputs, if they are in groups and it serves them."""
    product = _product_of(part, options)
    return product.for_inputs([inputs]) if isinstance(product, GroupProduct) else None


def choose_experts(
    config: ExpertsConfig, logits: jax.Array, correction: jax.Array | None, padding: jax.Array
) -> ExpertChoice:
    """The experts of each token, by the router's logits float32 `[T, experts]`. `correction`: float32 `[experts]`, see
    `ExpertsConfig`; `padding`: bool `[T]`."""
    match config.scores:
        case ExpertScores.SOFTMAX:
            scores = jax.nn.softmax(logits, axis=-1)
        case ExpertScores.SIGMOID:
            scores = jax.nn.sigmoid(logits)
        case ExpertScores.CHOSEN_SOFTMAX:
            scores = logits
    ranked = scores if correction is None else scores + correction
    if config.groups > 1:
        ranked = _in_best_groups(config, ranked)
    experts = jax.lax.top_k(ranked, config.chosen)[1]  # of equal values, the lower index first
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if config.scores is ExpertScores.CHOSEN_SOFTMAX:
        chosen = jax.nn.softmax(chosen, axis=-1)
    if config.renormalised:
        chosen = chosen / (chosen.sum(-1, keepdims=True) + config.added_to_sum)
    unused = padding[:, None]
    return ExpertChoice(jnp.where(unused, config.num_experts, experts), jnp.where(unused, 0.0, chosen * config.scale))


def _add_to_words(words: jax.Array, added: jax.Array) -> jax.Array:
    """Adds int32 `[n]` to `n` sums, stored as uint32 `[2, n]` low and high words: JAX has no 64-bit integers."""
    low = words[0] + added.astype(jnp.uint32)
    return jnp.stack([low, words[1] + (low < words[0])])


def _in_best_groups(config: ExpertsConfig, ranked: jax.Array) -> jax.Array:
    """Ranks with the experts outside the best groups after all others."""
    by_group = ranked.reshape(len(ranked), config.groups, -1)
    best = jax.lax.top_k(by_group, config.best_of_group)[0].sum(-1)
    groups = jax.lax.top_k(best, config.chosen_groups)[1]
    allowed = (groups[..., None] == jnp.arange(config.groups)).any(1)
    return jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def _on_each_device(
    multiply: Callable[[jax.Array, ExpertWeights, ExpertChoice], jax.Array],
    x: jax.Array,
    weights: ExpertWeights,
    choice: ExpertChoice,
) -> jax.Array:
    """Runs `multiply` on each device with its experts, or its shard of their columns, and sums the results."""
    mesh = automatic_mesh()
    if mesh is None:
        return multiply(x, weights, choice)

    def run(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice) -> jax.Array:
        if weights.down_bias is not None:
            # The sum over devices adds the bias of an expert once.
            weights = replace(weights, down_bias=weights.down_bias * has_first_copy((Axis.EXPERTS, Axis.HIDDEN)))
        return jax.lax.psum(multiply(x, weights, choice), TENSOR)

    columns = (Axis.EXPERTS, Axis.EXPERT_INTERMEDIATE, Axis.HIDDEN)
    of_gate = (Axis.EXPERTS, Axis.HIDDEN, Axis.EXPERT_INTERMEDIATE) if weights.in_groups else columns
    of_columns = partition_spec((Axis.EXPERTS, Axis.EXPERT_INTERMEDIATE))
    of_outputs = partition_spec((Axis.EXPERTS, Axis.HIDDEN))
    placed = [
        None if array is None else spec
        for array, spec in (
            (weights.gate_bias, of_columns),
            (weights.up_bias, of_columns),
            (weights.down_bias, of_outputs),
            (weights.gate_scales, of_columns),
            (weights.up_scales, of_columns),
            (weights.down_scales, of_outputs),
        )
    ]
    matrices = (
        jax.tree.map(lambda _, axes=axes: partition_spec(axes), stack)
        for stack, axes in ((weights.gate, of_gate), (weights.up, of_gate), (weights.down, columns))
    )
    specs = ExpertWeights(*matrices, *placed)  # type: ignore[arg-type]
    whole = PartitionSpec()
    return jax.shard_map(run, mesh=mesh, in_specs=(whole, specs, whole), out_specs=whole, check_vma=False)(
        x, weights, choice
    )
