"""Experts by the kernels for TPUs, in Pallas' interpreter, against float64. Unwritten memory is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tpu_interpreter import CopyMode, Interpreted
from numpy.typing import NDArray

from sglang_jax.kernels import expert_rows_pallas, expert_tiles, experts
from sglang_jax.kernels.expert_rows_pallas import gather_rows, sum_rows
from sglang_jax.kernels.expert_table_pallas import divided_up
from sglang_jax.kernels.expert_tiles import SortedTiles, Widths, columns_of_sums
from sglang_jax.kernels.experts import ExpertChoice, ExpertProducts, ExpertWeights, KernelPart, multiply_experts
from sglang_jax.kernels.ragged_paged_attention.pallas import shapes

Float64 = NDArray[np.float64]


def random_weights(
    count: int, columns: int, hidden: int, dtype: str, *, gates: bool
) -> tuple[ExpertWeights, dict[str, Float64]]:
    """With gates, also with biases. And the numbers that they stand for."""
    random = np.random.default_rng(columns)
    sizes = dict.fromkeys(("gate", "up", "down") if gates else ("up", "down"), (columns, hidden))
    stored: dict[str, jax.Array | None] = {"gate": None}
    numbers: dict[str, Float64] = {}
    for name, (rows, inputs) in sizes.items():
        draw = random.standard_normal((count, rows, inputs)) * (40 if dtype == "int8" else 0.3)
        stored[name] = array = jnp.asarray(draw, jnp.dtype(dtype))
        numbers[name] = np.asarray(array, np.float64)
        outputs = hidden if name == "down" else columns
        if dtype == "int8":
            scales = random.uniform(0.005, 0.01, (count, outputs)).astype(np.float32)
            stored[f"{name}_scales"] = jnp.asarray(scales)
            numbers[name] *= scales[:, None] if name == "down" else scales[..., None]
        if gates and name != "down":
            stored[f"{name}_bias"] = bias = jnp.asarray(random.standard_normal((count, outputs)), jnp.float32)
            numbers[f"{name}_bias"] = np.asarray(bias, np.float64)
    return ExpertWeights(**stored), numbers  # type: ignore[arg-type]


def exactly(x: Float64, numbers: dict[str, Float64], choice: ExpertChoice) -> tuple[Float64, Float64]:
    """The outputs, and the sums of the magnitudes that they are sums of."""
    numbers_of, scores = np.asarray(choice.experts), np.asarray(choice.scores, np.float64)
    found, size = np.zeros((2, *x.shape))
    for token, (own, factors) in enumerate(zip(numbers_of, scores, strict=True)):
        for expert, factor in zip(own, factors, strict=True):
            if expert >= len(numbers["up"]):
                continue
            up = numbers["up"][expert] @ x[token]
            if "gate" in numbers:
                gate = numbers["gate"][expert] @ x[token] + numbers["gate_bias"][expert]
                inner = gate / (1 + np.exp(-gate)) * (up + numbers["up_bias"][expert])
            else:
                inner = np.maximum(up, 0) ** 2
            found[token] += factor * inner @ numbers["down"][expert]
            size[token] += factor * np.abs(inner) @ np.abs(numbers["down"][expert])
    return found, size


def chosen(tokens: int, among: list[int], count: int, padding: int) -> ExpertChoice:
    """Each token chooses the first of the experts `among` and some others, `count` in all; the first one with a score
    of 0. The last tokens choose none: theirs have number 12."""
    random = np.random.default_rng(tokens)
    others = [random.permutation(among[1:])[: count - 1] for _ in range(tokens)]
    experts = np.stack([np.append(each, among[0]) for each in others]).astype(np.int32)
    scores = random.uniform(0.1, 1, experts.shape).astype(np.float32)
    scores[0, 0] = 0
    experts[tokens - padding :], scores[tokens - padding :] = 12, 0
    return ExpertChoice(jnp.asarray(experts), jnp.asarray(scores))


def run(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice, experts: int, cores: int) -> tuple[jax.Array, bool]:
    def products(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice) -> jax.Array:
        def inner(gates: jax.Array | None, ups: jax.Array) -> jax.Array:
            return jnp.square(jax.nn.relu(ups)) if gates is None else jax.nn.silu(gates) * ups

        return multiply_experts(ExpertProducts.KERNELS, x, weights, choice, inner, experts=experts)

    return Interpreted(products, cores=cores).run(CopyMode.ON_WAIT, x, weights, choice)


@pytest.mark.parametrize(
    ("tokens", "columns", "hidden", "dtype", "gates", "vector_memory", "cores"),
    [
        (5, 48, 64, "int8", True, 96, 1),
        # In two parts; several programs of columns, the last one narrower, on two cores.
        (48, 400, 320, "bfloat16", False, 0.6, 2),
    ],
)
def test_outputs_are_those_of_float64(
    tokens: int,
    columns: int,
    hidden: int,
    dtype: str,
    gates: bool,
    vector_memory: float,
    cores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all experts on one device, or summed over two, each of which has some: experts that nobody chose, tokens
    without an expert of a device, padding, and tiles that are filled in part."""
    limits = shapes.VMEM_LIMITS | {shapes.Chip.INTERPRETER: int((4 + vector_memory) * shapes.MIB)}
    monkeypatch.setattr(expert_tiles, "VMEM_LIMITS", limits)
    monkeypatch.setattr(experts, "_LEAST_TOKENS_OF_A_PART", 4)
    for module in (expert_tiles, expert_rows_pallas):
        monkeypatch.setattr(module, "PACKED_TOGETHER", 16)
        monkeypatch.setattr(module, "CORES", {shapes.Chip.INTERPRETER: cores} if cores > 1 else {})
    weights, numbers = random_weights(12, columns, hidden, dtype, gates=gates)
    choice = chosen(tokens, [1, 2, 3, 4, 5, 9, 11], 3, padding=2)
    part = weights.part(tokens, 3, 12)
    assert part is not None
    narrow = part.tokens < tokens and part.widths.inner < columns and part.widths.outputs < hidden
    assert narrow == (vector_memory < 1)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, hidden)), jnp.bfloat16)
    expected, size = exactly(np.asarray(x, np.float64), numbers, choice)

    def of_device(first: int, last: int) -> tuple[ExpertWeights, ExpertChoice]:
        own: Any = {name: None if array is None else array[first:last] for name, array in vars(weights).items()}
        return ExpertWeights(**own), choice.among(last - first, jnp.int32(first))

    devices = [(0, 12)] if narrow else [(0, 6), (6, 12)]
    parts = [run(x, *of_device(*own), 12, cores) for own in devices]
    assert not any(races for _, races in parts)
    summed = sum(np.asarray(part, np.float64) for part, _ in parts)
    # Activations are rounded to bfloat16, each by up to 2**-8.
    assert (np.abs(summed - expected) <= 2.0**-8 * size + 1e-5 * size).all()
    assert not summed[tokens - 2 :].any()


