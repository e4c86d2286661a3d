"""Draws one token for each row of logits, doing only the work that the step's rows ask for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.runner.row_updates import ONE_OUTPUT
from torch_backend.native_draw import DrawParameters
from torch_backend.sampling_state import Needs, SamplingState

Draw = Callable[[torch.Tensor, DrawParameters], torch.Tensor]
"""From logits float32 `[n, vocab]` to tokens int32 `[n]`; `native_draw` describes it."""


def sample(
    logits: torch.Tensor, state: SamplingState, rows: torch.Tensor, kv_lens: torch.Tensor, needs: Needs, draw: Draw
) -> torch.Tensor:
    """Draws tokens, int32 `[n]`; `INVALID_TOKEN` for a row with a logit that is not finite.

    Order: logit bias, mask of stop ids, penalties, temperature, top-k, top-p, min-p, draw.

    **Arguments:**

    - `logits`: float32 `[n, vocab]`.
    - `state`: of all rows; `rows` int64 `[n]` says which row each line of logits belongs to.
    - `kv_lens`: int32 `[n]`, position of the token to be drawn.
    - `needs`: what at least one of the rows asks for.
    """
    least, largest = torch.aminmax(logits, dim=-1)
    finite = torch.isfinite(largest) & torch.isfinite(least)
    if needs & Needs.BIAS:
        logits = _add_bias(logits, state, rows)
    if needs & Needs.STOP_MASK:
        logits = _mask_stop_ids(logits, state, rows, kv_lens)
    if needs & Needs.PENALTIES:
        logits = _penalise(logits, state, rows)
    if needs & Needs.DRAW:
        parameters = DrawParameters(
            state.temperature[rows], state.top_k[rows], state.top_p[rows], state.min_p[rows], state.seed[rows], kv_lens
        )
        tokens = draw(logits, parameters)
    else:
        tokens = torch.argmax(logits, dim=-1)
    if needs & (Needs.BIAS | Needs.PENALTIES):
        # Finite logits may overflow under a bias or a penalty; a masked stop id is -inf on purpose.
        finite = finite & (logits.amax(dim=-1) < torch.inf)
    return torch.where(finite, tokens, INVALID_TOKEN).to(torch.int32)


def _add_bias(logits: torch.Tensor, state: SamplingState, rows: torch.Tensor) -> torch.Tensor:
    """Unused entries, whose value is 0, go to the last token."""
    ids = state.bias_ids[rows].long().clamp(max=logits.shape[1] - 1)
    return logits.scatter_add(1, ids, state.bias_values[rows])


def _mask_stop_ids(
    logits: torch.Tensor, state: SamplingState, rows: torch.Tensor, kv_lens: torch.Tensor
) -> torch.Tensor:
    vocab_size = logits.shape[1]
    masked = kv_lens - state.prompt_len[rows] < state.min_new_tokens[rows]
    ids = torch.where(masked[:, None], state.stop_ids[rows], vocab_size).long()
    penalties = logits.new_zeros(len(logits), vocab_size + 1).scatter_(1, ids, -torch.inf)
    return logits + penalties[:, :vocab_size]


def _penalise(logits: torch.Tensor, state: SamplingState, rows: torch.Tensor) -> torch.Tensor:
    """Repetition penalty of CTRL (Keskar et al. 2019), then OpenAI's frequency and presence penalties."""
    occurrences = state.occurrences[rows]
    outputs = occurrences // ONE_OUTPUT
    repetition = torch.where(occurrences > 0, state.repetition_penalty[rows, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - state.frequency_penalty[rows, None] * outputs
    return logits - torch.where(outputs > 0, state.presence_penalty[rows, None], 0.0)
