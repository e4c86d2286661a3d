"""Samples one token for each row of logits: temperature, top-k, top-p, min-p and the Gumbel-max trick, without a sort.

Three kernels in a row. The first gives each row one program: it finds the greedy token, and for a row that samples the
largest distance to the row's maximum that the filters keep. Distances are never negative, so their bits as integers
have the order of their values, and a filter is a search for a least integer. The second samples among what is kept,
many programs for each row since the noise costs most. The third takes the best of what they chose. What a row does not
ask for is skipped on the device; nothing is read on the host, so that all of it can be captured in a CUDA graph.

It samples what `sglang_jax.jax_runner.sampler` samples, except where rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Tokens that a program looks at in one go, and limits that one pass over the vocabulary tries.
_SEARCH_BLOCK = 2048
_LIMITS = 8
_SAMPLE_BLOCK = 1024
_SAMPLE_PROGRAMS = 16

_INFINITY_BITS = tl.constexpr(0x7F800000)
_ONE_EXPONENT = tl.constexpr(0x00800000)
_LEAST_TEMPERATURE = tl.constexpr(1e-20)
_INVALID_TOKEN = tl.constexpr(-1)
# Stands for a row that samples nothing, among distances, which are not negative.
_NOT_SAMPLED = tl.constexpr(-1.0)
_PARITY = tl.constexpr(0x1BD11BDA)


@triton.jit
def _distances(logits, tokens, vocab, largest, temperature):
    """Distances of scaled logits to the largest; NaN, which is within no limit, beyond the vocabulary."""
    values = tl.load(logits + tokens, mask=tokens < vocab, other=float("nan"))
    return tl.div_rn(largest - values, temperature)


@triton.jit
def _first_of_largest(values, tokens, vocab):
    """The lowest token that has the largest value, and that value."""
    largest = tl.max(values, 0)
    return tl.min(tl.where(values == largest, tokens, vocab), 0), largest


@triton.jit
def _survey(logits, vocab, BLOCK: tl.constexpr):
    """One row's greedy token (-1 if NaN or +infinity is among them, or none is finite), its logit, the least one."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tokens = lanes
    least = tl.full([BLOCK], float("inf"), tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + lanes
        values = tl.load(logits + tokens, mask=tokens < vocab, other=float("-inf"))
        better = values > best
        best = tl.where(better, values, best)
        best_tokens = tl.where(better, tokens, best_tokens)
        least = tl.where((values > float("-inf")) & (values < least), values, least)
        bad |= ((values != values) | (values == float("inf"))).to(tl.int32)
    token, largest = _first_of_largest(best, best_tokens, vocab)
    token = tl.where((tl.max(bad, 0) > 0) | (largest == float("-inf")), _INVALID_TOKEN, token)
    return token, largest, tl.min(least, 0)


@triton.jit
def _least_distance(
    logits, vocab, largest, temperature, share, farthest, kept, WEIGHTED: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The least distance within which lies enough: `share` tokens, or where WEIGHTED `share` of the probability that
    `kept` keeps. The result keeps what that distance keeps, and is at most `kept`.

    Each pass over the vocabulary tries LIMITS distances and narrows the interval of the answer to one between two of
    them, then to the distances that occur in it. `farthest` is the largest finite distance of the row: the first pass
    tries powers of two below it, later ones spread over the interval.
    """
    # Tokens along the second axis, limits along the first: a pass compares each distance with all limits in registers.
    lanes = tl.arange(0, BLOCK)[None, :]
    ways = tl.arange(0, LIMITS)[:, None]
    low = tl.full([], 0, tl.int32)
    high = kept.to(tl.int32, bitcast=True)
    anchor = tl.minimum(high, farthest.to(tl.int32, bitcast=True))
    step = tl.full([], _ONE_EXPONENT, tl.int32)
    wanted = share
    first_pass = True
    while low < high:
        limit_bits = tl.maximum(tl.where(ways == 0, high, anchor - (ways - 1) * step), low)
        limits = limit_bits.to(tl.float32, bitcast=True)
        lowest, highest = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        amounts = tl.zeros([LIMITS, BLOCK], tl.float32 if WEIGHTED else tl.int32)
        nearest = tl.full([1, BLOCK], float("inf"), tl.float32)
        furthest = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            distances = _distances(logits, start + lanes, vocab, largest, temperature)
            within = distances <= limits
            if WEIGHTED:
                amounts += tl.where(within, tl.exp(-distances), 0.0)
            else:
                amounts += within.to(tl.int32)
            nearest = tl.where((distances >= lowest) & (distances < nearest), distances, nearest)
            furthest = tl.where((distances <= highest) & (distances > furthest), distances, furthest)
        amount = tl.sum(amounts, 1, keep_dims=True)
        if WEIGHTED:  # noqa: SIM102 - decided at compile time, the other one is not
            if first_pass:
                # The first of the limits is `kept`: within it lies all there is.
                wanted = share * tl.max(amount)
        enough = amount >= wanted
        nearest_bits = tl.min(nearest).to(tl.int32, bitcast=True)
        furthest_bits = tl.max(furthest).to(tl.int32, bitcast=True)
        low = tl.maximum(tl.max(tl.where(enough, low, limit_bits + 1)), nearest_bits)
        high = tl.minimum(tl.min(tl.where(enough, limit_bits, high)), furthest_bits)
        step = tl.maximum((high - low + LIMITS - 1) // LIMITS, 1)
        anchor = high - step
        first_pass = False
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _filter_kernel(
    logits, row_stride, vocab, temperatures, top_ks, top_ps, min_ps, tokens, largest_logits, kept_distances,
    RANDOM: tl.constexpr, LIMITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    token, largest, least = _survey(logits, vocab, BLOCK)
    tl.store(tokens + row, token)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        kept = tl.full([], _NOT_SAMPLED, tl.float32)
        if (temperature > 0.0) & (token >= 0):
            temperature = tl.maximum(temperature, _LEAST_TEMPERATURE)
            farthest = tl.div_rn(largest - least, temperature)
            kept = tl.full([], float("inf"), tl.float32)
            top_k = tl.load(top_ks + row)
            if top_k < vocab:
                kept = _least_distance(
                    logits, vocab, largest, temperature, top_k, farthest, kept, False, LIMITS, BLOCK
                )  # fmt: skip
            top_p = tl.load(top_ps + row)
            if top_p < 1.0:
                kept = _least_distance(
                    logits, vocab, largest, temperature, top_p, farthest, kept, True, LIMITS, BLOCK
                )  # fmt: skip
            kept = tl.minimum(kept, -tl.log(tl.load(min_ps + row)))
        tl.store(largest_logits + row, largest)
        tl.store(kept_distances + row, kept)


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
    # 23 bits and a half step: strictly inside (0, 1), so that both logarithms are finite.
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _sample_kernel(
    logits, row_stride, vocab, temperatures, largest_logits, kept_distances, seeds, positions, scores, candidates,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    kept = tl.load(kept_distances + row)
    if kept >= 0.0:
        logits += row.to(tl.int64) * row_stride
        largest = tl.load(largest_logits + row)
        temperature = tl.maximum(tl.load(temperatures + row), _LEAST_TEMPERATURE)
        key_low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
        key_high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
        position = tl.load(positions + row).to(tl.uint32, bitcast=True)
        lanes = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        best_tokens = tl.full([BLOCK], vocab, tl.int32)
        length = tl.cdiv(tl.cdiv(vocab, PROGRAMS), BLOCK) * BLOCK
        for start in range(part * length, tl.minimum((part + 1) * length, vocab), BLOCK):
            tokens = start + lanes
            distances = _distances(logits, tokens, vocab, largest, temperature)
            within = distances <= kept
            if tl.max(within.to(tl.int32), 0) > 0:
                noise = _gumbel_noise(key_low, key_high, position, tokens.to(tl.uint32, bitcast=True))
                values = tl.where(within, noise - distances, float("-inf"))
                better = values > best
                best = tl.where(better, values, best)
                best_tokens = tl.where(better, tokens, best_tokens)
        token, score = _first_of_largest(best, best_tokens, vocab)
        tl.store(scores + row * PROGRAMS + part, score)
        tl.store(candidates + row * PROGRAMS + part, token)


@triton.jit
def _best_kernel(kept_distances, scores, candidates, vocab, tokens, PROGRAMS: tl.constexpr):
    row = tl.program_id(0)
    if tl.load(kept_distances + row) >= 0.0:
        at = row * PROGRAMS + tl.arange(0, PROGRAMS)
        token, _ = _first_of_largest(tl.load(scores + at), tl.load(candidates + at), vocab)
        tl.store(tokens + row, token)


@dataclass(frozen=True, slots=True)
class Kept:
    """Of each of n rows:

    - `greedy`: int32 `[n]`, its first likeliest token; -1 for an invalid row (see `sample`).
    - `largest`: float32 `[n]`, the logit of that.
    - `distances`: float32 `[n]`: tokens are kept whose logit, over the temperature, lies at most so far below the
      largest. -1 for a row that samples nothing: greedy or invalid.
    """

    greedy: torch.Tensor
    largest: torch.Tensor
    distances: torch.Tensor


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, the first of equals: int32 `[n]`; -1 for an invalid row (see `sample`).

    **Arguments:** `logits` float32 `[n, vocab]`, tokens side by side.
    """
    _check_logits(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _filter_kernel[(rows,)](
            logits, logits.stride(0), vocab, None, None, None, None, tokens, None, None,
            RANDOM=False, LIMITS=_LIMITS, BLOCK=_SEARCH_BLOCK, num_warps=16,
        )  # fmt: skip
    return tokens


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One token for each row, int32 `[n]`: greedy where the temperature is 0, else by the Gumbel-max trick.

    Order: temperature, top-k, top-p (Holtzman et al. 2019), min-p, Gumbel-max. Each filter works on what the one before
    it kept, renormalised. Tokens that tie with the least likely one kept are kept as well; of tokens that tie at the
    end the lowest wins. The noise comes from Threefry-2x32 keyed by the seed, counted by (position, token), so that
    a row's token is batch-invariant: it depends neither on the other rows nor on where in the batch it stands. A row
    with a logit that is NaN or +infinity, or without a finite one, is invalid and gives -1; -infinity is a token that
    cannot be sampled.

    **Arguments:**

    - `logits`: float32 `[n, vocab]`, after biases and penalties; tokens side by side.
    - `temperature`, `top_p`, `min_p`: float32 `[n]`; 1 and 0 leave the last two out.
    - `top_k`: int32 `[n]`, at least 1; the vocabulary's size or more leaves it out.
    - `seeds`: int32 or uint32 `[n, 2]`, low word first; `positions`: int32 `[n]`.
    """
    kept = keep(logits, temperature, top_k, top_p, min_p)
    _check_rows("seeds", seeds, (logits.shape[0], 2))
    _check_rows("positions", positions, logits.shape[:1])
    rows, vocab = logits.shape
    if rows:
        scores = torch.empty((rows, _SAMPLE_PROGRAMS), dtype=torch.float32, device=logits.device)
        candidates = torch.empty((rows, _SAMPLE_PROGRAMS), dtype=torch.int32, device=logits.device)
        _sample_kernel[(rows, _SAMPLE_PROGRAMS)](
            logits, logits.stride(0), vocab, temperature, kept.largest, kept.distances, seeds, positions, scores,
            candidates, BLOCK=_SAMPLE_BLOCK, PROGRAMS=_SAMPLE_PROGRAMS, num_warps=4,
        )  # fmt: skip
        _best_kernel[(rows,)](
            kept.distances, scores, candidates, vocab, kept.greedy, PROGRAMS=_SAMPLE_PROGRAMS, num_warps=1
        )
    return kept.greedy


def keep(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> Kept:
    """What the filters keep of each row; arguments as of `sample`."""
    _check_logits(logits)
    rows, vocab = logits.shape
    for name, values in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        _check_rows(name, values, logits.shape[:1])
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    largest, distances = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        _filter_kernel[(rows,)](
            logits, logits.stride(0), vocab, temperature, top_k, top_p, min_p, tokens, largest, distances,
            RANDOM=True, LIMITS=_LIMITS, BLOCK=_SEARCH_BLOCK, num_warps=16,
        )  # fmt: skip
    return Kept(tokens, largest, distances)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}; "
            "wanted is float32 [n, vocab] with tokens side by side"
        )


def _check_rows(name: str, values: torch.Tensor, shape: tuple[int, ...]) -> None:
    if values.shape != shape or not values.is_contiguous() or values.element_size() != 4:
        raise ValueError(f"{name} is {values.dtype} {list(values.shape)}; wanted are 4 bytes for each of {list(shape)}")
