"""Matrices whose weights are quantised in groups, on TPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.parallelism import ONE_DEVICE, Parallelism
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.group_blocks import OF_NVFP4, GroupType, Levels, groups_of
from sglang_jax.checkpoint.reader import Role
from sglang_jax.kernels.expert_groups_pallas import filled_up, folded, folds_of
from sglang_jax.kernels.group_product_pallas import Float4, GroupedWeights, fits, multiply_in_groups
from sglang_jax.layers.parameter import Parameter, Sizes, parameter
from sglang_jax.layers.sharding import MESH_AXIS, TENSOR, automatic_mesh, partition_spec

_IN_ANOTHER_ORDER = {Axis.CHANNELS, Axis.STATE_HEADS}
"""Axes along which each of several devices has several runs of the checkpoint's rows."""


_TWICE_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the floats of 4 bits, by their bits without the sign."""


def levels_in_memory(kind: GroupType) -> jnp.dtype:
    """The dtype of packed levels. Those of NVFP4 are int8, twice the float: with levels of 4 bits, a product would take
    a tpu7x or a v5e longer than in bfloat16."""
    if kind.weights == OF_NVFP4:
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.int4 if kind.levels.bits == 4 else kind.levels.dtype)


@dataclass(frozen=True, slots=True)
class GroupProduct:
    """The TPU kernel of products with matrices in groups of one `kind`, sharded `over` devices. `interpret`: for tests
    without a TPU. `float4`: how floats of 4 bits are kept."""

    kind: GroupType
    over: Parallelism = ONE_DEVICE
    interpret: bool = False
    float4: Float4 = Float4.NUMBERS

    @property
    def serves_all_rows(self) -> bool:
        return True

    def for_inputs(self, inputs: Sizes) -> GroupProduct | None:
        """The kernel of a matrix with these inputs, in smaller groups if a device's part cuts those of the checkpoint;
        None if no groups divide the part, or if vector memory has no room for it."""
        own = math.prod(size for _, size in inputs)
        if (parts := math.prod(self.over.parts(axis) for axis, _ in inputs)) > 1:
            own, cut = divmod(own, parts)
            if cut or _IN_ANOTHER_ORDER & {axis for axis, _ in inputs}:
                return None
        kind = self.kind.for_inputs(own)
        levels = levels_in_memory(self.kind)
        return None if kind is None or not fits(own, kind.weights, levels) else replace(self, kind=kind)

    def multiply(self, x: jax.Array, weights: GroupedWeights) -> jax.Array:
        return multiply_in_groups(x, weights, interpret=self.interpret)


def group_product(encoding: Encoding, over: Parallelism) -> GroupProduct | None:
    """The kernel of an encoding, for the chip for which programs are compiled; None for matrices without groups."""
    kind = groups_of(encoding.values)
    return None if kind is None else GroupProduct(kind, over, float4=Float4.of_target())


class GroupedMatrix(nnx.Module):
    """A matrix in groups, without values at first: loaded as stored, in blocks `[*out, blocks, bytes]`, and then
    packed to the arrays of `GroupedWeights`, with scales in bfloat16. Each device has those of its inputs or outputs,
    with several output axes in the order of its own part."""

    def __init__(self, product: GroupProduct, inputs: Sizes, outputs: Sizes, parts: Sequence[Part]) -> None:
        """`parts`: the matrices that it consists of."""
        kind, of_inputs = product.kind, _sharded(inputs)
        count = math.prod(size for _, size in inputs) // kind.weights
        blocks = [(Axis.SHARDED_IN_BLOCKS if of_inputs else Axis.IN_BLOCKS, count), (Axis.IN_BLOCK, kind.nbytes)]
        values = parameter([*outputs, *blocks], jnp.dtype(jnp.uint8), *parts, role=Role.VALUES)
        self.arrays = nnx.Dict(values=values)
        self.product = product
        self.of_inputs = of_inputs
        self.output_axes = tuple(axis for axis, _ in outputs)
        self.output_sizes = tuple(-1 if MESH_AXIS[axis] else size for axis, size in outputs)
        rows = Axis.SHARDED_IN_BLOCKS if of_inputs else Axis.IN_TILES
        self.axes = rows, next((axis for axis in self.output_axes if MESH_AXIS[axis]), Axis.IN_TILES)

    def pack(self) -> None:
        """Changes the loaded array, or its shape, to those that the kernel reads."""
        pack = partial(packed_groups, self.product.kind, float4=self.product.float4)
        self.arrays = _packed(self.arrays["values"], pack, self.axes, self.product.over)

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` → float32 `[T, *out]`; see `Matrix`."""
        x = x.reshape(len(x), -1).astype(jnp.bfloat16)
        weights = _weights(self.product, self.arrays)
        mesh = automatic_mesh()
        if mesh is None:
            return self._product(x, weights)

        def own(x: jax.Array, weights: GroupedWeights) -> jax.Array:
            product = self._product(x, weights)
            return jax.lax.psum(product, TENSOR) if self.of_inputs else product

        columns = partition_spec((Axis.TOKENS, self.axes[0]))
        places = columns, partition_spec(self.axes)
        outputs = PartitionSpec() if self.of_inputs else partition_spec((Axis.TOKENS, *self.output_axes))
        return jax.shard_map(own, mesh=mesh, in_specs=places, out_specs=outputs, check_vma=False)(x, weights)

    def _product(self, x: jax.Array, weights: GroupedWeights) -> jax.Array:
        return self.product.multiply(x, weights).reshape(len(x), *self.output_sizes)

    def repack(self, layout: object) -> None:
        """Does nothing: matrices in groups have only one layout, see `pack`."""