def test_rows_are_divided_into_tiles_exactly() -> None:
    numbers = np.arange(1 << 16, dtype=np.int32)
    for rows in range(16, 257, 16):
        np.testing.assert_array_equal(divided_up(jnp.asarray(numbers), rows), -(-numbers // rows))


def test_tiles_hold_every_choice_once() -> None:
    """Filled in front, sorted by expert, and then by token; tiles behind the last one have its expert."""
    choice = chosen(50, [0, 2, 3], 2, padding=9)
    tiles = vars(SortedTiles.of(choice.experts, choice.scores, 5, 16, interpret=True))
    used, filled = int(tiles["used"][0]), np.asarray(tiles["filled"])
    assert (filled[:used] > 0).all()
    assert not filled[used:].any()
    assert set(np.asarray(tiles["experts"])[used:]) == {3}
    found = []
    for tile, expert in enumerate(np.asarray(tiles["experts"])):
        first = int(tiles["first"][tile])
        slots = slice(first, first + int(filled[tile]))
        own = zip(np.asarray(tiles["tokens"])[slots], np.asarray(tiles["scores"])[slots], strict=True)
        found += [(int(expert), int(token), float(score)) for token, score in own]
    numbers, scores = np.asarray(choice.experts), np.asarray(choice.scores)
    wanted = [(int(numbers[at]), at[0], float(scores[at])) for at in np.ndindex(numbers.shape) if scores[at] > 0]
    assert found == sorted(wanted)


def test_rows_are_gathered_exactly_and_added_up() -> None:
    """Without products: more tiles of numbers than whole pairs, and the last program of sums narrower."""
    choice = chosen(21, [0, 2, 3], 2, padding=3)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((21, 320)), jnp.bfloat16)

    def gather_and_add(x: jax.Array, choice: ExpertChoice) -> tuple[dict[str, Any], jax.Array, jax.Array]:
        tiles = SortedTiles.of(choice.experts, choice.scores, 5, 16, interpret=True)
        rows = gather_rows(x, tiles)
        return vars(tiles), rows, sum_rows(rows.astype(jnp.float32), tiles, 256, 21)

    (tiles, rows, sums), races = Interpreted(gather_and_add).run(CopyMode.EAGER, x, choice)
    assert not races
    for tile, (first, filled) in enumerate(zip(tiles["first"], tiles["filled"], strict=True)):
        own = np.asarray(tiles["tokens"])[int(first) : int(first) + int(filled)]
        assert np.array_equal(rows[16 * tile : 16 * tile + len(own)], x[own])
    expected = np.asarray(choice.scores, np.float64).sum(1)[:, None] * np.asarray(x, np.float64)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)


