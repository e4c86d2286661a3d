"""The kernels for experts with plain weights, in the interpreter, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_groups import broken
from helpers.triton_interpreter import counted_loads, dependent_launches, shuffled_programs
from torch.nn import functional
from triton.runtime.errors import InterpreterError

from sglang_jax.architectures.kinds.experts import ClampedGate
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels import plain_experts as module
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.expert_product import tile_table
from torch_backend.kernels.plain_experts import ExpertRows, Gate

assert helpers.triton_interpreter

CHIP = Chip(90, 132)
SILU, GELU = Gate(Activation.SILU), Gate(Activation.GELU_TANH)
CLAMPED = Gate(Activation.SILU, ClampedGate(alpha=1.702, limit=0.8))
SQUARED = Gate(None)
"""Of experts without gates."""


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Layer:
    """Random matrices of some experts; gates have about the size of `CLAMPED`'s limit."""

    gate_up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    gate: Gate

    @classmethod
    def drawn(
        cls,
        experts: int,
        hidden: int,
        inner: int,
        gate: Gate = SILU,
        dtype: torch.dtype = torch.bfloat16,
        biases: bool = False,
    ) -> Layer:
        rows = gate.matrices * inner
        gate_up = (drawn(experts, rows, hidden, seed=1) / hidden**0.5).to(dtype)
        own = (drawn(experts, rows, dtype=dtype, seed=3), drawn(experts, hidden, dtype=dtype, seed=4))
        return cls(gate_up, drawn(experts, hidden, inner, dtype=dtype, seed=2), own if biases else (None, None), gate)


def sorted_rows(
    experts: Sequence[Sequence[int]], layer: Layer, chip: Chip = CHIP, some: ModuleType = module
) -> ExpertRows:
    """The rows of `experts`, chosen by each token; the number behind the last expert stands for none."""
    chosen = torch.tensor(experts)
    flat, order = chosen.reshape(-1).sort(stable=True)
    sizes = flat.bincount(minlength=len(layer.down) + 1)[:-1].int()
    per_expert = some.rows_per_expert(len(flat), layer.gate_up)
    table = tile_table(sizes, len(flat), some.tile_rows(per_expert, layer.down.dtype), chip)
    found: ExpertRows = some.ExpertRows(table, order, chosen.shape[1], per_expert)
    return found


