"""Logprobs of the raw logits, for sampled tokens and for tokens of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

PROMPT_BLOCK = 64
"""Prompt positions whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """`logprobs` float32 `[n]`; `top_ids` int32 and `top_logprobs` float32 `[n, k]`, most likely first."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, alternatives: int) -> Logprobs:
    """Log-softmax of `logits` float32 `[n, vocab]` at `tokens` int32 `[n]`, and at the `alternatives` most likely
    tokens."""
    # Not `logsumexp`, whose sums depend on the number of rows.
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, tokens.clamp(min=0).long()[:, None])
    top, ids = torch.topk(logprobs, min(alternatives, logits.shape[1]), dim=-1)
    return Logprobs(chosen[:, 0], ids.to(torch.int32), top)


def prompt_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, alternatives: int, to_logits: Callable[[torch.Tensor], torch.Tensor]
) -> Logprobs:
    """Logprobs of `targets` int32 `[m]`, the tokens after each position of `hidden` `[m, hidden]`, `PROMPT_BLOCK`
    positions at a time. `to_logits`: `[b, hidden]` → float32 `[b, vocab]`."""
    found = [
        token_logprobs(
            to_logits(hidden[start : start + PROMPT_BLOCK]), targets[start : start + PROMPT_BLOCK], alternatives
        )
        for start in range(0, len(targets), PROMPT_BLOCK)
    ]
    return Logprobs(
        torch.cat([part.logprobs for part in found]),
        torch.cat([part.top_ids for part in found]),
        torch.cat([part.top_logprobs for part in found]),
    )