def test_steps_without_room_are_left_to_other_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(tokens: int, hidden: int = 2048, chosen: int = 8) -> Widths | None:
        gate = jax.ShapeDtypeStruct((8, 768, hidden), jnp.bfloat16)
        return Widths.of(tokens, chosen, 16, (gate, gate))

    assert room(2048) == Widths(768, 2048)
    with monkeypatch.context() as two_cores:
        two_cores.setattr(expert_tiles, "CORES", {shapes.Chip.INTERPRETER: 2})
        assert room(2048) == Widths(384, 1024)
    assert columns_of_sums(2048, 4, 64, 2880) == 2944
    assert columns_of_sums(16_384, 4, 64, 2880) is None
    assert room(16_384) is None  # tokens in vector memory
    assert room(4096, 128, chosen=32) is None  # rows in scalar memory
    large, _ = random_weights(1, 16, 16_384, "bfloat16", gates=True)
    assert large.part(256, 2, 4) == KernelPart(256, 160, Widths(128, 16_384))
    parts = large.part(2000, 2, 4)
    assert parts is not None
    assert (parts.tokens, parts.rows) == (1000, 224)
    assert large.part(2001 * 8, 2, 4) is None
    monkeypatch.setattr(expert_tiles, "VMEM_LIMITS", {shapes.Chip.INTERPRETER: 14 * shapes.MIB})
    assert room(64) == Widths(384, 2048)
    weights, _ = random_weights(2, 16, 2**19, "int8", gates=True)
    weights = replace(weights, up=jax.ShapeDtypeStruct((2, 16, 2**21), jnp.int8))  # type: ignore[arg-type]
    choice = ExpertChoice(jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1), jnp.float32))
    with pytest.raises(ValueError, match="experts of 4 tokens do not fit into the vector memory of interpreter"):
        multiply_experts(ExpertProducts.KERNELS, jnp.zeros((4, 2**21)), weights, choice, lambda gate, up: gate * up)
