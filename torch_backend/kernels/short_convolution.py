"""Depthwise convolutions over the last few tokens, with inputs that are kept between steps:

    out[t] = bias + sum over i < width of weight[i] x[t - width + 1 + i]

where the inputs before a sequence's first token of the step are in its slot. For decode rows, one kernel reads the slot
and updates it. For chunks, one kernel computes all tokens, and the next one stores the last inputs, because it may
overwrite the slot that the first reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.recurrent.rows import StateRows

_CHANNELS = 256
_TOKENS = 16


@triton.jit
def convolve_one_token(
    x, weight, bias, pool, out, begin, fresh, own, runs, stride, channels, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """One program per row and some channels. A row with drafts has a sequence for each of its tokens, `runs`
    consecutive ones; the program of the first computes them all, in reverse order, because the first token may
    overwrite the slot with which the row starts."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < channels
    kept: tl.constexpr = WIDTH - 1
    old = pool + tl.load(begin + row) * kept * channels + lanes
    has_old = inside & (tl.load(fresh + row) == 0)
    tokens = 1
    if runs is not None:
        tokens = tl.load(runs + row)
    for later in range(0, tokens):
        token = tokens - 1 - later
        own_x = x + (row + token) * stride + lanes
        current = tl.load(own_x, mask=inside, other=0.0).to(pool.dtype.element_ty)
        total = tl.zeros([LANES], tl.float32)
        if bias is not None:
            total += tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)
        for place in tl.static_range(kept):
            before = tl.load(old + (place + token) * channels, mask=has_old & (place + token < kept), other=0.0)
            if runs is not None:
                of_step = inside & (place + token >= kept)
                computed = tl.load(own_x - (kept - place) * stride, mask=of_step, other=0.0)
                before = tl.where(of_step, computed.to(pool.dtype.element_ty), before)
            taps = tl.load(weight + lanes * WIDTH + place, mask=inside, other=0.0)
            total += before.to(tl.float32) * taps.to(tl.float32)
        total += current.to(tl.float32) * tl.load(weight + lanes * WIDTH + kept, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + (row + token) * channels + lanes, total, mask=inside)
        slot = tl.load(own + row + token)
        if slot > 0:
            new = pool + slot * kept * channels + lanes
            for place in tl.static_range(1, kept):
                moved = tl.load(old + (place + token) * channels, mask=has_old & (place + token < kept), other=0.0)
                if runs is not None:
                    of_step = inside & (place + token >= kept)
                    computed = tl.load(own_x - (kept - place) * stride, mask=of_step, other=0.0)
                    moved = tl.where(of_step, computed.to(pool.dtype.element_ty), moved)
                # The slot may be the one that is read: no thread may write what another has yet to read.
                tl.debug_barrier()
                tl.store(new + (place - 1) * channels, moved, mask=inside)
            tl.debug_barrier()
            tl.store(new + (kept - 1) * channels, current, mask=inside)


