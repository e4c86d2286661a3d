"""Products with weights quantised in groups on TPUs: weights are read as they are stored, and widened in vector memory.

A program takes some columns with all inputs, so weights are read once for up to `ROWS` rows, as many as a TPU
multiplies while it reads them. A step of more rows widens a program's columns once and keeps them for all its rows.
Weights are multiplied by their scales before the product, which then sums all inputs in the matrix units; with few rows
on some chips, the sums of groups are multiplied by them afterwards (`scales_last`). Zeros are subtracted in the end:
the sum of a group's inputs, times its scale and zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import MIB, VMEM_LIMITS, Chip, current_chip

Ref = Any
"""A Pallas reference to memory; its type is not public."""

Index = jax.Array | int
Found = TypeVar("Found")

ROWS = 128
"""Maximum rows of a step that multiplies weights as soon as they are widened."""

ROWS_AT_ONCE = 256
"""Rows of a program in a step with more."""

_COLUMNS, _COLUMNS_OF_MANY_ROWS = 512, 1024
_WIDTHS = (1024, 768, 512, 384, 256, 128)
"""Columns of a program of experts."""
_FEW_INPUTS, _WIDTHS_OF_FEW = 128, (3584, 2048)
"""With so few inputs, a program of 1,024 columns mostly starts and ends."""
_COLUMNS_OF_A_START = 32
"""As many columns take the time in which a program of experts starts and ends."""
_FEW_OUTPUTS, _COLUMNS_OF_FEW = 2048, 256
"""A matrix of fewer outputs takes less time in smaller programs: the first copy is shorter, and the last program is
fuller."""
_INPUTS = 4096
"""Inputs whose code is written without a loop: half as many take a sixth longer in groups of 32."""
_INPUTS_OF_MANY_ROWS = 1024
_DEPTH = 256
"""Inputs of a matrix unit."""

_FLOAT8_CHIPS = (Chip.TPU7X,)
"""Chips whose matrix units take weights of float8 with rows of bfloat16, and load these in half the time. Their product
cannot scale them: sums of each group leave the units, a register in each cycle."""
_INPUTS_OF_A_ROW = 4
"""Inputs of a group, at least, for each row: with fewer, sums leave the units for longer than weights are loaded."""

_BFLOAT16, _FLOAT32 = jnp.bfloat16, jnp.float32


_FLOAT4_CHIPS = (Chip.TPU7X,)
"""Chips that convert floats of 4 bits."""


class Float4(Enum):
    """How int4 stands for a float of 4 bits (E2M1).

    - `NUMBERS`: the sign and the number of one of 0, 1, 2, 3, 4, 6, 8 and 12, which is twice the float.
    - `CODES`: the float's bits, for chips that convert them.
    """

    NUMBERS = "numbers"
    CODES = "codes"

    @classmethod
    def of_target(cls) -> Float4:
        """That of the chip for which programs are compiled."""
        return cls.CODES if current_chip() in _FLOAT4_CHIPS else cls.NUMBERS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupedWeights:
    """A matrix `[inputs, outputs]`, each of whose weights is `scale * (level - zero)`.

    - `levels`: `[inputs, outputs]` in int4, int8 or float8_e4m3fn.
    - `scales`: `[groups, outputs]` in bfloat16 or float32; levels are multiplied in this dtype, and then rounded to
      bfloat16. A group is `inputs / groups` inputs, a multiple of 16.
    - `zeros`: int8 `[groups, outputs]`, for integer levels; None for zeros of 0.
    - `float4`: int4 levels stand for floats of 4 bits; None for integers. Scales of `NUMBERS` are half as large.
    - `own_group`: inputs that share a scale, if there are more rows of scales than groups.
    """

    levels: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    float4: Float4 | None = field(default=None, metadata={"static": True})
    own_group: int = field(default=0, metadata={"static": True})

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.own_group or self.levels.shape[-2] // self.scales.shape[-2]

    @property
    def arrays(self) -> list[jax.Array]:
        return [each for each in (self.levels, self.scales, self.zeros) if each is not None]


def fits(inputs: int, group: int, levels: jnp.dtype) -> bool:
    """Whether the vector memory of the target has room for products with such weights, for any number of rows."""
    weights = jax.eval_shape(
        lambda: GroupedWeights(
            jnp.zeros((inputs, LANES), levels),
            jnp.zeros((inputs // group, LANES), _BFLOAT16),
            jnp.zeros((inputs // group, LANES), jnp.int8),
        )
    )
    return _Plan.of(ROWS + 1, weights) is not None


def multiply_in_groups(x: jax.Array, weights: GroupedWeights, *, interpret: bool = False) -> jax.Array:
    """`x` bfloat16 `[T, inputs]` times `weights` → float32 `[T, outputs]`. `interpret`: without a TPU, for tests.

    Raises `ValueError` for weights that do not fit into vector memory, and for groups that are not a multiple of 32."""
    rows, inputs = x.shape
    groups, outputs = weights.scales.shape
    if inputs != weights.group * groups or weights.group % 16:
        raise ValueError(f"groups have {weights.group} inputs of {inputs}: they must have a multiple of 16")
    plan = _Plan.of(rows, weights)
    if plan is None:
        raise ValueError(f"{inputs} inputs do not fit into the vector memory of {current_chip()}")
    arrays, of_rows, kept = weights.arrays, [x], [pltpu.VMEM((inputs, plan.columns), _BFLOAT16)]
    if weights.zeros is not None:
        of_rows.append(x.astype(_FLOAT32).reshape(rows, groups, -1).sum(2))
        kept.append(pltpu.VMEM((groups, plan.columns), _FLOAT32))
    few = partial(multiply_columns, scales_last=scales_last(plan.rows, weights))
    return pl.pallas_call(
        partial(
            _kernel_of_many_rows if plan.many else few,
            with_zeros=weights.zeros is not None,
            float4=weights.float4,
            group=weights.group,
        ),
        grid=(pl.cdiv(outputs, plan.columns), pl.cdiv(rows, plan.rows)),
        in_specs=[
            *(pl.BlockSpec((plan.rows, each.shape[1]), lambda column, row: (row, 0)) for each in of_rows),
            *(pl.BlockSpec((len(each), plan.columns), lambda column, row: (0, column)) for each in arrays),
        ],
        out_specs=pl.BlockSpec((plan.rows, plan.columns), lambda column, row: (row, column)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), _FLOAT32),
        scratch_shapes=kept if plan.many else [],
        # Addresses depend only on the program's numbers, so there is nothing to check.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMITS[current_chip()],
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inputs * outputs,
            bytes_accessed=sum(each.size * stored_bits(each) // 8 for each in arrays) + x.size * 2 + rows * outputs * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="group_product",
    )(*of_rows, *arrays)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rows and columns of a program, and whether it is one of `many` rows."""

    rows: int
    columns: int
    many: bool

    @classmethod
    def of(cls, rows: int, weights: GroupedWeights) -> _Plan | None:
        """The most columns that fit; None if none do."""
        many, outputs = rows > ROWS, weights.levels.shape[1]
        room = _room()
        of_few = _COLUMNS if outputs >= _FEW_OUTPUTS else _COLUMNS_OF_FEW
        most = _COLUMNS_OF_MANY_ROWS if many else of_few
        widths = [columns for columns in (1024, 512, 256, 128) if columns <= most]
        for own in (ROWS_AT_ONCE, ROWS) if many else (rows,):
            for columns in widths:
                if cls(own, columns, many).vmem_bytes(weights) <= room:
                    return cls(own, min(outputs, columns), many)
        return None

    def vmem_bytes(self, weights: GroupedWeights) -> int:
        """With two buffers of what is copied. The compiler needs up to one more of widened weights of few rows."""
        column = sum(len(each) * stored_bits(each) // 8 for each in weights.arrays)
        inputs = weights.levels.shape[0]
        widened = inputs if self.many else min(inputs, _INPUTS)
        rows = -(-self.rows // 16) * 16 * (inputs * 2 + self.columns * 4)
        return 2 * (column * self.columns + rows) + widened * self.columns * 2


def _room() -> int:
    return VMEM_LIMITS[current_chip()] - 4 * MIB


def stored_bits(array: jax.Array) -> int:
    """Bits of a number in memory."""
    return 4 if array.dtype == jnp.int4 else 8 * array.dtype.itemsize


def columns_of(rows: int, weights: GroupedWeights) -> int | None:
    """Columns of one of many programs that multiply up to `ROWS` rows: of the numbers that fit into vector memory, the
    one that takes the least time; None if none fits."""
    (inputs, outputs), room = weights.levels.shape, _room()
    widths = _WIDTHS if inputs > _FEW_INPUTS else (*_WIDTHS_OF_FEW, *_WIDTHS)
    fitting = [width for width in widths if _Plan(rows, width, many=False).vmem_bytes(weights) <= room]
    if not fitting:
        return None
    return min(outputs, min(fitting, key=lambda width: pl.cdiv(outputs, width) * (width + _COLUMNS_OF_A_START)))


def scales_last(rows: int, weights: GroupedWeights) -> bool:
    """Whether a program of some rows multiplies levels as they are, in float8, and then the sums of each group by its
    scale. The matrix units of the target must take weights of float8 with rows of bfloat16."""
    if weights.levels.dtype != jnp.int4 or weights.float4 is not None or current_chip() not in _FLOAT8_CHIPS:
        return False
    return weights.group % LANES == 0 and rows * _INPUTS_OF_A_ROW <= weights.group


def multiply_columns(
    x: Ref, *rest: Ref, with_zeros: bool, float4: Float4 | None, group: int, scales_last: bool
) -> None:
    """The program of a kernel. `rest`: sums of the inputs of each group, if there are zeros; arrays of the columns; and
    their product, which is written. `scales_last`: see the function."""
    *arrays, product = rest
    sums = arrays.pop(0) if with_zeros else None
    weights = _Columns(group, float4, *arrays)
    found = weights.multiply_levels(x) if scales_last else weights.multiply(x)
    product[...] = found if sums is None else found - _exactly(sums[...], weights.scaled_zeros())


def _kernel_of_many_rows(x: Ref, *rest: Ref, with_zeros: bool, float4: Float4 | None, group: int) -> None:
    """The first program of some columns widens them."""
    if with_zeros:
        sums, *arrays, product, widened, zeros = rest
    else:
        *arrays, product, widened = rest
    weights = _Columns(group, float4, *arrays)

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        weights.widen(widened)
        if with_zeros:
            zeros[...] = weights.scaled_zeros()

    product[...] = _product_of_many(x, widened)
    if with_zeros:
        product[...] -= _exactly(sums[...], zeros[...])


def _product_of_many(x: Ref, weights: Ref) -> jax.Array:
    """In a loop: a product of all inputs is written without one, and compiled for minutes."""

    def add(first: Index, count: int, found: jax.Array) -> jax.Array:
        own = pl.ds(first, count)
        return found + jnp.dot(x[:, own], weights[own], preferred_element_type=_FLOAT32)

    nothing = jnp.zeros((x.shape[0], weights.shape[1]), _FLOAT32)
    return _in_runs(weights.shape[0], _INPUTS_OF_MANY_ROWS, add, nothing)


def _exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of float32 matrices, not in bfloat16."""
    return jnp.dot(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=_FLOAT32)


@dataclass(frozen=True)
class _Columns:
    """Some columns of a matrix, in vector memory."""

    group: int
    float4: Float4 | None
    levels: Ref
    scales: Ref
    zeros: Ref | None = None

    @property
    def inputs(self) -> int:
        count: int = self.levels.shape[0]
        return count

    def multiply(self, x: Ref) -> jax.Array:
        """Columns of the product, float32."""

        def add(first: Index, count: int, product: jax.Array) -> jax.Array:
            for own, weights in self._pieces(first, count):
                product = product + jnp.dot(x[:, own], weights, preferred_element_type=_FLOAT32)
            return product

        return _in_runs(self.inputs, _INPUTS, add, jnp.zeros((x.shape[0], self.levels.shape[1]), _FLOAT32))

    def multiply_levels(self, x: Ref) -> jax.Array:
        """The same, by levels of float8, with scales afterwards."""

        def add(first: Index, count: int, product: jax.Array) -> jax.Array:
            scales = self._scales(first, count).astype(_FLOAT32)
            for number in range(count // self.group):
                own = self._inputs(first, number * self.group, self.group)
                levels = self.levels[own].astype(jnp.float8_e4m3fn)
                sums = jnp.dot(x[:, own], levels, preferred_element_type=_FLOAT32)
                product = product + sums * scales[number]
            return product

        return _in_runs(self.inputs, _INPUTS, add, jnp.zeros((x.shape[0], self.levels.shape[1]), _FLOAT32))

    def widen(self, widened: Ref) -> None:
        """Writes all weights."""

        def write(first: Index, count: int, nothing: int) -> int:
            for own, weights in self._pieces(first, count):
                widened[own] = weights
            return nothing

        _in_runs(self.inputs, _INPUTS, write, 0)

    def _pieces(self, first: Index, count: int) -> Iterator[tuple[pl.Slice, jax.Array]]:
        """Widened weights of `count` inputs, as many at a time as a matrix unit has: where they are, and bfloat16
        `[inputs, columns]`."""
        group, scales = self.group, self._scales(first, count)
        step = max(_DEPTH, group) // group * group
        for at in range(0, count, step):
            depth = min(step, count - at)
            inputs = self._inputs(first, at, depth)
            own = scales[at // group : (at + depth) // group]
            levels = self.levels[inputs]
            if self.float4 is Float4.CODES:
                levels = pltpu.bitcast(levels, jnp.float4_e2m1fn).astype(_BFLOAT16)
            levels = levels.astype(own.dtype)
            if self.float4 is Float4.NUMBERS:
                levels = _of_numbers(levels)
            scaled = levels.reshape(depth // group, group, -1) * own[:, None]
            yield inputs, scaled.astype(_BFLOAT16).reshape(depth, -1)

    def _scales(self, first: Index, count: int) -> jax.Array:
        """Those of `count` inputs. Runs begin at whole tiles of scales: 4,096 inputs have 32 groups of 128."""
        group = self.group
        begin = first // group if isinstance(first, int) else pl.multiple_of(first // group, _INPUTS // group)
        found: jax.Array = self.scales[pl.ds(begin, count // group)]
        return found

    def _inputs(self, first: Index, at: int, count: int) -> pl.Slice:
        """Those of a run behind its first `at`."""
        return pl.ds(first + at if isinstance(first, int) else pl.multiple_of(first + at, LANES), count)

    def scaled_zeros(self) -> jax.Array:
        """`scale * zero`, float32 `[groups, columns]`."""
        assert self.zeros is not None
        return self.scales[...].astype(_FLOAT32) * self.zeros[...].astype(_FLOAT32)


def _of_numbers(levels: jax.Array) -> jax.Array:
    """See `Float4.NUMBERS`: numbers grow by 1 up to 4, by 2 up to 6, and then by 4."""
    return 4 * levels - jnp.clip(levels, -4, 4) - 2 * jnp.clip(levels, -6, 6)


def _in_runs(inputs: int, length: int, add: Callable[[Index, int, Found], Found], start: Found) -> Found:
    """`add(first input, count, found)` for runs of `length` inputs, in a loop, and then for the rest."""
    runs, rest = divmod(inputs, length)
    if runs == 1:
        start = add(0, length, start)
    elif runs:
        start = lax.fori_loop(
            0, runs, lambda run, found: add(pl.multiple_of(run * length, length), length, found), start
        )
    return add(runs * length, rest, start) if rest else start
