"""Steps for the warm-up, which compute like real ones but only use the dump row and page 0. A program's first run is
slow: XLA's CPU backend prepares matrix products (0.3 to 0.7 s for a step of SmolLM2-135M on 2 cores), and an
accelerator loads the program. No request waits for this."""

from __future__ import annotations

import numpy as np

from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.runner.plan import LAST_TOKEN, PageDeltas, StepPlan


def warmup_plan(bucket: Bucket, dump_row: int, max_context: int) -> StepPlan:
    """A plan that fills the bucket: decode rows, and in a mixed bucket one of them with a prompt. No sequence samples.
    All are in the dump row, whose pages are all page 0, where they overwrite each other's keys and values."""
    if bucket.decode_only:
        num_decode, prompt = bucket.rows, 0
    else:
        num_decode = min(1, bucket.rows - 1)
        prompt = min(bucket.tokens - num_decode, max_context)
    lengths = np.array([1] * num_decode + [prompt] * (prompt > 0), np.int32)
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        rows=np.full(len(lengths), dump_row, np.int32),
        num_decode=num_decode,
        query_lens=lengths,
        kv_lens=lengths,
        tokens=np.concatenate((np.full(num_decode, LAST_TOKEN, np.int32), np.zeros(prompt, np.int32))),
        samples=np.zeros(len(lengths), bool),
        page_deltas=(PageDeltas(nothing, nothing, nothing),),
    )