def gated(layer: Layer, x: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated numbers of one token and an expert in float64, and the magnitude of what was added up."""
    bias = None if layer.biases[0] is None else layer.biases[0][expert].double()
    sums = functional.linear(x.double(), layer.gate_up[expert].double(), bias)
    magnitude = functional.linear(x.double().abs(), layer.gate_up[expert].double().abs())
    if layer.gate == SQUARED:
        return sums.relu().square(), (1 + magnitude).square()
    gate, up = sums.chunk(2)
    magnitudes = magnitude.chunk(2)
    clamped = layer.gate.clamped
    if clamped is not None:
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        found = (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)
    elif layer.gate == SILU:
        found = functional.silu(gate) * up
    else:
        found = functional.gelu(gate, approximate="tanh") * up
    return found, (1 + magnitudes[0]) * (2 + magnitudes[1])


def assert_right(
    layer: Layer, x: torch.Tensor, experts: Sequence[Sequence[int]], some: ModuleType = module
) -> torch.Tensor:
    """Both products, each against float64 of its own inputs; both are rounded once, the second for each choice."""
    rows, chosen = sorted_rows(experts, layer, some=some), torch.tensor(experts)
    real, dtype = chosen < len(layer.down), x.dtype
    scores = torch.where(real, 0.2 + torch.rand(chosen.shape, generator=torch.Generator().manual_seed(5)), 0.0)
    inner = some.gate_experts(x, layer.gate_up, layer.biases[0], rows, layer.gate, CHIP)
    found = some.sum_experts(inner, layer.down, layer.biases[1], rows, scores, torch.float32, CHIP)
    assert (inner.dtype, found.dtype) == (dtype, torch.float32)
    assert rows.order is not None
    eps = torch.finfo(dtype).eps / 2
    row_of = {int(place): row for row, place in enumerate(rows.order)}
    for token, own in enumerate(experts):
        exact, allowed = torch.zeros(x.shape[1]).double(), torch.zeros(x.shape[1]).double()
        for choice, expert in enumerate(own):
            if expert == len(layer.down):
                continue
            row = inner[row_of[token * len(own) + choice]]
            wanted, magnitude = gated(layer, x[token], expert)
            assert ((row.double() - wanted).abs() <= eps * wanted.abs() + 2e-6 * magnitude).all()
            matrix, bias = layer.down[expert].double(), layer.biases[1]
            score = scores[token, choice].double()
            output = score * functional.linear(row.double(), matrix, None if bias is None else bias[expert].double())
            exact += output
            allowed += eps * output.abs() + 2e-6 * functional.linear(row.double().abs(), matrix.abs()) + 1e-6
        assert ((found[token].double() - exact).abs() <= allowed).all()
    return found


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: it may hold the results of an earlier product."""
    empty = torch.empty

    def filled(*shape: Any, **options: Any) -> torch.Tensor:
        found = empty(*shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", filled)


def skewed(tokens: int, experts: int) -> list[list[int]]:
    """Two experts of each token: mostly the first and the last but one."""
    return [[0, experts - 2] if token % 5 else [experts - 2, experts - 1] for token in range(tokens)]


@pytest.mark.parametrize(
    ("gate", "biases", "dtype"),
    [
        (SILU, False, torch.bfloat16),
        (GELU, False, torch.float16),
        (CLAMPED, True, torch.bfloat16),
        (SQUARED, True, torch.float32),
    ],
    ids=["silu", "gelu", "clamped and biases", "without gates, in float32"],
)
def test_any_choice_and_any_shape(
    gate: Gate, biases: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token, all tokens with one expert, experts without tokens, padding, whose numbers are NaN, tokens of which
    some experts are another rank's, tiles of 16, 64 and 128 rows, and sides that do not fill whole tiles."""
    poisoned(monkeypatch)
    for experts, hidden, inner, choices in (
        (5, 72, 24, [[3]]),
        (4, 128, 64, 18 * [[2]]),
        (3, 64, 8, [[0, 2], [3, 3], [1, 2], [3, 0], [3, 3]]),
        (4, 37, 9, [*skewed(21, 4), [4, 4]]),
        (4, 80, 144, [*skewed(40, 4), [4, 4]]),
        (3, 136, 16, [*skewed(60, 3), [3, 3]]),
    ):
        layer = Layer.drawn(experts, hidden, inner, gate, dtype, biases)
        x = drawn(len(choices), hidden, dtype=dtype)
        x[[token for token, own in enumerate(choices) if min(own) == experts]] = torch.nan
        assert_right(layer, x, choices)


def test_a_row_is_batch_invariant() -> None:
    """Bit for bit, whatever other tokens choose, in tiles of 16 to 128 rows, and in any order of programs. Most
    products of a sum cancel each other, so that another order of additions changes it by more than it is rounded."""
    layer, x, experts = Layer.drawn(3, 200, 24, SILU), drawn(75, 200), skewed(75, 3)
    layer.gate_up[..., 101:] = layer.gate_up[..., 1:100]
    x[:, 101:] = -x[:, 1:100]
    whole = assert_right(layer, x, experts)
    sizes = {sorted_rows(experts[:tokens], layer).per_expert for tokens in (1, 20, 40, 75)}
    assert {module.tile_rows(size, torch.bfloat16) for size in sizes} == {16, 32, 64, 128}
    scores = torch.rand((75, 2), generator=torch.Generator().manual_seed(5)) + 0.2
    for places in ([3], [*range(20)], [*range(35, 75)]):
        some = [experts[place] for place in places]
        with shuffled_programs(len(places)):
            rows = sorted_rows(some, layer)
            inner = module.gate_experts(x[places], layer.gate_up, None, rows, SILU, CHIP)
            found = module.sum_experts(inner, layer.down, None, rows, scores[places], torch.float32, CHIP)
        assert torch.equal(found, whole[places])


def test_experts_without_rows_are_not_read() -> None:
    """As many weights are loaded as for one expert, in addition to what tells programs that they have no rows."""
    one, eight = Layer.drawn(1, 64, 64), Layer.drawn(8, 64, 64)
    loaded = []
    for layer, expert in ((one, 0), (eight, 3)):
        rows = sorted_rows(4 * [[expert]], layer)
        with counted_loads() as loads:
            inner = module.gate_experts(drawn(4, 64), layer.gate_up, None, rows, SILU, CHIP)
            module.sum_experts(inner, layer.down, None, rows, torch.ones((4, 1)), torch.bfloat16, CHIP)
        loaded.append(loads.elements)
    assert loaded[0] <= loaded[1] <= loaded[0] + 50


def test_a_product_of_sorted_rows_has_no_gate_and_no_scores() -> None:
    layer = Layer.drawn(3, 72, 40, biases=True)
    table = tile_table(torch.tensor([5, 0, 2], dtype=torch.int32), 9, 16, CHIP)
    x = drawn(9, 40)
    x[7:] = torch.nan
    rows = ExpertRows(table, None, 1, 1)
    found = module.multiply_sorted_rows(x, layer.down, layer.biases[1], rows, CHIP)[:7]
    bias = layer.biases[1]
    assert bias is not None
    for expert, part in ((0, slice(0, 5)), (2, slice(5, 7))):
        exact = functional.linear(x[part].double(), layer.down[expert].double(), bias[expert].double())
        assert ((found[part].double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_sums_are_rounded_to_the_wanted_type_once() -> None:
    layer, x = Layer.drawn(2, 64, 16), drawn(3, 64)
    rows = sorted_rows(3 * [[0, 1]], layer)
    inner = module.gate_experts(x, layer.gate_up, None, rows, SILU, CHIP)
    scores = torch.tensor([[0.5, 1.5]]).expand(3, 2)
    wide, narrow = (
        module.sum_experts(inner, layer.down, None, rows, scores, dtype, CHIP) for dtype in (torch.float32, x.dtype)
    )
    assert torch.equal(wide.to(x.dtype), narrow)
    assert not torch.equal(wide, narrow.float())


def test_no_rows_launch_nothing_and_other_shapes_are_refused() -> None:
    layer = Layer.drawn(2, 16, 8, biases=True)
    x, rows = drawn(3, 16), sorted_rows(3 * [[0, 1]], layer)
    none = ExpertRows(rows.table, torch.zeros(0, dtype=torch.int64), 2, 1)
    assert module.gate_experts(x[:0], layer.gate_up, None, none, SILU, CHIP).shape == (0, 8)
    scores, inner = torch.ones((3, 2)), drawn(6, 8)
    assert module.sum_experts(inner[:0], layer.down, None, none, scores[:0], x.dtype, CHIP).shape == (0, 16)
    with pytest.raises(ValueError, match=r"no product of torch.float32 and experts of torch.bfloat16"):
        module.gate_experts(x.float(), layer.gate_up, None, rows, SILU, CHIP)
    with pytest.raises(ValueError, match=r"x is \[3, 8\]"):
        module.gate_experts(x[:, :8].contiguous(), layer.gate_up, None, rows, SILU, CHIP)
    with pytest.raises(ValueError, match=r"biases are \[2, 8\]; wanted are contiguous \[2, 16\]"):
        module.gate_experts(x, layer.gate_up, layer.gate_up[:, :8, 0].contiguous(), rows, SILU, CHIP)
    with pytest.raises(ValueError, match="15 rows of gate and up"):
        module.gate_experts(x, layer.gate_up[:, 1:].contiguous(), None, rows, SILU, CHIP)
    with pytest.raises(ValueError, match=r"scores are \[3, 1\] in torch.float32; wanted is float32 \[T, 2\]"):
        module.sum_experts(inner, layer.down, None, rows, scores[:, :1], x.dtype, CHIP)
    with pytest.raises(ValueError, match="takes no order"):
        module.multiply_sorted_rows(inner, layer.down, None, rows, CHIP)


def test_programs_wait_before_they_access_other_kernels_outputs() -> None:
    """The table is another kernel's, too."""
    layer, x, scores = Layer.drawn(2, 64, 16), drawn(3, 64), torch.ones((3, 2))
    found = []
    for chip in (CHIP, replace(CHIP, dependent_launches=True)):
        rows = sorted_rows(3 * [[0, 1]], layer)
        with dependent_launches(layer.gate_up, layer.down) as waits:
            if chip == CHIP:
                waits.waited = True
                waits.plain = ("multiply_experts", "sum_choices")
            inner = module.gate_experts(x, layer.gate_up, None, rows, SILU, chip)
            found.append(module.sum_experts(inner, layer.down, None, rows, scores, x.dtype, chip))
    assert waits.programs == 2 + 2 + 3
    assert torch.equal(*found)


# -- Planted faults ----------------------------------------------------------------------------------------------------

FAULTS = {
    "the token of the place": ("source = tl.load(order + some_row) // chosen", "source = tl.load(order + some_row)"),
    "the rows of x are as sorted": ("tl.load(order + some_row) // chosen", "some_row.to(tl.int64) // chosen"),
    "the matrices of the expert before": ("weights + expert * (M", "weights + tl.maximum(expert - 1, 0) * (M"),
    "the matrices as of one": ("weights + expert * (MATRICES * outputs", "weights + expert * (1 * outputs"),
    "up is gate": ("starts + (outputs * inputs + start)", "starts + start"),
    "the last inputs are left out": ("range(0, inputs, INPUTS)", "range(0, inputs - INPUTS + 1, INPUTS)"),
    "inputs of the next row": ("tl.load(pointers, mask=inside, other=0.0)", "tl.load(pointers)"),
    "the biases of the first expert": ("bias + expert * (MATRICES * outputs)", "bias"),
    "up has the bias of gate": ("tl.load(biases + outputs)", "tl.load(biases)"),
    "silu for the clamped gate": (" if LIMIT is None else activate_clamped(sums, ups, ALPHA, LIMIT)", ""),
    "another alpha": ("activate_clamped(sums, ups, ALPHA, LIMIT)", "activate_clamped(sums, ups, 1.0, LIMIT)"),
    "another limit": ("activate_clamped(sums, ups, ALPHA, LIMIT)", "activate_clamped(sums, ups, ALPHA, 7.0)"),
    "the score of a row as sorted": ("tl.load(scores + target)", "tl.load(scores + some_row)"),
    "outputs are as sorted": ("out + target[None, :]", "out + row.to(tl.int64)[None, :]"),
    "the last row of an expert is left out": ("(row < last_row)[None, :]", "(row < last_row - 1)[None, :]"),
    "outputs of the next row": ("(output < outputs)[:, None] &", "(output < outputs + 1)[:, None] &"),
    "no scores": ("sums *= tl.load", "sums += 0 * tl.load"),
    "choices of other ranks count": (
        "tl.load(scores + place) != 0.0",
        "tl.load(scores + place) != 7.0",
    ),
    "the last choice is left out": ("tl.static_range(CHOSEN)", "tl.static_range(CHOSEN - 1)"),
    "the choices of the next token": (
        "place = token * CHOSEN + choice",
        "place = (token + 1) * CHOSEN - 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch)
    clamped, plain = Layer.drawn(3, 72, 24, CLAMPED, biases=True), Layer.drawn(3, 40, 24, GELU)

    def check(some: ModuleType) -> None:
        choices = [[0, 2], [2, 1], [3, 0], [2, 0], [3, 3]]
        for seed, layer in enumerate((clamped, plain)):
            x = drawn(5, layer.down.shape[1])
            x[4] = torch.nan
            with shuffled_programs(seed):
                assert_right(layer, x, choices, some)

    if fault == min(FAULTS):
        check(module)
    with broken(module, tmp_path, *FAULTS[fault]) as faulty, pytest.raises((AssertionError, InterpreterError)):
        check(faulty)
