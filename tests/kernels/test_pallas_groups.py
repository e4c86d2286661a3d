"""Products with weights in groups by the kernel for TPUs, in Pallas' interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from sglang_jax.kernels import expert_groups_pallas, experts, group_product_pallas
from sglang_jax.kernels.expert_groups_pallas import (
    ExpertTiles,
    filled_up,
    folded,
    folds_of,
    multiply_experts_in_groups,
    rows_of_tile,
)
from sglang_jax.kernels.group_product_pallas import Float4, GroupedWeights, multiply_in_groups
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip

multiply = jax.jit(partial(multiply_in_groups, interpret=True))


def random_weights(
    inputs: int, outputs: int, group: int, levels: str, scales: str, zeros: bool
) -> tuple[GroupedWeights, NDArray[np.float64], NDArray[np.float64]]:
    """With them, the matrix in float64, and the largest error of each weight, relative to `scale`: levels and scales
    are multiplied in the dtype of scales and rounded to bfloat16."""
    random = np.random.default_rng(inputs + outputs)
    lowest = {"int4": -8, "int8": -128, "float8_e4m3fn": -240}[levels]
    found = jnp.asarray(random.uniform(lowest, -lowest - 1, (inputs, outputs)).round(), jnp.dtype(levels))
    factors = jnp.asarray(random.uniform(0.5, 2, (inputs // group, outputs)), jnp.dtype(scales))
    offsets = jnp.asarray(random.integers(-8, 8, factors.shape), jnp.int8) if zeros else None
    numbers, of_group = (np.asarray(each, np.float64) for each in (found, factors))
    wide = of_group.repeat(group, 0)
    rounding = 2.0**-8 * np.abs(numbers) * wide
    if offsets is not None:
        numbers = numbers - np.asarray(offsets, np.float64).repeat(group, 0)
    return GroupedWeights(found, factors, offsets), numbers * wide, rounding


def worst(
    rows: int,
    inputs: int,
    weights: GroupedWeights,
    exact: tuple[NDArray[np.float64], ...],
    multiply: Callable[[jax.Array, GroupedWeights], jax.Array] = multiply,
) -> float:
    """The largest error of a product, as a share of what roundings allow."""
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, inputs)), jnp.bfloat16)
    numbers, (matrix, rounding) = np.asarray(x, np.float64), exact
    product = np.asarray(multiply(x, weights), np.float64)
    assert product.shape == (rows, matrix.shape[1])
    # Roundings of single weights have any sign, so a quarter of the worst sum is plenty.
    allowed = 0.25 * np.abs(numbers) @ rounding + 1e-5 * np.abs(numbers) @ np.abs(matrix)
    return float((np.abs(product - numbers @ matrix) / allowed).max())


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "levels", "scales", "zeros"),
    [
        (1, 64, 24, 32, "int4", "bfloat16", False),
        (8, 1376, 300, 32, "int4", "float32", True),
        (17, 2 * 4096 + 320, 600, 64, "int4", "bfloat16", True),
        (64, 896, 640, 128, "int4", "bfloat16", False),
        (200, 1024 + 128, 1300, 128, "int4", "bfloat16", True),
        (17, 1088, 512, 32, "int8", "bfloat16", True),
        (300, 2 * 1024, 130, 64, "int8", "float32", False),
        (64, 896, 130, 128, "int8", "float32", True),
        (8, 640, 130, 128, "float8_e4m3fn", "float32", False),
        (200, 256, 130, 32, "float8_e4m3fn", "bfloat16", False),
    ],
)
def test_products_equal_those_of_float64(
    rows: int, inputs: int, outputs: int, group: int, levels: str, scales: str, zeros: bool
) -> None:
    """For tiles of rows, columns and inputs with and without a rest; a scale or zero that belongs to another group, or
    a level in another place, is noticed."""
    weights, *exact = random_weights(inputs, outputs, group, levels, scales, zeros)
    assert worst(rows, inputs, weights, tuple(exact)) < 1
    faults = [GroupedWeights(weights.levels, jnp.roll(weights.scales, 1, 0), weights.zeros)]
    faults.append(GroupedWeights(jnp.roll(weights.levels, inputs // 2, 0), weights.scales, weights.zeros))
    if weights.zeros is not None:
        faults.append(GroupedWeights(weights.levels, weights.scales, weights.zeros + 1))
    for fault in faults if inputs < 1000 else ():
        assert worst(rows, inputs, fault, tuple(exact)) > 1


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group", "zeros"),
    [(8, 896, 300, 128, False), (17, 4096 + 384, 130, 128, True), (64, 1024, 130, 256, True)],
)
def test_few_rows_multiply_levels_in_float8_where_the_matrix_units_do(
    rows: int, inputs: int, outputs: int, group: int, zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are then not rounded, so errors are those of float32. Scales of other groups and other levels are
    noticed; more rows, smaller groups and other chips round weights."""
    weights, matrix, rounding = random_weights(inputs, outputs, group, "int4", "bfloat16", zeros)
    exact = matrix, 0 * rounding
    multiply_here = jax.jit(partial(multiply_in_groups, interpret=True))
    monkeypatch.setattr(group_product_pallas, "current_chip", lambda: Chip.TPU7X)

    def error(weights: GroupedWeights, rows: int = rows) -> float:
        return worst(rows, inputs, weights, exact, multiply_here)

    assert error(weights) < 1
    assert error(replace(weights, scales=jnp.roll(weights.scales, 1, 0))) > 1
    assert error(replace(weights, levels=jnp.roll(weights.levels, group, 0))) > 1
    assert error(weights, group // 4 + 1) > 1
    small = replace(weights, scales=weights.scales.repeat(2 * group // 128, 0), zeros=None)
    assert not group_product_pallas.scales_last(8, small)
    monkeypatch.setattr(group_product_pallas, "current_chip", lambda: Chip.V6E)
    assert not group_product_pallas.scales_last(8, weights)


def test_few_rows_of_an_expert_multiply_levels_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """See above: errors are those of float32 for tiles of 16 rows, and not for larger ones."""
    found = [random_weights(256, 128, 128, "int4", "bfloat16", zeros=True) for _ in range(2)]
    weights = filled_up(jax.tree.map(lambda *each: jnp.stack(each), *(weights for weights, *_ in found)))
    for module in (group_product_pallas, expert_groups_pallas):
        monkeypatch.setattr(module, "current_chip", lambda: Chip.TPU7X)
    own = jnp.array([0] * 3 + [1] * 4)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 256)), jnp.bfloat16)
    errors = []
    for of_tile in (16, 64):
        tiles = ExpertTiles.of(own, jnp.array([3, 4], jnp.int32), of_tile)
        spread = x[tiles.spread(jnp.arange(7), of_tile)]
        product = multiply_experts_in_groups(spread, weights, tiles, interpret=True)[tiles.places]
        expected = np.stack([np.asarray(row, np.float64) @ found[each][1] for row, each in zip(x, own, strict=True)])
        errors.append(float(np.abs(np.asarray(product) - expected).max() / np.abs(expected).max()))
    assert errors[0] < 1e-5 < 1e-4 < errors[1]


