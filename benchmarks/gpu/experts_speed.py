"""Layers of experts with plain weights: the kernels, and torch's grouped product with a separate gate and sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from gpu.bench import Bench, Row, Table, share
from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.layers.expert_products import SortedRows
from torch_backend.layers.plain_products import SortedChoices, Stack, fused_product

_EXPERTS, _CHOSEN, _HIDDEN, _INNER = 128, 8, 2048, 768
"""Of a layer of Qwen3-30B-A3B."""


def run(bench: Bench) -> Iterator[Table]:
    """One table. Shares are of the time to read the weights of the experts that were chosen, and of the products."""
    experts, chosen, hidden, inner = (4, 2, 64, 32) if bench.small else (_EXPERTS, _CHOSEN, _HIDDEN, _INNER)
    stacks = [
        Stack(bench.normal(experts, outputs, inputs, dtype=torch.bfloat16) / inputs**0.5, None)
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    ]
    rows: list[Row] = []
    for tokens in (3,) if bench.small else (1, 4, 16, 64, 256, 1024, 4096):
        rows += _layer(bench, stacks, tokens, chosen)
    rate = bench.rates.copy_bytes_per_second / 1e9
    yield Table(f"layers of {experts} experts ({bench.kernels.name}), copy {rate:.4g} GB/s", rows)


def _layer(bench: Bench, stacks: list[Stack], tokens: int, chosen: int) -> Iterator[Row]:
    gate_up, down = stacks
    experts, hidden, inner = down.weights.shape
    x = bench.normal(tokens, hidden, dtype=torch.bfloat16)
    choices = _choices(bench, tokens, experts, chosen)
    weights = 3 * hidden * inner * int((choices.rows.sizes > 0).sum()) * x.element_size()
    operations = 6 * hidden * inner * tokens * chosen
    seconds = {}
    for name, multiply in _products(bench).items():
        found = bench.stopwatch.seconds(lambda multiply=multiply: multiply(x, gate_up, down, choices))
        seconds[name] = found
        yield {
            "tokens": tokens,
            "product": name,
            "us": found * 1e6,
            "share of copy": share(weights / found, bench.rates.copy_bytes_per_second),
            "share of products": share(operations / found, bench.rates.matmul_flops_per_second),
            "speed-up": round(seconds["grouped_mm"] / found, 2),
        }


def _products(bench: Bench) -> dict[str, Callable[[torch.Tensor, Stack, Stack, SortedChoices], torch.Tensor]]:
    products = {"grouped_mm": lambda *given: multiply_grouped(bench, *given)}
    if bench.kernels.name == "triton":
        kernels = fused_product(bench.chip, Activation.SILU, None)
        products["kernel"] = lambda x, *given: kernels(x, *given, x.dtype)
    return products


def multiply_grouped(
    bench: Bench, x: torch.Tensor, gate_up: Stack, down: Stack, choices: SortedChoices
) -> torch.Tensor:
    """The same layer by torch's grouped product. On chips other than Hopper and datacenter Blackwell, torch multiplies
    one expert after the other, and waits on the host for their sizes."""
    tokens, chosen = choices.scores.shape
    ends = choices.rows.ends
    both = functional.grouped_mm(x[choices.order // chosen], gate_up.weights.transpose(1, 2), offs=ends)
    found = functional.grouped_mm(bench.kernels.operations.silu_mul(both), down.weights.transpose(1, 2), offs=ends)
    outputs = torch.empty_like(found)
    outputs[choices.order] = found
    return (outputs.view(tokens, chosen, -1).float() * choices.scores[..., None]).sum(1).to(x.dtype)


def _choices(bench: Bench, tokens: int, experts: int, chosen: int) -> SortedChoices:
    """Random experts for each token."""
    numbers = torch.rand((tokens, experts), device=bench.device, generator=bench.generator).argsort(1)[:, :chosen]
    flat, order = numbers.reshape(-1).sort(stable=True)
    sizes = flat.bincount(minlength=experts).to(torch.int32)
    scores = torch.rand((tokens, chosen), device=bench.device, generator=bench.generator)
    return SortedChoices(SortedRows(flat, sizes), order, scores)