@triton.jit(do_not_specialize=["num_decode", "tokens"])
def convolve_tokens(
    x,
    weight,
    bias,
    pool,
    out,
    begin,
    fresh,
    sequences,
    offsets,
    num_decode,
    tokens,
    stride,
    channels,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program for some of the tokens after the decode rows, and some channels."""
    token = num_decode + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    of_step, inside = token < tokens, lanes < channels
    kept: tl.constexpr = WIDTH - 1
    sequence = tl.load(sequences + token, mask=of_step, other=0)
    offset = tl.load(offsets + token, mask=of_step, other=0)
    old = pool + tl.load(begin + sequence, mask=of_step, other=0)[:, None] * kept * channels + lanes[None, :]
    has_old = of_step & (tl.load(fresh + sequence, mask=of_step, other=1) == 0)
    own = x + token.to(tl.int64)[:, None] * stride + lanes[None, :]
    total = tl.zeros([TOKENS, LANES], tl.float32)
    if bias is not None:
        total += tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)[None, :]
    for place in tl.static_range(WIDTH):
        back = kept - place
        taps = tl.load(weight + lanes * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        of_chunk = (of_step & (offset >= back))[:, None] & inside[None, :]
        computed = tl.load(own - back * stride, mask=of_chunk, other=0.0).to(pool.dtype.element_ty)
        total += computed.to(tl.float32) * taps[None, :]
        if back > 0:
            of_slot = (has_old & (offset < back))[:, None] & inside[None, :]
            place_there = (kept + offset - back)[:, None] * channels
            total += tl.load(old + place_there, mask=of_slot, other=0.0).to(tl.float32) * taps[None, :]
    at = out + token.to(tl.int64)[:, None] * channels + lanes[None, :]
    tl.store(at, total, mask=of_step[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_decode"], do_not_specialize_on_alignment=["begin", "fresh", "own", "query_starts"])
def keep_last_inputs(
    x, pool, begin, fresh, own, query_starts, num_decode, stride, channels, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """One program for each sequence after the decode rows, and some channels."""
    row = num_decode + tl.program_id(0)
    lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lanes < channels
    kept: tl.constexpr = WIDTH - 1
    first = tl.load(query_starts + row).to(tl.int64)
    length = tl.load(query_starts + row + 1) - first
    slot = tl.load(own + row)
    has_old = inside & (tl.load(fresh + row) == 0)
    old = pool + tl.load(begin + row) * kept * channels + lanes
    new = pool + slot * kept * channels + lanes
    if slot > 0:
        for place in tl.static_range(kept):
            since = length + place - kept
            computed = tl.load(x + (first + since) * stride + lanes, mask=inside & (since >= 0), other=0.0)
            older = tl.load(old + (place + length) * channels, mask=has_old & (since < 0), other=0.0)
            # As above; later iterations read only behind what is written here.
            tl.debug_barrier()
            last = tl.where(since >= 0, computed.to(pool.dtype.element_ty), older)
            tl.store(new + place * channels, last, mask=inside)


def convolve_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Computes the first `num_decode` tokens, one per sequence: see `StepStates`. Writes their part of `out`."""
    channels, width = _check(x, weight, pool)
    grid = rows.num_decode, triton.cdiv(channels, _CHANNELS)
    convolve_one_token[grid](
        x,
        weight,
        bias,
        pool,
        out,
        rows.begin,
        rows.fresh,
        rows.own,
        rows.runs,
        x.stride(0),
        channels,
        WIDTH=width,
        LANES=_CHANNELS,
        num_warps=2,
    )


def convolve_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor,
) -> None:
    """Computes the tokens after the decode rows: see `StepStates`. Writes their part of `out`."""
    channels, width = _check(x, weight, pool)
    decodes, parts = rows.num_decode, triton.cdiv(channels, _CHANNELS)
    convolve_tokens[triton.cdiv(len(x) - decodes, _TOKENS), parts](
        x,
        weight,
        bias,
        pool,
        out,
        rows.begin,
        rows.fresh,
        rows.sequences,
        rows.offsets,
        decodes,
        len(x),
        x.stride(0),
        channels,
        WIDTH=width,
        TOKENS=_TOKENS,
        LANES=_CHANNELS,
        num_warps=8,
    )
    keep_last_inputs[len(rows.own) - decodes, parts](
        x,
        pool,
        rows.begin,
        rows.fresh,
        rows.own,
        rows.query_starts,
        decodes,
        x.stride(0),
        channels,
        WIDTH=width,
        LANES=_CHANNELS,
        num_warps=2,
    )


def _check(x: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor) -> tuple[int, int]:
    """Returns the number of channels and the width. Raises `ValueError` for unsupported shapes."""
    channels, width = weight.shape
    if x.shape[1] != channels or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(
            f"x is {list(x.shape)} with strides {list(x.stride())} and the weight {list(weight.shape)}; wanted are "
            "[T, channels] with channels side by side, and a contiguous [channels, width]"
        )
    if width < 2 or pool.shape[1:] != (width - 1, channels) or not pool.is_contiguous():
        raise ValueError(
            f"the pool is {list(pool.shape)}; wanted is a contiguous [slots, width - 1, channels] of {channels} "
            f"channels and a width of {width}, at least 2"
        )
    return channels, width
