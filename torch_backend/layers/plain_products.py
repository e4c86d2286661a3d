"""Products of experts with plain weights on a GPU, by Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sglang_jax.architectures.kinds.experts import ClampedGate
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.layers.expert_products import SortedRows, log_product
from torch_backend.layers.scaled_products import ROWS_TRIED, runs_right

if TYPE_CHECKING:
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.plain_experts import ExpertRows


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all experts, `[experts, outputs, inputs]`, and the biases of their products, `[experts, outputs]`
    or None."""

    weights: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """What tokens chose, sorted by expert. `order`: the place of each row among the choices of all tokens, int64 `[M]`;
    `scores`: see `ExpertChoice`."""

    rows: SortedRows
    order: torch.Tensor
    scores: torch.Tensor


SortedProduct = Callable[[torch.Tensor, Stack, SortedRows], torch.Tensor]
"""`x [M, inputs]`, sorted by expert → `[M, outputs]` in the dtype of x. Outputs of padding are undefined."""

FusedProduct = Callable[[torch.Tensor, Stack, Stack, SortedChoices, torch.dtype], torch.Tensor]
"""`x [T, hidden]`, gate and up, down, what each token chose, and a dtype → the sums of its experts' outputs times their
scores, `[T, hidden]` in that dtype."""


def fused_product_for(
    device: torch.device, dtype: torch.dtype, activation: Activation | None, clamped: ClampedGate | None
) -> FusedProduct | None:
    """The product of experts in a dtype, with their gate, on a GPU, which it logs. None on a CPU, and if it does not
    work. `activation`: None for experts without gates, whose inner numbers are `relu(up) ** 2`."""
    if device.type != "cuda":
        return None
    name = str(dtype).removeprefix("torch.")
    if kernel_works(device, dtype, activation, clamped):
        log_product(name, "by a kernel, with their gate and scores")
        return fused_product_on(device, activation, clamped)
    log_product(name, "by every token, whether it chose them or not")
    return None


def fused_product_on(device: torch.device, activation: Activation | None, clamped: ClampedGate | None) -> FusedProduct:
    """The product by Triton kernels."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip

    return fused_product(Chip.of(device), activation, clamped)


def fused_product(chip: Chip, activation: Activation | None, clamped: ClampedGate | None) -> FusedProduct:
    """The same for a chip."""
    from torch_backend.kernels.plain_experts import Gate, gate_experts, sum_experts

    gate = Gate(activation, clamped)

    def multiply(
        x: torch.Tensor, gate_up: Stack, down: Stack, choices: SortedChoices, dtype: torch.dtype
    ) -> torch.Tensor:
        rows = _cut(choices.rows, choices.order, choices.scores.shape[1], gate_up.weights, chip)
        inner = gate_experts(x.contiguous(), gate_up.weights, gate_up.bias, rows, gate, chip)
        return sum_experts(inner, down.weights, down.bias, rows, choices.scores, dtype, chip)

    return multiply


def sorted_product_on(device: torch.device) -> SortedProduct:
    """Only the product, by the same kernel."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.plain_experts import multiply_sorted_rows

    chip = Chip.of(device)

    def multiply(x: torch.Tensor, stack: Stack, rows: SortedRows) -> torch.Tensor:
        own = _cut(rows, None, 1, stack.weights, chip)
        return multiply_sorted_rows(x.contiguous(), stack.weights, stack.bias, own, chip)

    return multiply


def _cut(rows: SortedRows, order: torch.Tensor | None, chosen: int, weights: torch.Tensor, chip: Chip) -> ExpertRows:
    """Cuts rows into tiles; `weights`: see `rows_per_expert`."""
    from torch_backend.kernels.expert_product import tile_table
    from torch_backend.kernels.plain_experts import ExpertRows, rows_per_expert, tile_rows

    per_expert = rows_per_expert(rows.expected, weights)
    size = tile_rows(per_expert, weights.dtype)
    if size not in rows.tables:
        rows.tables[size] = tile_table(rows.sizes, len(rows.experts), size, chip)
    return ExpertRows(rows.tables[size], order, chosen, per_expert)


@functools.cache
def kernel_works(
    device: torch.device, dtype: torch.dtype, activation: Activation | None, clamped: ClampedGate | None
) -> bool:
    """Whether the kernels' results on a GPU are correct: tested on two small experts, of which one has two rows; a
    failure is logged."""
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inner = 2, 200, 72

    def stack(outputs: int, inputs: int) -> Stack:
        weights = torch.randn((experts, outputs, inputs), generator=generator) / inputs**0.5
        return Stack(weights.to(dtype), torch.randn((experts, outputs), generator=generator).to(dtype))

    gate_up, down = stack(inner if activation is None else 2 * inner, hidden), stack(hidden, inner)
    x = torch.randn((max(ROWS_TRIED), hidden), generator=generator).to(dtype)
    scores = 1.0 + torch.rand((len(x), 1), generator=generator)
    chosen = (torch.arange(len(x)) >= 2).long()
    exact = scores.double() * _linear(down, chosen, _gated(_linear(gate_up, chosen, x), activation, clamped))

    def multiply(some: torch.Tensor) -> torch.Tensor:
        own = chosen[: len(some)]
        rows = SortedRows(own.to(device), own.bincount(minlength=experts).to(device, torch.int32))
        order = torch.arange(len(some), device=device)
        choices = SortedChoices(rows, order, scores[: len(some)].to(device))
        product = fused_product_on(device, activation, clamped)
        return product(some.to(device), _on(device, gate_up), _on(device, down), choices, torch.float32).cpu()

    return runs_right(multiply, x, exact, f"Triton's kernel for experts of {str(dtype).removeprefix('torch.')}")


def _on(device: torch.device, stack: Stack) -> Stack:
    return Stack(stack.weights.to(device), None if stack.bias is None else stack.bias.to(device))


def _linear(stack: Stack, chosen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product of each row with the expert that it chose, in float64."""
    assert stack.bias is not None
    own = zip(x.double(), stack.weights[chosen].double(), stack.bias[chosen].double(), strict=True)
    return torch.stack([functional.linear(row, matrix, bias) for row, matrix, bias in own])


def _gated(gate_up: torch.Tensor, activation: Activation | None, clamped: ClampedGate | None) -> torch.Tensor:
    if activation is None:
        return gate_up.relu().square()
    gate, up = gate_up.chunk(2, dim=-1)
    if clamped is not None:
        gate, up = gate.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
        return (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh") * up
