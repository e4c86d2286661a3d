"""Layers whose state is a matrix per head, which decays at each token and adds the outer product of its key and value.

At a token with query q, key k, value v, log of the decay g and, for a delta rule, a rate b, a head's state S becomes

    S = exp(g) S;  v = b (v - k S) for a delta rule;  S = S + k v,  and the output is q S.

That is a gated delta net (Yang et al. 2024) with rates, and Mamba-2 (Dao and Gu 2024) without. `scan` is the chunked
form; `reference_scan` computes token by token, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torch_backend.recurrent.rows import StateRows

Times = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BLOCK = 64
"""Tokens of a sequence that are computed at once: within a block by products of matrices, from block to block by the
state. Products within a block grow with its length, steps from block to block with its inverse."""


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """Inputs of T tokens, all float32: `queries`, `keys` `[T, groups, key_dim]`, each for `heads / groups` neighbouring
    heads; `values` `[T, heads, value_dim]`; `decays` `[T, heads]`, logarithms; `rates` `[T, heads]` of a delta rule, or
    None."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor | None

    def at(self, tokens: torch.Tensor) -> ScanInputs:
        """Selects tokens, int64 `[n]`."""
        rates = None if self.rates is None else self.rates[tokens]
        return ScanInputs(self.queries[tokens], self.keys[tokens], self.values[tokens], self.decays[tokens], rates)

    def part(self, first: int, last: int) -> ScanInputs:
        """Selects tokens `[first, last)`, with a query and a key for each head."""
        times = self.values.shape[1] // self.keys.shape[1]
        queries, keys = (x[first:last].repeat_interleave(times, 1) for x in (self.queries, self.keys))
        rates = None if self.rates is None else self.rates[first:last]
        return ScanInputs(queries, keys, self.values[first:last], self.decays[first:last], rates)


def _times(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`[..., key_dim]` by `[..., key_dim, value_dim]`."""
    return (vectors[..., None, :] @ matrices)[..., 0, :]


def _times_in_order(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`_times` in the order of keys, by sums of halves: additions of whole tensors, which no library reorders."""
    products = vectors[..., None] * matrices
    while products.shape[-2] > 1:
        half = products.shape[-2] // 2
        even = products[..., :half, :] + products[..., half : 2 * half, :]
        products = torch.cat((even, products[..., 2 * half :, :]), dim=-2) if products.shape[-2] % 2 else even
    return products[..., 0, :]


def scan(inputs: ScanInputs, states: torch.Tensor, rows: StateRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns outputs float32 `[T, heads, value_dim]`, and the states after the step. `states`: float32 `[R, heads,
    key_dim, value_dim]` before it, which are overwritten."""
    if rows.decode_only:
        return _one_token(inputs.part(0, len(states)), states)
    outputs = torch.empty_like(inputs.values)
    decodes = rows.num_decode
    if decodes:
        outputs[:decodes], states[:decodes] = _one_token(inputs.part(0, decodes), states[:decodes])
    starts = rows.starts
    for sequence in range(decodes, len(states)):
        for first in range(starts[sequence], starts[sequence + 1], BLOCK):
            last = min(first + BLOCK, starts[sequence + 1])
            outputs[first:last], states[sequence] = _block(inputs.part(first, last), states[sequence])
    return outputs, states


def scan_tokens(inputs: ScanInputs, states: torch.Tensor, rows: StateRows) -> tuple[torch.Tensor, torch.Tensor]:
    """`scan` one token after the other, for all sequences at once, with sums in one order: a token's result depends on
    no other token's place. Takes time in proportion to the longest chunk."""
    if rows.decode_only:
        return _one_token(inputs.part(0, len(states)), states, _times_in_order)
    outputs = torch.empty_like(inputs.values)
    starts = torch.tensor(rows.starts, device=states.device)
    lengths = starts.diff()
    for number in range(int(lengths.max())):
        own = (lengths > number).nonzero()[:, 0]
        outputs[starts[own] + number], states[own] = _one_token(
            inputs.at(starts[own] + number).part(0, len(own)), states[own], _times_in_order
        )
    return outputs, states


def _one_token(inputs: ScanInputs, states: torch.Tensor, times: Times = _times) -> tuple[torch.Tensor, torch.Tensor]:
    states = states * inputs.decays.exp()[..., None, None]
    values = inputs.values
    if inputs.rates is not None:
        values = inputs.rates[..., None] * (values - times(inputs.keys, states))
    states = states.addcmul_(inputs.keys[..., None], values[..., None, :])
    return times(inputs.queries, states), states


def _block(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes some tokens of one sequence: their outputs, and the state after them."""
    queries, keys, values = (x.transpose(0, 1) for x in (inputs.queries, inputs.keys, inputs.values))
    decays = inputs.decays.t().cumsum(1)  # [heads, block], from the block's start
    later = torch.ones(decays.shape[1], decays.shape[1], dtype=torch.bool, device=decays.device).triu_(1)
    between = (decays[:, :, None] - decays[:, None, :]).masked_fill_(later, -torch.inf).exp_()
    since = decays.exp()[..., None]
    if inputs.rates is not None:
        # Each token's update depends on those of the tokens before it in the block: a triangular system.
        rates = inputs.rates.t()[..., None]
        system = rates * between * (keys @ keys.transpose(1, 2))
        wanted = rates * (values - since * (keys @ state))
        values = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    outputs = since * (queries @ state) + (between * (queries @ keys.transpose(1, 2))) @ values
    left = (decays[:, -1:] - decays).exp()[..., None]
    state = state * since[:, -1:] + (keys * left).transpose(1, 2) @ values
    return outputs.transpose(0, 1), state


def reference_scan(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes T tokens of one sequence one by one from `[heads, key_dim, value_dim]`: outputs and state."""
    outputs = []
    for token in range(len(inputs.values)):
        found, states = _one_token(inputs.part(token, token + 1), state[None])
        outputs.append(found[0])
        state = states[0]
    return torch.stack(outputs), state
