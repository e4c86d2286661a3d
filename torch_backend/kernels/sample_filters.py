"""Finds how far from the most likely token top-k and top-p keep tokens, with several programs per row and no sort.

Distances of scaled logits to the largest are never negative, so their bits as integers have the same order as their
values, and a filter is a search for the smallest integer. Consecutive kernels:

1. Each program counts, in its part of a row, the tokens within several limits that are half an octave apart, and sums
   their probability. The totals of all parts show between which two limits the result lies.
2. If more tokens lie in between than the buffer holds, the same is done with limits between those two.
3. The tokens in between are copied to the buffer. Each part's offset follows from the counts.
4. One program per row searches the buffer, or the whole row if too many logits are nearly equal to fit.

Parts are summed as integers, probability in units of 2**-32 of the most likely token's: the same in every kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.kernels.sample_survey import Survey, combine_survey, part_of_row, parts_of

# Limits that a pass tries.
_LIMITS = 8
# Tokens of one iteration of a program.
_BLOCK = 1024
_SEARCH_BLOCK = 2048
# Tokens of a row that the buffer holds.
_CAPACITY = 16_384

_INFINITY_BITS = tl.constexpr(0x7F800000)
# 2, and half an octave: 2, 3, 4, 6, 8, 12, 16 and infinity.
_FIRST_LIMIT = tl.constexpr(0x40000000)
_HALF_OCTAVE = tl.constexpr(0x00400000)
_UNITS = tl.constexpr(4294967296.0)
MIN_TEMPERATURE = tl.constexpr(1e-20)
# Marks a row that does not sample; distances are never negative.
NOT_SAMPLED = tl.constexpr(-1.0)


@triton.jit
def distances_of(logits, tokens, end, largest, temperature):
    """Distances of scaled logits to the largest; NaN, which is within no limit, from `end` on."""
    values = tl.load(logits + tokens, mask=tokens < end, other=float("nan"))
    return tl.div_rn(largest - values, temperature)


@triton.jit
def _first_limits(LIMITS: tl.constexpr):
    """Bits of the first round's limits, ascending."""
    ways = tl.arange(0, LIMITS)
    return tl.where(ways < LIMITS - 1, _FIRST_LIMIT + ways * _HALF_OCTAVE, _INFINITY_BITS)


