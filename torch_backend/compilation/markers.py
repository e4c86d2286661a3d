"""Marker operators of a traced graph: attention over pages, collectives, and the hidden states at which the graph is
split. They are traced and replaced, and never run."""

from __future__ import annotations

import torch


@torch.library.custom_op("sglang_jax::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Causal attention of one layer. Query `[1, T, heads, head_dim]`, key and value `[1, T, kv_heads, head_dim]` → like
    the query. The other arguments are those of `AttentionOptions`."""
    raise NotImplementedError("attention of a traced graph is replaced before the graph runs")


@attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("sglang_jax::hidden_states", mutates_args=())
def hidden_states(x: torch.Tensor) -> torch.Tensor:
    """The hidden states between a model's body and its head: `[1, T, hidden]`."""
    raise NotImplementedError("the graph is cut here before it runs")


@hidden_states.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sglang_jax::sum_of_ranks", mutates_args=())
def sum_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """The sum of every rank's `x`."""
    raise NotImplementedError("sums of a traced graph are replaced before the graph runs")


@sum_of_ranks.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("sglang_jax::side_by_side_of_ranks", mutates_args=())
def side_by_side_of_ranks(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """Every rank's `x [..., n]`, concatenated: `[..., ranks * n]`."""
    raise NotImplementedError("what ranks put together is replaced before the graph runs")


@side_by_side_of_ranks.register_fake
def _(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], ranks * x.shape[-1]))


ATTENTION = torch.ops.sglang_jax.attention.default
HIDDEN_STATES = torch.ops.sglang_jax.hidden_states.default
SIDE_BY_SIDE_OF_RANKS = torch.ops.sglang_jax.side_by_side_of_ranks.default
SUM_OF_RANKS = torch.ops.sglang_jax.sum_of_ranks.default
