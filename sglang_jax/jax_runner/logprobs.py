"""Logprobs of the raw logits, for sampled tokens and for tokens of the prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.sampling.params import MAX_TOP_LOGPROBS

PROMPT_BLOCK = 64
"""Prompt positions whose logits are in memory at once."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """`logprobs` float32 `[n]`; `top_ids` int32 and `top_logprobs` float32 `[n, k]`, most likely first."""

    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array

    @classmethod
    def empty(cls, lines: int, vocab_size: int) -> Logprobs:
        alternatives = min(MAX_TOP_LOGPROBS, vocab_size)
        return cls(
            logprobs=jnp.zeros(lines, jnp.float32),
            top_ids=jnp.zeros((lines, alternatives), jnp.int32),
            top_logprobs=jnp.zeros((lines, alternatives), jnp.float32),
        )


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, alternatives: jax.Array, tile_rows: int | None = None
) -> Logprobs:
    """Log-softmax of `logits` float32 `[n, vocab]` at `tokens` int32 `[n]`, and at the `MAX_TOP_LOGPROBS` most likely
    tokens if the int32 scalar `alternatives` is positive (zeros otherwise). `tile_rows`: see `in_tiles`."""
    normaliser = in_tiles(partial(jax.nn.logsumexp, axis=-1), logits, tile_rows)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    empty = Logprobs.empty(*logits.shape)

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, empty.top_ids.shape[1])
        return ids, values - normaliser[:, None]

    top_ids, top_logprobs = lax.cond(alternatives > 0, top, lambda: (empty.top_ids, empty.top_logprobs))
    return Logprobs(chosen - normaliser, top_ids, top_logprobs)


def prompt_logprobs(
    hidden: jax.Array,
    targets: jax.Array,
    alternatives: jax.Array,
    num_tokens: jax.Array,
    to_logprobs: Callable[[jax.Array, jax.Array, jax.Array], Logprobs],
    vocab_size: int,
) -> Logprobs:
    """Logprobs of `targets` int32 `[tokens]` (-1 for none), the tokens after each position of a step, a block of
    `PROMPT_BLOCK` positions at a time, without blocks that have no target.

    `hidden` `[tokens, hidden]`: only the first `num_tokens` count, and `tokens` is a multiple of `PROMPT_BLOCK` or
    below it. `to_logprobs` returns the logprobs of `[m, hidden]` at `[m]` targets, like `token_logprobs`.
    """
    tokens = hidden.shape[0]
    block = min(PROMPT_BLOCK, tokens)

    def compute(start: jax.Array, results: Logprobs) -> Logprobs:
        block_targets = lax.dynamic_slice_in_dim(targets, start, block)
        found = to_logprobs(lax.dynamic_slice_in_dim(hidden, start, block), block_targets, alternatives)
        return jax.tree.map(lambda old, new: lax.dynamic_update_slice_in_dim(old, new, start, 0), results, found)

    def visit(index: jax.Array, results: Logprobs) -> Logprobs:
        start = index * block
        wanted = jnp.any(lax.dynamic_slice_in_dim(targets, start, block) >= 0)
        return lax.cond(wanted, compute, lambda _, unchanged: unchanged, start, results)

    nothing = Logprobs.empty(tokens, vocab_size)
    # Skip the loop, which may need a copy of the whole head: on tpu7x the compiler gives the head other tiles there.
    return lax.cond(
        jnp.any(targets >= 0),
        lambda: lax.fori_loop(0, (num_tokens + block - 1) // block, visit, nothing),
        lambda: nothing,
    )
