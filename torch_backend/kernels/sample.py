"""Samples one token for each row of logits: temperature, top-k, top-p, min-p and the Gumbel-max trick, without a sort.

First, the greedy token of each row is found and, for a row that samples, the largest distance to its maximum that the
filters keep (`sample_filters`). Then programs that share a row sample among the kept tokens, and the best of their
candidates is taken. Work that a row does not need is skipped on the device; nothing is read on the host, so all of it
can be captured in a CUDA graph. It samples the same tokens as `sglang_jax.jax_runner.sampler`, except where rounding
decides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.sample_filters import MIN_TEMPERATURE, KeptTokens, distances_of, greedy_tokens, kept_tokens
from torch_backend.kernels.sample_survey import first_of_largest, part_of_row, parts_of
from torch_backend.sampler import SamplerInputs

# Tokens of one iteration of a program.
_BLOCK = 1024

_PARITY = tl.constexpr(0x1BD11BDA)


@triton.jit
def _round(left, right, ROTATION: tl.constexpr):
    left += right
    return left, ((right << ROTATION) | (right >> (32 - ROTATION))) ^ left


@triton.jit
def _threefry_2x32(key_low, key_high, left, right):
    """First word of Threefry-2x32 with 20 rounds (Salmon et al. 2011), of uint32."""
    third = key_low ^ key_high ^ _PARITY
    left += key_low
    right += key_high
    for group in tl.static_range(5):
        if group % 2 == 0:
            left, right = _round(left, right, 13)
            left, right = _round(left, right, 15)
            left, right = _round(left, right, 26)
            left, right = _round(left, right, 6)
        else:
            left, right = _round(left, right, 17)
            left, right = _round(left, right, 29)
            left, right = _round(left, right, 16)
            left, right = _round(left, right, 24)
        left += key_high if group % 3 == 0 else (third if group % 3 == 1 else key_low)
        right += (third if group % 3 == 0 else (key_low if group % 3 == 1 else key_high)) + (group + 1)
    return left


@triton.jit
def _gumbel_noise(key_low, key_high, position, tokens):
    """Standard Gumbel variates: a function of the request's seed, the position and the token."""
    bits = _threefry_2x32(key_low, key_high, position + tl.zeros_like(tokens), tokens)
    # 23 bits plus a half: strictly inside (0, 1), so that both logarithms are finite.
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_kernel(
    logits, row_stride, vocab, temperatures, largest_logits, kept_distances, seeds, positions, scores, candidates,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    kept = tl.load(kept_distances + row)
    if kept >= 0.0:
        logits += row.to(tl.int64) * row_stride
        largest = tl.load(largest_logits + row)
        temperature = tl.maximum(tl.load(temperatures + row), MIN_TEMPERATURE)
        key_low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
        key_high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
        position = tl.load(positions + row).to(tl.uint32, bitcast=True)
        lanes = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_tokens = tl.full([BLOCK], vocab, tl.int32)
        first, end = part_of_row(part, vocab, PARTS)
        for start in range(first, end, BLOCK):
            tokens = start + lanes
            distances = distances_of(logits, tokens, end, largest, temperature)
            within = distances <= kept
            if tl.max(within.to(tl.int32), 0) > 0:
                noise = _gumbel_noise(key_low, key_high, position, tokens.to(tl.uint32, bitcast=True))
                values = tl.where(within, noise - distances, float("-inf"))
                better = values > best
                best = tl.where(better, values, best)
                best_tokens = tl.where(better, tokens, best_tokens)
        token, score = first_of_largest(best, best_tokens, vocab)
        tl.store(scores + row * PARTS + part, score)
        tl.store(candidates + row * PARTS + part, token)


@triton.jit
def _best_kernel(kept_distances, scores, candidates, vocab, tokens, PARTS: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(kept_distances + row) >= 0.0:
        at = row * PARTS + tl.arange(0, PARTS)
        token, _ = first_of_largest(tl.load(scores + at), tl.load(candidates + at), vocab)
        tl.store(tokens + row, token)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the first of equals: int32 `[n]`; -1 for an invalid row (see `sample`).
    `logits` float32 `[n, vocab]`, tokens adjacent in memory."""
    _check_logits(logits)
    return greedy_tokens(logits)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cut: bool = True,
) -> torch.Tensor:
    """Samples one token for each row, int32 `[n]`: greedily if the temperature is 0, else with the Gumbel-max trick.

    Order: temperature, top-k, top-p (Holtzman et al. 2019), min-p, Gumbel-max. Each filter renormalises the tokens that
    the one before it kept. Tokens that tie with the least likely one kept are kept too; of tokens that tie at the end,
    the lowest wins. The noise comes from Threefry-2x32 keyed by the seed, counted by (position, token), so that a row's
    token is batch-invariant: it does not depend on other rows or its place in the batch. A row with a logit that is NaN
    or +infinity, or without a finite one, is invalid and gives -1; -infinity is a token that cannot be sampled.

    - `logits`: float32 `[n, vocab]`, after biases and penalties; tokens adjacent in memory.
    - `temperature`, `top_p`, `min_p`: float32 `[n]`; 1 and 0 disable the last two.
    - `top_k`: int32 `[n]`, at least 1; the vocabulary's size or more disables it.
    - `seeds`: int32 or uint32 `[n, 2]`, low word first; `positions`: int32 `[n]`.
    - `cut`: whether top-k or top-p may drop tokens of any row. If not, they are not read.
    """
    kept = keep(logits, temperature, top_k, top_p, min_p, cut)
    _check_rows("seeds", seeds, (logits.shape[0], 2))
    _check_rows("positions", positions, logits.shape[:1])
    rows, vocab = logits.shape
    if rows:
        parts = parts_of(vocab)
        scores, candidates = logits.new_empty((rows, parts)), logits.new_empty((rows, parts), dtype=torch.int32)
        _sample_kernel[(rows, parts)](
            logits, logits.stride(0), vocab, temperature, kept.largest, kept.distances, seeds, positions, scores,
            candidates, BLOCK=_BLOCK, PARTS=parts,
        )  # fmt: skip
        _best_kernel[(rows,)](kept.distances, scores, candidates, vocab, kept.greedy, PARTS=parts, num_warps=1)
    return kept.greedy


def keep(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    cut: bool = True,
) -> KeptTokens:
    """Applies the filters to each row; for the arguments see `sample`."""
    _check_logits(logits)
    for name, values in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        _check_rows(name, values, logits.shape[:1])
    return kept_tokens(logits, temperature, top_k, top_p, min_p, cut)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}; "
            "wanted is float32 [n, vocab] with tokens side by side"
        )


def _check_rows(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    if values.shape != shape or not values.is_contiguous() or values.element_size() != 4:
        raise ValueError(f"{name} is {values.dtype} {list(values.shape)}; wanted are 4 bytes for each of {list(shape)}")


class TritonSampler:
    """`TokenSampler` with Triton kernels. Filters by searching instead of sorting, and reads nothing on the host."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return greedy(logits)

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        return sample(
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.seed,
            parameters.position,
            parameters.cut,
        )
