"""Recurrent layers with a matrix per head: chunks of prompts, by blocks of their tokens.

`state_rows` has the formula for one token. In a block of tokens that starts with the matrix S, let c be the cumulative
sums of the logs of decays, D[i, j] = exp(c[i] - c[j]) for j <= i, and 0 above. In a delta rule, each token's update
depends on those of the tokens before it, a triangular system (Yang et al. 2024, "Gated Delta Networks"):
    A[i, j] = b[i] D[i, j] (k[i] . k[j])  for j < i
    V = (I + A)^-1 b (V - exp(c) K S)

Then, as in Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 6), all of it is products of matrices:

    outputs = exp(c) Q S + (D * Q K^T) V
    S = exp(c[last]) S + (exp(c[last] - c) K)^T V

The inverses and D * Q K^T do not depend on the state: one kernel computes those of all blocks at once. Another
processes the blocks of a sequence one by one, with some columns of S, which are independent of the others, in
registers. Products of float32 are three of TensorFloat-32 each, which loses next to nothing.

The partition depends only on the sequence's own tokens, so its result does not depend on the rest of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.kernels.extend_plan import plan_blocks
from torch_backend.kernels.state_rows import check_inputs
from torch_backend.kernels.work_items import WorkItems
from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs

_SMALLEST = 16
"""Minimum side of a product on matrix units."""


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """The size of a program's work: `tokens` of a block, `values`: columns of a head's matrix, with `warps` warps.
    `keys`: rows of the matrix that are multiplied at once, because more do not fit into registers."""

    tokens: int
    values: int
    warps: int
    keys: int

    @classmethod
    def of(cls, inputs: ScanInputs) -> ChunkTile:
        """The largest tile whose columns of a matrix, and the other factors, fit into registers."""
        values = min(32, max(_SMALLEST, triton.next_power_of_2(inputs.values.shape[2])))
        return cls(tokens=32 if inputs.keys.shape[2] <= 128 else 16, values=values, warps=4, keys=_SMALLEST)


@dataclass(frozen=True, slots=True)
class ChunkMatrices:
    """Matrices of each block and head that do not depend on the state, by token, float32 `[T, heads, tile.tokens]`:
    `scores`, `D * Q K^T`; and `inverses`, of a delta rule, `(I + A)^-1`."""

    scores: torch.Tensor
    inverses: torch.Tensor | None

    @classmethod
    def allocate(cls, inputs: ScanInputs, tile: ChunkTile) -> ChunkMatrices:
        shape = (*inputs.decays.shape, tile.tokens)
        scores, *inverses = (
            torch.empty(shape, dtype=torch.float32, device=inputs.decays.device)
            for _ in range(1 if inputs.rates is None else 2)
        )
        return cls(scores, inverses[0] if inverses else None)

    def fits(self, inputs: ScanInputs, tile: ChunkTile) -> bool:
        same_size = self.scores.shape == (*inputs.decays.shape, tile.tokens)
        return same_size and (self.inverses is None) == (inputs.rates is None)


def plan_chunks(rows: StateRows, tokens: int, tile: ChunkTile) -> WorkItems:
    """The blocks of the sequences after the decode rows, in a step of `tokens` tokens."""
    sequences = len(rows.own) - rows.num_decode
    # Every block is full except the last one of each sequence.
    blocks = WorkItems.allocate(sequences, (tokens - rows.num_decode) // tile.tokens + sequences, rows.own.device)
    plan_blocks[(sequences,)](
        blocks.starts,
        blocks.owners,
        rows.query_starts,
        sequences,
        rows.num_decode,
        TOKENS=tile.tokens,
        BLOCK=128,
        num_warps=1,
    )
    return blocks


@triton.jit
def _decay_between(decay, BLOCK: tl.constexpr):
    """For cumulative logs of a block's decays `[BLOCK]`: tokens' remaining factors, `[later, earlier]`."""
    places = tl.arange(0, BLOCK)
    passed = decay[:, None] - decay[None, :]
    return tl.exp(tl.where(places[:, None] >= places[None, :], passed, float("-inf")))


@triton.jit(do_not_specialize=["sequences", "num_decode"], do_not_specialize_on_alignment=["query_starts"])
def relate_tokens(
    queries,
    keys,
    decays,
    rates,
    scores,
    inverses,
    starts,
    owners,
    query_starts,
    sequences,
    num_decode,
    query_stride,
    key_stride,
    HEADS: tl.constexpr,
    TIMES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One program per block and head computes the matrices that do not depend on the state."""
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(starts + sequences):
        return
    row = tl.load(owners + item)
    first = tl.load(query_starts + num_decode + row) + (item - tl.load(starts + row)) * BLOCK
    places, lines = tl.arange(0, BLOCK), tl.arange(0, PART)
    inside = first + places < tl.load(query_starts + num_decode + row + 1)
    token = (first + places).to(tl.int64)
    of_group = (head // TIMES) * KEY_DIM + lines[None, :]
    between = _decay_between(tl.cumsum(tl.load(decays + token * HEADS + head, mask=inside, other=0.0), 0), BLOCK)
    of_queries = tl.zeros([BLOCK, BLOCK], tl.float32)
    of_keys = tl.zeros([BLOCK, BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        has_key = inside[:, None] & (part * PART + lines < KEY_DIM)[None, :]
        key = tl.load(keys + token[:, None] * key_stride + of_group + part * PART, mask=has_key, other=0.0)
        query = tl.load(queries + token[:, None] * query_stride + of_group + part * PART, mask=has_key, other=0.0)
        of_queries = tl.dot(query, tl.trans(key), of_queries, input_precision="tf32x3")
        if rates is not None:
            of_keys = tl.dot(key, tl.trans(key), of_keys, input_precision="tf32x3")
    at = (token * HEADS + head)[:, None] * BLOCK + places[None, :]
    tl.store(scores + at, between * of_queries, mask=inside[:, None])
    if rates is not None:
        rate = tl.load(rates + token * HEADS + head, mask=inside, other=0.0)
        below = places[:, None] > places[None, :]
        system = tl.where(below, rate[:, None] * between * of_keys, 0.0)
        tl.store(inverses + at, _inverse(system, BLOCK, LEVELS), mask=inside[:, None])


@triton.jit
def _inverse(system, BLOCK: tl.constexpr, LEVELS: tl.constexpr):
    """The inverse of the identity plus a strictly lower triangular matrix `[BLOCK, BLOCK]`. The inverse of a triangular
    matrix has on its diagonal the inverses X and Y of its two diagonal blocks, and -Y B X below, where B is the block
    below. All pairs are computed at once, from size 1 on."""
    places = tl.arange(0, BLOCK)
    line, column = places[:, None], places[None, :]
    inverse = tl.where(line == column, 1.0, tl.where(line // 2 == column // 2, -system, 0.0))
    for level in tl.static_range(1, LEVELS):
        of_pair = (line // (2 << level) == column // (2 << level)) & (line // (1 << level) != column // (1 << level))
        left = tl.dot(inverse, tl.where(of_pair, system, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(left, inverse, input_precision="tf32x3")
    return inverse


@triton.jit(do_not_specialize=["num_decode"], do_not_specialize_on_alignment=["begin", "fresh", "own", "query_starts"])
def scan_blocks(
    queries,
    keys,
    values,
    decays,
    rates,
    scores,
    inverses,
    pool,
    outputs,
    begin,
    fresh,
    own,
    query_starts,
    num_decode,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    TIMES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per sequence after the decode rows, head, and some columns of its matrix."""
    columns, head = tl.program_id(0) * VALUES + tl.arange(0, VALUES), tl.program_id(1)
    row = num_decode + tl.program_id(2)
    places, lines = tl.arange(0, BLOCK), tl.arange(0, PART)
    has_column = columns < VALUE_DIM
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    of_head = head * KEY_DIM * VALUE_DIM + lines[:, None] * VALUE_DIM + columns[None, :]
    old, has_old = pool + tl.load(begin + row) * size + of_head, tl.load(fresh + row) == 0
    states = ()
    for part in tl.static_range(PARTS):
        of_part = (part * PART + lines < KEY_DIM)[:, None] & has_column[None, :]
        found = tl.load(old + part * PART * VALUE_DIM, mask=of_part & has_old, other=0.0)
        # Triton supports no other way to append to a tuple.
        states = states + (found.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    last = tl.load(query_starts + row + 1)
    for first in range(tl.load(query_starts + row), last, BLOCK):
        inside = first + places < last
        token = (first + places).to(tl.int64)
        of_group = (head // TIMES) * KEY_DIM + lines[None, :]
        key_at = keys + token[:, None] * key_stride + of_group
        query_at = queries + token[:, None] * query_stride + of_group
        logs = tl.load(decays + token * HEADS + head, mask=inside, other=0.0)
        decay, passed = tl.cumsum(logs, 0), tl.sum(logs, 0)
        there = tl.zeros([BLOCK, VALUES], tl.float32)
        output = tl.zeros([BLOCK, VALUES], tl.float32)
        for part in tl.static_range(PARTS):
            has_key = inside[:, None] & (part * PART + lines < KEY_DIM)[None, :]
            key = tl.load(key_at + part * PART, mask=has_key, other=0.0)
            query = tl.load(query_at + part * PART, mask=has_key, other=0.0)
            if rates is not None:
                there = tl.dot(key, states[part], there, input_precision="tf32x3")
            output = tl.dot(query, states[part], output, input_precision="tf32x3")
        has_value = inside[:, None] & has_column[None, :]
        value_at = values + token[:, None] * value_stride + head * VALUE_DIM + columns[None, :]
        value = tl.load(value_at, mask=has_value, other=0.0)
        since = tl.exp(decay)[:, None]
        of_block = (token * HEADS + head)[:, None] * BLOCK + places[None, :]
        if rates is not None:
            rate = tl.load(rates + token * HEADS + head, mask=inside, other=0.0)
            inverse = tl.load(inverses + of_block, mask=inside[:, None], other=0.0)
            value = tl.dot(inverse, rate[:, None] * (value - since * there), input_precision="tf32x3")
        related = tl.load(scores + of_block, mask=inside[:, None], other=0.0)
        output = tl.dot(related, value, since * output, input_precision="tf32x3")
        output_at = outputs + (token * HEADS + head)[:, None] * VALUE_DIM + columns[None, :]
        tl.store(output_at, output, mask=has_value)
        left = tl.exp(passed - decay)[:, None]
        news = ()
        for part in tl.static_range(PARTS):
            has_key = inside[:, None] & (part * PART + lines < KEY_DIM)[None, :]
            key = left * tl.load(key_at + part * PART, mask=has_key, other=0.0)
            kept = tl.exp(passed) * states[part]
            found = tl.dot(tl.trans(key), value, kept, input_precision="tf32x3")
            news = news + (found,)  # type: ignore[assignment]  # noqa: RUF005
        states = news
    slot = tl.load(own + row)
    if slot > 0:
        for part in tl.static_range(PARTS):
            of_part = (part * PART + lines < KEY_DIM)[:, None] & has_column[None, :]
            new = pool + slot * size + of_head + part * PART * VALUE_DIM
            tl.store(new, states[part].to(pool.dtype.element_ty), mask=of_part)


def scan_chunks(
    inputs: ScanInputs,
    pool: torch.Tensor,
    rows: StateRows,
    outputs: torch.Tensor,
    blocks: WorkItems,
    matrices: ChunkMatrices,
    tile: ChunkTile,
) -> None:
    """Computes the tokens after the decode rows: see `StepStates`. Writes their part of `outputs`. `blocks`: from
    `plan_chunks`; `matrices`: overwritten."""
    check_inputs(inputs, pool)
    if not matrices.fits(inputs, tile):
        raise ValueError(f"matrices are {list(matrices.scores.shape)}, not of {list(inputs.decays.shape)} and {tile}")
    _, heads, key_dim, value_dim = pool.shape
    part = min(tile.keys, max(_SMALLEST, triton.next_power_of_2(key_dim)))
    sequences = len(rows.own) - rows.num_decode
    sizes = {
        "HEADS": heads,
        "TIMES": heads // inputs.keys.shape[1],
        "KEY_DIM": key_dim,
        "PART": part,
        "PARTS": triton.cdiv(key_dim, part),
        "BLOCK": tile.tokens,
    }
    relate_tokens[len(blocks.owners), heads](
        inputs.queries,
        inputs.keys,
        inputs.decays,
        inputs.rates,
        matrices.scores,
        matrices.inverses,
        blocks.starts,
        blocks.owners,
        rows.query_starts,
        sequences,
        rows.num_decode,
        inputs.queries.stride(0),
        inputs.keys.stride(0),
        LEVELS=tile.tokens.bit_length() - 1,
        num_warps=4,
        **sizes,
    )
    scan_blocks[triton.cdiv(value_dim, tile.values), heads, sequences](
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.decays,
        inputs.rates,
        matrices.scores,
        matrices.inverses,
        pool,
        outputs,
        rows.begin,
        rows.fresh,
        rows.own,
        rows.query_starts,
        rows.num_decode,
        inputs.queries.stride(0),
        inputs.keys.stride(0),
        inputs.values.stride(0),
        VALUE_DIM=value_dim,
        VALUES=tile.values,
        num_warps=tile.warps,
        num_stages=1,
        **sizes,
    )