@triton.jit
def _second_limits(
    low, high, largest, least_logits, temperature, row, PARTS: tl.constexpr, LIMITS: tl.constexpr
):  # fmt: skip
    """Bits of limits from `low` to `high`, then infinity. All finite distances up to `high` are within the others."""
    least = tl.min(tl.load(least_logits + row * PARTS + tl.arange(0, PARTS)), 0)
    farthest = tl.div_rn(largest - least, temperature).to(tl.int32, bitcast=True)
    top = tl.maximum(tl.minimum(high, farthest), low)
    ways = tl.arange(0, LIMITS)
    # Evenly by value near the most likely token, by bits elsewhere, which is the same within an octave.
    by_value = (top.to(tl.float32, bitcast=True) * ((ways + 1).to(tl.float32) / (LIMITS - 1))).to(
        tl.int32, bitcast=True
    )
    by_bits = low + (ways + 1) * ((top - low) // (LIMITS - 1))
    limits = tl.where(ways < LIMITS - 2, tl.where(low == 0, by_value, by_bits), high)
    # Infinity includes all tokens; top-p is a share of their probability.
    return tl.where(ways < LIMITS - 1, limits, _INFINITY_BITS)


@triton.jit
def _bracket(counts, masses, row, limits, top_k, top_p, vocab, PARTS: tl.constexpr, LIMITS: tl.constexpr):
    """Finds the limits between which the result lies, from the totals of all parts.

    Returns `(place, low, high, tokens, count, mass)`: the result's bits are from `low` to `high`, the limit at `place`.
    It is the distance that contains `count` of the tokens in between, or `mass` of their probability, in units.
    `tokens` have to be searched. With both filters, the result is top-k's, and `tokens` includes all nearer ones.
    """
    ways = tl.arange(0, LIMITS)
    at = (row * PARTS + tl.arange(0, PARTS)[:, None]) * LIMITS + ways[None, :]
    count = tl.sum(tl.load(counts + at), 0)
    mass = tl.sum(tl.load(masses + at), 0)
    by_rank = top_k < vocab
    share = top_p.to(tl.float64) * tl.max(mass, 0).to(tl.float64)
    wanted = share.to(tl.int64)
    wanted += (wanted.to(tl.float64) < share).to(tl.int64)
    # The last limit is always enough.
    place = tl.sum(tl.where(by_rank, count < top_k, mass < wanted).to(tl.int32), 0)
    below, here = ways == place - 1, ways == place
    low = tl.sum(tl.where(below, limits + 1, 0), 0)
    high = tl.sum(tl.where(here, limits, 0), 0)
    nearer = tl.sum(tl.where(below, count, 0), 0)
    tokens = tl.sum(tl.where(here, count, 0), 0) - tl.where(top_p < 1.0 and by_rank, 0, nearer)
    return place, low, high, tokens, top_k - nearer, wanted - tl.sum(tl.where(below, mass, 0), 0)


@triton.jit
def _narrow(
    counts, masses, rows, row, largest, least_logits, temperature, top_k, top_p, vocab, PARTS: tl.constexpr,
    LIMITS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Returns `_bracket` of the row's last round, preceded by that round's counts."""
    limits = _first_limits(LIMITS)
    place, low, high, tokens, count, mass = _bracket(counts, masses, row, limits, top_k, top_p, vocab, PARTS, LIMITS)
    if tokens > CAPACITY:
        limits = _second_limits(low, high, largest, least_logits, temperature, row, PARTS, LIMITS)
        counts += rows * PARTS * LIMITS
        masses += rows * PARTS * LIMITS
        place, low, high, tokens, count, mass = _bracket(
            counts, masses, row, limits, top_k, top_p, vocab, PARTS, LIMITS
        )  # fmt: skip
    return counts, place, low, high, tokens, count, mass


@triton.jit
def _amounts_kernel(
    logits, row_stride, vocab, best_logits, best_tokens, least_logits, temperatures, top_ks, top_ps, counts, masses,
    PARTS: tl.constexpr, LIMITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    token, largest = combine_survey(best_logits, best_tokens, row, vocab, PARTS)
    if (temperature > 0.0) & (token >= 0) & ((top_k < vocab) | (top_p < 1.0)):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        logits += row.to(tl.int64) * row_stride
        at = (row * PARTS + part) * LIMITS
        limits = _first_limits(LIMITS)
        _add_up(logits, vocab, part, largest, temperature, limits, counts + at, masses + at, PARTS, LIMITS, BLOCK)


@triton.jit
def _finer_amounts_kernel(
    logits, row_stride, vocab, best_logits, best_tokens, least_logits, temperatures, top_ks, top_ps, counts, masses,
    PARTS: tl.constexpr, LIMITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    token, largest = combine_survey(best_logits, best_tokens, row, vocab, PARTS)
    if (temperature > 0.0) & (token >= 0) & ((top_k < vocab) | (top_p < 1.0)):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        limits = _first_limits(LIMITS)
        _, low, high, tokens, _, _ = _bracket(counts, masses, row, limits, top_k, top_p, vocab, PARTS, LIMITS)
        if tokens > CAPACITY:
            logits += row.to(tl.int64) * row_stride
            at = ((tl.num_programs(0) + row) * PARTS + part) * LIMITS
            limits = _second_limits(low, high, largest, least_logits, temperature, row, PARTS, LIMITS)
            _add_up(logits, vocab, part, largest, temperature, limits, counts + at, masses + at, PARTS, LIMITS, BLOCK)


@triton.jit
def _add_up(
    logits, vocab, part, largest, temperature, limits, counts, masses, PARTS: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the number of tokens and the probability of a part within each of the limits."""
    # Limits are the first axis: each distance is compared with all of them in registers.
    reach = limits.to(tl.float32, bitcast=True)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    count = tl.zeros([LIMITS, BLOCK], tl.int32)
    mass = tl.zeros([LIMITS, BLOCK], tl.float32)
    first, end = part_of_row(part, vocab, PARTS)
    for start in range(first, end, BLOCK):
        distances = distances_of(logits, start + lanes, end, largest, temperature)
        within = distances <= reach
        count += within.to(tl.int32)
        mass += tl.where(within, tl.exp(-distances), 0.0)
    ways = tl.arange(0, LIMITS)
    tl.store(counts + ways, tl.sum(count, 1))
    tl.store(masses + ways, (tl.sum(mass, 1).to(tl.float64) * _UNITS).to(tl.int64))


@triton.jit
def _gather_kernel(
    logits, row_stride, vocab, best_logits, best_tokens, least_logits, temperatures, top_ks, top_ps, counts, masses,
    gathered, PARTS: tl.constexpr, LIMITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    token, largest = combine_survey(best_logits, best_tokens, row, vocab, PARTS)
    if (temperature > 0.0) & (token >= 0) & ((top_k < vocab) | (top_p < 1.0)):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        counts, place, low, high, tokens, _, _ = _narrow(
            counts, masses, tl.num_programs(0), row, largest, least_logits, temperature, top_k, top_p, vocab, PARTS,
            LIMITS, CAPACITY,
        )  # fmt: skip
        if tokens <= CAPACITY:
            both = (top_k < vocab) & (top_p < 1.0)
            parts = tl.arange(0, PARTS)
            at = (row * PARTS + parts) * LIMITS + place
            own = tl.load(counts + at)
            own -= tl.load(counts + at - 1, mask=(place > 0) & (not both) & (parts >= 0), other=0)
            put = row * CAPACITY + tl.sum(tl.where(parts < part, own, 0), 0)
            nearest = tl.where(both, 0, low).to(tl.float32, bitcast=True)
            farthest = high.to(tl.float32, bitcast=True)
            logits += row.to(tl.int64) * row_stride
            lanes = tl.arange(0, BLOCK)
            first, end = part_of_row(part, vocab, PARTS)
            for start in range(first, end, BLOCK):
                values = tl.load(logits + start + lanes, mask=start + lanes < end, other=float("nan"))
                distances = tl.div_rn(largest - values, temperature)
                within = (distances >= nearest) & (distances <= farthest)
                places = tl.cumsum(within.to(tl.int32), 0)
                tl.store(gathered + put + places - 1, values, mask=within)
                put += tl.max(places, 0)


@triton.jit
def _least_distance(
    logits, length, largest, temperature, low, high, wanted, WEIGHTED: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest distance, between the bits `low` and `high`, that contains `wanted` tokens, or with WEIGHTED this
    much probability; `high` contains enough. `logits`: `length` of them, in any order. Each pass tries LIMITS distances
    and narrows the interval to one between two of them, then to distances that occur."""
    # Tokens are the second axis, limits the first: a pass compares each distance with all limits in registers.
    lanes = tl.arange(0, BLOCK)[None, :]
    ways = tl.arange(0, LIMITS)[:, None]
    counted_from = low.to(tl.float32, bitcast=True)
    while low < high:
        step = (high - low + LIMITS) // (LIMITS + 1)
        limit_bits = tl.maximum(high - (ways + 1) * step, low)
        limits = limit_bits.to(tl.float32, bitcast=True)
        lowest, highest = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
        amounts = tl.zeros([LIMITS, BLOCK], tl.float32 if WEIGHTED else tl.int32)
        nearest = tl.full([1, BLOCK], float("inf"), tl.float32)
        furthest = tl.zeros([1, BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            distances = distances_of(logits, start + lanes, length, largest, temperature)
            within = (distances >= counted_from) & (distances <= limits)
            if WEIGHTED:
                amounts += tl.where(within, tl.exp(-distances), 0.0)
            else:
                amounts += within.to(tl.int32)
            nearest = tl.where((distances >= lowest) & (distances < nearest), distances, nearest)
            furthest = tl.where((distances <= highest) & (distances > furthest), distances, furthest)
        enough = tl.sum(amounts, 1, keep_dims=True) >= wanted
        nearest_bits = tl.min(nearest).to(tl.int32, bitcast=True)
        furthest_bits = tl.max(furthest).to(tl.int32, bitcast=True)
        high = tl.minimum(tl.min(tl.where(enough, limit_bits, high)), furthest_bits)
        low = tl.maximum(tl.max(tl.where(enough, low, limit_bits + 1)), nearest_bits)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _mass_within(logits, length, largest, temperature, kept, BLOCK: tl.constexpr):
    """Probability within the distance `kept`, not normalised."""
    lanes = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, BLOCK):
        distances = distances_of(logits, start + lanes, length, largest, temperature)
        mass += tl.where(distances <= kept, tl.exp(-distances), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _settle_kernel(
    logits, row_stride, vocab, best_logits, best_tokens, least_logits, temperatures, top_ks, top_ps, min_ps, counts,
    masses, gathered, tokens, largest_logits, kept_distances, RANDOM: tl.constexpr, CUT: tl.constexpr,
    PARTS: tl.constexpr, LIMITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token, largest = combine_survey(best_logits, best_tokens, row, vocab, PARTS)
    tl.store(tokens + row, token)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        kept = tl.full([], NOT_SAMPLED, tl.float32)
        if (temperature > 0.0) & (token >= 0):
            kept = tl.full([], float("inf"), tl.float32)
            if CUT:
                kept = _cut(
                    logits + row.to(tl.int64) * row_stride, vocab, largest, least_logits, temperature, top_ks, top_ps,
                    counts, masses, gathered, PARTS, LIMITS, CAPACITY, BLOCK,
                )  # fmt: skip
            kept = tl.minimum(kept, -tl.log(tl.load(min_ps + row)))
        tl.store(largest_logits + row, largest)
        tl.store(kept_distances + row, kept)


@triton.jit
def _cut(
    logits, vocab, largest, least_logits, temperature, top_ks, top_ps, counts, masses, gathered, PARTS: tl.constexpr,
    LIMITS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kept = tl.full([], float("inf"), tl.float32)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    by_rank = top_k < vocab
    if by_rank | (top_p < 1.0):
        temperature = tl.maximum(temperature, MIN_TEMPERATURE)
        _, _, low, high, length, count, mass = _narrow(
            counts, masses, tl.num_programs(0), row, largest, least_logits, temperature, top_k, top_p, vocab, PARTS,
            LIMITS, CAPACITY,
        )  # fmt: skip
        if length <= CAPACITY:
            logits = gathered + row.to(tl.int64) * CAPACITY
        else:
            length = vocab
        wanted = mass.to(tl.float32) / _UNITS
        if by_rank:
            if top_p < 1.0:
                # The buffer includes nearer tokens, which are counted too.
                count, low = top_k, tl.zeros_like(low)
            kept = _least_distance(logits, length, largest, temperature, low, high, count, False, LIMITS, BLOCK)
            high = kept.to(tl.int32, bitcast=True)
        if top_p < 1.0:
            if by_rank:
                wanted = top_p * _mass_within(logits, length, largest, temperature, kept, BLOCK)
            kept = _least_distance(logits, length, largest, temperature, low, high, wanted, True, LIMITS, BLOCK)
    return kept


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that the filters keep, for each of n rows: the first most likely token, int32, -1 for a row with a NaN
    or +infinity, or without a finite logit; its logit, float32; and float32 `distances`: kept tokens have a logit, over
    the temperature, at most this far below the largest, -1 for a row that does not sample: greedy or invalid."""

    greedy: torch.Tensor
    largest: torch.Tensor
    distances: torch.Tensor


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """`KeptTokens.greedy` of float32 `[n, vocab]`."""
    rows, vocab = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int32)
    if rows:
        nothing = (None,) * 7
        _settle_kernel[(rows,)](
            logits, logits.stride(0), vocab, *Survey.of(logits).tensors, *nothing, tokens, None, None,
            RANDOM=False, CUT=False, PARTS=parts_of(vocab), LIMITS=_LIMITS, CAPACITY=_CAPACITY,
            BLOCK=_SEARCH_BLOCK, num_warps=1,
        )  # fmt: skip
    return tokens


def kept_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    cut: bool,
) -> KeptTokens:
    """Applies the filters to each row. `cut`: whether top-k or top-p may drop tokens of any row."""
    rows, vocab = logits.shape
    parts = parts_of(vocab)
    kept = KeptTokens(logits.new_empty(rows, dtype=torch.int32), logits.new_empty(rows), logits.new_empty(rows))
    if not rows:
        return kept
    survey = Survey.of(logits).tensors
    counts = masses = gathered = None
    if cut:
        counts = logits.new_empty((2, rows, parts, _LIMITS), dtype=torch.int32)
        masses = logits.new_empty((2, rows, parts, _LIMITS), dtype=torch.int64)
        gathered = logits.new_empty((rows, _CAPACITY))
        common = (logits, logits.stride(0), vocab, *survey, temperature, top_k, top_p, counts, masses)
        sizes = {"PARTS": parts, "LIMITS": _LIMITS, "CAPACITY": _CAPACITY}
        _amounts_kernel[(rows, parts)](*common, **sizes, BLOCK=_BLOCK, num_warps=8)
        _finer_amounts_kernel[(rows, parts)](*common, **sizes, BLOCK=_BLOCK, num_warps=8)
        _gather_kernel[(rows, parts)](*common, gathered, **sizes, BLOCK=_BLOCK)
    _settle_kernel[(rows,)](
        logits, logits.stride(0), vocab, *survey, temperature, top_k, top_p, min_p, counts, masses, gathered,
        kept.greedy, kept.largest, kept.distances,
        RANDOM=True, CUT=cut, PARTS=parts, LIMITS=_LIMITS, CAPACITY=_CAPACITY,
        BLOCK=_SEARCH_BLOCK, num_warps=16 if cut else 1,
    )  # fmt: skip
    return kept
