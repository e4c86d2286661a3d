"""First kernel of sampling: finds the greedy token of each row, with several programs per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Maximum parts of a row, and minimum tokens of a part if there are several.
_MAX_PARTS = 16
_MIN_PART = 4096
# Tokens of one iteration of a program.
_BLOCK = 1024

_ALIGNED = tl.constexpr(1024)
_INVALID_TOKEN = tl.constexpr(-1)


@triton.jit
def part_of_row(part, vocab, PARTS: tl.constexpr):
    """The first token of one of PARTS parts, and the end of the part."""
    length = tl.cdiv(tl.cdiv(vocab, PARTS), _ALIGNED) * _ALIGNED
    first = tl.minimum(part * length, vocab)
    return first, tl.minimum(first + length, vocab)


@triton.jit
def first_of_largest(values, tokens, vocab):
    """The lowest token with the largest value, and that value."""
    largest = tl.max(values, 0)
    return tl.min(tl.where(values == largest, tokens, vocab), 0), largest


@triton.jit
def _survey_kernel(
    logits, row_stride, vocab, best_logits, best_tokens, least_logits, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Finds, for each part of a row, its first most likely token, -1 if a logit is NaN or +infinity; its logit; and the
    smallest finite logit, or infinity."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tokens_here = tl.full([BLOCK], vocab, tl.int32)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    first, end = part_of_row(part, vocab, PARTS)
    for start in range(first, end, BLOCK):
        tokens = start + lanes
        values = tl.load(logits + tokens, mask=tokens < end, other=float("-inf"))
        better = values > best
        best = tl.where(better, values, best)
        best_tokens_here = tl.where(better, tokens, best_tokens_here)
        least = tl.where((values > float("-inf")) & (values < least), values, least)
        bad |= ((values != values) | (values == float("inf"))).to(tl.int32)
    token, largest = first_of_largest(best, best_tokens_here, vocab)
    at = row * PARTS + part
    tl.store(best_logits + at, largest)
    tl.store(best_tokens + at, tl.where(tl.max(bad, 0) > 0, _INVALID_TOKEN, token))
    tl.store(least_logits + at, tl.min(least, 0))


@triton.jit
def combine_survey(best_logits, best_tokens, row, vocab, PARTS: tl.constexpr):
    """Combines the parts of a row: its greedy token, -1 for an invalid row, and its logit."""
    parts = row * PARTS + tl.arange(0, PARTS)
    tokens = tl.load(best_tokens + parts)
    token, largest = first_of_largest(tl.load(best_logits + parts), tokens, vocab)
    return tl.where((tl.min(tokens, 0) < 0) | (largest == float("-inf")), _INVALID_TOKEN, token), largest


@dataclass(frozen=True, slots=True)
class Survey:
    """See `_survey_kernel`; `[n, parts]` each."""

    best_logits: torch.Tensor
    best_tokens: torch.Tensor
    least_logits: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> Survey:
        rows, vocab = logits.shape
        parts = parts_of(vocab)
        survey = cls(
            best_logits=logits.new_empty((rows, parts)),
            best_tokens=logits.new_empty((rows, parts), dtype=torch.int32),
            least_logits=logits.new_empty((rows, parts)),
        )
        _survey_kernel[(rows, parts)](logits, logits.stride(0), vocab, *survey.tensors, PARTS=parts, BLOCK=_BLOCK)
        return survey

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.best_logits, self.best_tokens, self.least_logits


def parts_of(vocab: int) -> int:
    """Programs that share a row, a power of two, for any number of rows, so that samples are batch-invariant."""
    return min(_MAX_PARTS, int(triton.next_power_of_2(triton.cdiv(vocab, _MIN_PART))))