def test_a_step_of_many_rows_has_the_results_of_one_of_few() -> None:
    """Except for the order of sums."""
    weights, *_ = random_weights(512, 256, 32, "int4", "bfloat16", zeros=True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(150, 512)), jnp.bfloat16)
    few, many = multiply(x[:100], weights), multiply(x, weights)
    np.testing.assert_allclose(few, many[:100], rtol=0, atol=1e-4 * float(jnp.abs(many).max()))


def test_weights_that_do_not_fit_are_refused() -> None:
    monstrous = jax.ShapeDtypeStruct((2**20, 128), jnp.int8)
    weights = GroupedWeights(monstrous, jax.ShapeDtypeStruct((2**15, 128), jnp.bfloat16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1048576 inputs do not fit into the vector memory of interpreter"):
        jax.eval_shape(multiply, jax.ShapeDtypeStruct((1, 2**20), jnp.bfloat16), weights)
    odd = GroupedWeights(jnp.zeros((48, 128), jnp.int8), jnp.zeros((6, 128), jnp.bfloat16))
    with pytest.raises(ValueError, match="groups have 8 inputs of 48: they must have a multiple of 16"):
        group_product_pallas.multiply_in_groups(jnp.zeros((1, 48), jnp.bfloat16), odd)


@pytest.mark.parametrize(
    ("rows", "levels", "outputs"),
    [
        (3, "int4", 300),
        (3, "float4", 300),
        (40, "int8", 300),
        (40, "float8_e4m3fn", 40),
        (300, "int4", 32),
        (300, "float4", 300),
    ],
)
def test_rows_are_multiplied_by_their_experts(rows: int, levels: str, outputs: int) -> None:
    """Some experts have no rows, and some rows no expert. Scales, zeros or levels of another expert are noticed. Of few
    outputs, parts of the inputs are side by side."""
    count, inputs, zeros = 5, 128, levels.startswith("int")
    folds = folds_of(inputs // 32, outputs)
    assert folds == {300: 1, 40: 2, 32: 4}[outputs]
    random = np.random.default_rng(rows)
    stored = "int4" if levels == "float4" else levels
    found = [random_weights(inputs, outputs + number, 32, stored, "bfloat16", zeros) for number in range(count)]
    parts = [jax.tree.map(lambda each: each[:, :outputs], weights) for weights, *_ in found]
    if levels == "float4":
        parts = [replace(each, levels=jnp.clip(each.levels, -7, 7), float4=Float4.NUMBERS) for each in parts]
    weights = jax.tree.map(lambda *each: jnp.stack(each), *parts)
    own = np.sort(random.choice([0, 1, 3, count], rows))  # padding is behind all
    sizes = jnp.asarray(np.bincount(own, minlength=count + 1)[:count], jnp.int32)
    x = jnp.asarray(random.normal(size=(rows, inputs)), jnp.bfloat16)
    of_tile = rows_of_tile(rows, count)

    @jax.jit
    def product(weights: GroupedWeights) -> jax.Array:
        tiles = ExpertTiles.of(jnp.asarray(own), sizes, of_tile)
        spread = x[tiles.spread(jnp.arange(rows), of_tile)]
        stored = filled_up(folded(weights, folds))
        found = multiply_experts_in_groups(spread, stored, tiles, folds=folds, interpret=True)
        return found[tiles.places, :outputs]

    expected = np.zeros((rows, outputs))
    for row, expert in enumerate(own):
        if expert < count:
            expected[row] = np.asarray(x[row], np.float64) @ widened(parts[expert])
    real = own < count

    def error(weights: GroupedWeights) -> float:
        return float(np.abs(np.asarray(product(weights)) - expected)[real].max() / np.abs(expected).max())

    assert error(weights) < 2**-7
    for name in ("levels", "scales", *(["zeros"] if zeros else [])):
        assert error(replace(weights, **{name: jnp.roll(getattr(weights, name), 1, 0)})) > 2**-5


def test_experts_have_tiles_of_one_size_for_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a fixed number of rows is asked for, whatever the step: without it, larger steps have larger tiles. Gate
    and up are equal, so experts without gates, which square, have the same results."""
    seen = []

    def inner(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        return up * (up if gate is None else gate)

    def noted(x: jax.Array, weights: GroupedWeights, tiles: ExpertTiles, *, folds: int, interpret: bool) -> jax.Array:
        seen.append(len(x) // len(tiles.experts))
        return multiply_experts_in_groups(x, weights, tiles, folds=folds, interpret=interpret)

    monkeypatch.setattr(experts, "multiply_experts_in_groups", noted)
    stacks = [jax.tree.map(lambda each: each[None], random_weights(64, 64, 32, "int4", "bfloat16", False)[0])] * 3
    weights = experts.ExpertWeights(*(experts.ExpertGroups(filled_up(each), interpret=True) for each in stacks))
    x, results = jnp.asarray(np.random.default_rng(0).normal(size=(50, 64)), jnp.bfloat16), []
    for tile, sizes, own in ((8, {16}, weights), (None, {16, 64}, replace(weights, gate=None))):
        seen.clear()
        found = []
        for rows in (3, 50):
            choice = experts.ExpertChoice(jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows, 1)))
            products = experts.ExpertProducts.GROUPS
            found.append(experts.multiply_experts(products, x[:rows], own, choice, inner, tile))
        results.append(np.asarray(found[1]))
        assert set(seen) == sizes
        assert tile is None or np.array_equal(found[0], found[1][:3])
    assert np.abs(results[0] - results[1]).max() < 2**-6 * np.abs(results[0]).max()


NUMBERS = np.array([0, 1, 2, 3, 4, 6, 8, 12])


def widened(weights: GroupedWeights) -> NDArray[np.float64]:
    numbers = np.asarray(weights.levels, np.float64)
    if weights.float4:
        numbers = np.sign(numbers) * NUMBERS[np.abs(numbers).astype(int)]
    if weights.zeros is not None:
        numbers = numbers - np.asarray(weights.zeros, np.float64).repeat(weights.group, 0)
    return numbers * np.asarray(weights.scales, np.float64).repeat(weights.group, 0)
