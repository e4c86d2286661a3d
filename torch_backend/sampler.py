"""Samples one token for each row of logits, with no more work than the step's rows need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from sglang_jax.runner.row_updates import ONE_OUTPUT
from torch_backend.sampling_state import Needs, SamplingState


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """Parameters of each of n rows: float32 `[n]`, but `top_k` int32 `[n]` and `seed` int32 `[n, 2]`, the bits of two
    words, low word first. `position` int32 `[n]`: position of the sampled token, which also keys the noise. `cut`:
    whether top-k or top-p may drop tokens of any row."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    cut: bool = True


@dataclass(frozen=True, slots=True)
class MaskedLines:
    """Lines of logits, int64 `[masked]`, and their masks, int32 `[masked, words]` (see `TokenMasks`)."""

    lines: torch.Tensor
    words: torch.Tensor


class TokenSampler(Protocol):
    """The part of sampling that reads every token's logit. Results are int32 `[n]`: `INVALID_TOKEN` for a row of logits
    float32 `[n, vocab]` with a NaN, a positive infinity or no finite value."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, the first of equals."""
        ...

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        """A random token for each row; the most likely one for rows of temperature 0. Order: temperature, top-k, top-p
        (Holtzman et al. 2019), min-p, the Gumbel-max trick. Each filter renormalises the tokens that the filter before
        it kept, and also keeps tokens that tie with the least likely one it keeps."""
        ...


def sample(
    logits: torch.Tensor,
    state: SamplingState,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    needs: Needs,
    sampler: TokenSampler,
    masked: MaskedLines | None = None,
) -> torch.Tensor:
    """Samples tokens, int32 `[n]`; `INVALID_TOKEN` for a row whose logits are not finite (see `TokenSampler`). Order:
    mask of tokens, logit bias, mask of stop ids, penalties, then `TokenSampler`.

    `logits`: float32 `[n, vocab]`; `state`: of all rows; `rows`: int64 `[n]`, the row of each line of logits;
    `kv_lens`: int32 `[n]`, position of the token to sample; `needs`: the parts that any of the rows needs; `masked`:
    the lines with a mask of tokens.
    """
    if masked is not None:
        logits = _mask_tokens(logits, masked)
    if needs & Needs.BIAS:
        logits = _add_bias(logits, state, rows)
    if needs & Needs.STOP_MASK:
        logits = _mask_stop_ids(logits, state, rows, kv_lens)
    if needs & Needs.PENALTIES:
        logits = _penalise(logits, state, rows)
    if not needs & Needs.RANDOM:
        return sampler.greedy(logits)
    parameters = SamplerInputs(
        state.temperature[rows],
        state.top_k[rows],
        state.top_p[rows],
        state.min_p[rows],
        state.seed[rows],
        kv_lens,
        cut=bool(needs & Needs.CUT),
    )
    return sampler.sample(logits, parameters)


def _mask_tokens(logits: torch.Tensor, masked: MaskedLines) -> torch.Tensor:
    """Adds minus infinity to refused tokens. A line that is not finite stays so, and no token of it is sampled: NaN,
    and infinity minus infinity, are NaN."""
    every = len(masked.lines) == len(logits)
    own = logits if every else logits[masked.lines]
    octets = masked.words.view(torch.uint8).int()
    spread = functional.embedding(octets, _refusals(logits.device)).flatten(1)[:, : logits.shape[1]]
    own = spread.add_(own)
    return own if every else logits.index_copy(0, masked.lines, own)


@cache
def _refusals(device: torch.device) -> torch.Tensor:
    """For each byte of a mask, the values to add to its eight tokens' logits, lowest bit first: 0 or minus infinity.
    float32 `[256, 8]`. On a CPU, adding rows of a table takes a tenth of the time of `masked_fill`."""
    octets = torch.arange(256, device=device)[:, None]
    allowed = octets >> torch.arange(8, device=device) & 1
    return torch.where(allowed == 1, 0.0, -torch.inf)


def _add_bias(logits: torch.Tensor, state: SamplingState, rows: torch.Tensor) -> torch.Tensor:
    """Adds the logit bias. Unused entries add 0 to the last token."""
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
    """Applies the repetition penalty of CTRL (Keskar et al. 2019), then OpenAI's frequency and presence penalties."""
    occurrences = state.occurrences[rows]
    outputs = occurrences // ONE_OUTPUT
    repetition = torch.where(occurrences > 0, state.repetition_penalty[rows, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - state.frequency_penalty[rows, None] * outputs
    return logits - torch.where(outputs > 0, state.presence_penalty[rows, None], 0.0)