class GroupedExperts(nnx.Module):
    """The matrices of all experts in groups, without values at first: loaded as stored, in blocks `[experts, out,
    blocks, bytes]`, and then packed: see `expert_groups_pallas.folded` and `filled_up`."""

    def __init__(
        self,
        product: GroupProduct,
        experts: tuple[Axis, int],
        inputs: tuple[Axis, int],
        outputs: tuple[Axis, int],
        part: Part,
    ) -> None:
        kind = product.kind
        own = Axis.EXPERT_IN_BLOCKS if inputs[0] is Axis.EXPERT_INTERMEDIATE else Axis.IN_BLOCKS
        blocks = [(own, inputs[1] // kind.weights), (Axis.IN_BLOCK, kind.nbytes)]
        values = parameter([experts, outputs, *blocks], jnp.dtype(jnp.uint8), part, role=Role.VALUES)
        self.arrays = nnx.Dict(values=values)
        self.product = product
        self.axes = (experts[0], inputs[0], outputs[0])
        groups, columns = (
            size // product.over.parts(axis) for axis, size in ((inputs[0], inputs[1] // kind.weights), outputs)
        )
        self.folds = folds_of(groups, columns)

    def pack(self) -> None:
        """See `GroupedMatrix.pack`."""
        pack = jax.vmap(partial(packed_groups, self.product.kind, float4=self.product.float4))
        of_device = lambda blocks: filled_up(folded(pack(blocks), self.folds))  # noqa: E731
        self.arrays = _packed(self.arrays["values"], of_device, self.axes, self.product.over)

    def weights(self) -> GroupedWeights:
        """See `kernels.experts.ExpertGroups`."""
        return replace(_weights(self.product, self.arrays), own_group=self.product.kind.weights)


def _packed(
    blocks: Parameter, pack: Callable[[jax.Array], GroupedWeights], axes: tuple[Axis, ...], over: Parallelism
) -> nnx.Dict:
    """The arrays that a kernel reads, with their axes, or their shapes, of loaded blocks. Each device packs its own."""
    values = blocks.get_value()
    if isinstance(values, jax.ShapeDtypeStruct):
        of_device = [length // over.parts(axis) for length, axis in zip(values.shape, blocks.axes, strict=True)]
        packed = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(_on_all(each.shape, axes, over), each.dtype),
            jax.eval_shape(pack, jax.ShapeDtypeStruct(of_device, values.dtype)),
        )
    elif isinstance(values.sharding, NamedSharding):
        places = partition_spec(blocks.axes), partition_spec(axes)
        mesh = values.sharding.mesh
        packed = jax.jit(jax.shard_map(pack, mesh=mesh, in_specs=places[:1], out_specs=places[1]))(values)
    else:
        packed = jax.jit(pack)(values)
    named = {"levels": packed.levels, "scales": packed.scales, "zeros": packed.zeros}
    found = {name: array for name, array in named.items() if array is not None}
    return nnx.Dict({name: Parameter(array, axes=axes, parts=(), role=None) for name, array in found.items()})


def _on_all(shape: Sequence[int], axes: Sequence[Axis], over: Parallelism) -> tuple[int, ...]:
    """The shape of an array of which each device has a part of this shape."""
    return tuple(length * over.parts(axis) for length, axis in zip(shape, axes, strict=True))


def _weights(product: GroupProduct, arrays: nnx.Dict) -> GroupedWeights:
    own = {name: array[...] for name, array in arrays.items()}
    return GroupedWeights(**own, float4=_kept(product.kind, product.float4))


def _kept(kind: GroupType, float4: Float4) -> Float4 | None:
    """How levels in memory stand for floats of 4 bits; None if they are numbers."""
    return float4 if kind.levels is Levels.FLOAT4_E2M1 and levels_in_memory(kind) == jnp.int4 else None


def _sharded(sizes: Sizes) -> bool:
    return any(MESH_AXIS[axis] for axis, _ in sizes)


def packed_groups(kind: GroupType, blocks: jax.Array, *, float4: Float4 = Float4.NUMBERS) -> GroupedWeights:
    """The weights of blocks `[*out, blocks, bytes]`. Levels and zeros of 4 bits become signed: integers are 8 less, and
    floats as `float4` says; see `levels_in_memory`."""
    blocks = blocks.reshape(-1, *blocks.shape[-2:])
    levels, zeros = blocks[..., kind.level_places], blocks[..., -1] if kind.zeros else None
    of_bytes = jax.lax.bitcast_convert_type(blocks[..., kind.scale_places], jnp.dtype(kind.scales.dtype))
    scales = of_bytes.reshape(blocks.shape[:2]).astype(jnp.bfloat16)
    kept = _kept(kind, float4)
    if kind.levels.bits == 4:
        levels = jnp.concatenate((levels & 15, levels >> 4), axis=-1)
        if kind.levels is not Levels.FLOAT4_E2M1:
            levels = _signed(levels)
        elif kept is Float4.CODES:
            levels = _with_sign_bit(levels)
        else:
            levels, scales = _sign_and_number(levels), scales / 2
            if kept is None:
                levels = jnp.sign(levels) * jnp.array(_TWICE_FLOAT4, jnp.int8)[jnp.abs(levels)]
        zeros = None if zeros is None else _signed(zeros)
    else:
        levels = jax.lax.bitcast_convert_type(levels, jnp.dtype(kind.levels.dtype))
        zeros = None if zeros is None else jax.lax.bitcast_convert_type(zeros, jnp.int8)
    matrix = levels.reshape(len(levels), -1).T.astype(levels_in_memory(kind))
    return GroupedWeights(matrix, scales.T, None if zeros is None else zeros.T, kept)


def _sign_and_number(levels: jax.Array) -> jax.Array:
    number = (levels & 7).astype(jnp.int8)
    return jnp.where(levels >= 8, -number, number)


def _with_sign_bit(levels: jax.Array) -> jax.Array:
    return (levels.astype(jnp.int8) ^ 8) - 8


def _signed(levels: jax.Array) -> jax.Array:
    return levels.astype(jnp.int8) - Levels.INT4.zero
