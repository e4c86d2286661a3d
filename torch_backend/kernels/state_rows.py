"""Recurrent layers with a matrix per head: one token of each decode row.

For a head with the matrix S, query q, key k, value v, log of the decay g and, for a delta rule, a rate b:

    S = exp(g) S;  v = b (v - k S) for a delta rule;  S = S + k v;  the output is q S

which is one token of a gated delta net (Yang et al. 2024, "Gated Delta Networks"), and without rates of Mamba-2 (Dao
and Gu 2024, "Transformers are SSMs"). It takes as long as reading and writing S once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.recurrent.rows import StateRows
from torch_backend.recurrent.scan import ScanInputs

_VALUES = 32
"""Columns of a matrix in one program; columns are independent of each other."""


@triton.jit
def scan_one_token(
    queries,
    keys,
    values,
    decays,
    rates,
    pool,
    outputs,
    begin,
    fresh,
    own,
    runs,
    query_stride,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    TIMES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program per row, head and some columns of its matrix. A row with drafts has a sequence for each of its
    tokens, `runs` consecutive ones, and the program of the first computes them all."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lines, columns = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    has_line, has_column = lines < KEY_DIM, columns < VALUE_DIM
    output = outputs + (row * HEADS + head) * VALUE_DIM + columns
    tokens = 1
    if runs is not None:
        tokens = tl.load(runs + row)
    if tl.load(own + row) == 0:  # padding
        tl.store(output, tl.zeros([VALUES], tl.float32), mask=has_column)
    elif tokens > 0:
        inside = has_line[:, None] & has_column[None, :]
        at = head * KEY_DIM * VALUE_DIM + lines[:, None] * VALUE_DIM + columns[None, :]
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        has_state = inside & (tl.load(fresh + row) == 0)
        state = tl.load(pool + tl.load(begin + row) * size + at, mask=has_state, other=0.0).to(tl.float32)
        group = (head // TIMES) * KEY_DIM + lines
        for token in range(0, tokens):
            place = row + token
            key = tl.load(keys + place * key_stride + group, mask=has_line, other=0.0)
            query = tl.load(queries + place * query_stride + group, mask=has_line, other=0.0)
            value = tl.load(values + place * value_stride + head * VALUE_DIM + columns, mask=has_column, other=0.0)
            state *= tl.exp(tl.load(decays + place * HEADS + head))
            if rates is not None:
                value = tl.load(rates + place * HEADS + head) * (value - tl.sum(key[:, None] * state, 0))
            state += key[:, None] * value[None, :]
            tl.store(output + token * HEADS * VALUE_DIM, tl.sum(query[:, None] * state, 0), mask=has_column)
            kept = state.to(pool.dtype.element_ty)
            tl.store(pool + tl.load(own + place) * size + at, kept, mask=inside)
            state = kept.to(tl.float32)


def scan_rows(inputs: ScanInputs, pool: torch.Tensor, rows: StateRows, outputs: torch.Tensor) -> None:
    """Computes the first `num_decode` tokens, one per sequence: see `StepStates`. Writes their `outputs`, 0 for
    padding."""
    check_inputs(inputs, pool)
    _, heads, key_dim, value_dim = pool.shape
    keys = triton.next_power_of_2(key_dim)
    columns = min(_VALUES, triton.next_power_of_2(value_dim))
    scan_one_token[rows.num_decode, heads, triton.cdiv(value_dim, columns)](
        inputs.queries,
        inputs.keys,
        inputs.values,
        inputs.decays,
        inputs.rates,
        pool,
        outputs,
        rows.begin,
        rows.fresh,
        rows.own,
        rows.runs,
        inputs.queries.stride(0),
        inputs.keys.stride(0),
        inputs.values.stride(0),
        HEADS=heads,
        TIMES=heads // inputs.keys.shape[1],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEYS=keys,
        VALUES=columns,
        num_warps=4 if keys > 64 else 2,
    )


def check_inputs(inputs: ScanInputs, pool: torch.Tensor) -> None:
    """Raises `ValueError` for inputs that the kernels do not support."""
    tokens, groups, _ = inputs.keys.shape
    _, heads, key_dim, value_dim = pool.shape
    wanted = {
        "queries": (inputs.queries, (tokens, groups, key_dim)),
        "keys": (inputs.keys, (tokens, groups, key_dim)),
        "values": (inputs.values, (tokens, heads, value_dim)),
    }
    for name, (found, shape) in wanted.items():
        if found.shape != shape or found.stride()[1:] != (shape[2], 1) or found.dtype != torch.float32:
            raise ValueError(
                f"{name} are {found.dtype} {list(found.shape)} with strides {list(found.stride())}; wanted are float32 "
                f"{list(shape)}, those of a token side by side"
            )
    for name, rates in (("decays", inputs.decays), ("rates", inputs.rates)):
        if rates is not None and (rates.shape != (tokens, heads) or not rates.is_contiguous()):
            raise ValueError(f"{name} are {list(rates.shape)}; wanted is a contiguous {[tokens, heads]}")
    if heads % groups or not pool.is_contiguous():
        raise ValueError(f"{heads} heads cannot share {groups} keys, or the pool {list(pool.shape)} is not contiguous")
