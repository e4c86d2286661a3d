"""The division of a step's sequences among ranks, against plain numpy; and what ranks do not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.layers.batch import ForwardBatch, SequenceRanks
from sglang_jax.layers.ranks import part_of
from sglang_jax.runner.assembly import open_models

RANKS, ROWS_OF_RANK, TOKENS_OF_RANK = 3, 4, 12


def make_batch(rng: np.random.Generator, *, decode_only: bool) -> tuple[ForwardBatch, np.ndarray, np.ndarray]:
    """A step with rows of all ranks in any order, decode rows first, and padding; its ranks, and queries of each."""
    rows = rng.permutation(RANKS * ROWS_OF_RANK)[: rng.integers(1, 9)]
    counts = np.ones(len(rows), np.int32)
    num_decode = len(rows)
    if not decode_only:
        num_decode = int(rng.integers(0, len(rows)))
        left = {rank: TOKENS_OF_RANK - np.count_nonzero(rows // ROWS_OF_RANK == rank) for rank in range(RANKS)}
        for place in range(num_decode, len(rows)):
            more = int(rng.integers(0, left[rows[place] // ROWS_OF_RANK] + 1))
            counts[place] += more
            left[rows[place] // ROWS_OF_RANK] -= more
    num_rows = 10
    num_tokens = num_rows if decode_only else 40
    padding = num_rows - len(rows)
    ranks = np.concatenate([rows // ROWS_OF_RANK, np.full(padding, RANKS)]).astype(np.int32)
    total = int(counts.sum())
    real = np.arange(num_tokens) < total
    batch = ForwardBatch(
        tokens=jnp.asarray(np.where(real, rng.integers(1, 99, num_tokens), 0), jnp.int32),
        positions=jnp.asarray(np.where(real, rng.integers(0, 50, num_tokens), 0), jnp.int32),
        write_slots=jnp.asarray(np.where(real, rng.integers(4, 99, num_tokens), 0), jnp.int32),
        page_table=jnp.asarray(rng.integers(1, 9, (num_rows, 3)), jnp.int32),
        kv_lens=jnp.asarray(np.concatenate([counts + 2, np.zeros(padding)]), jnp.int32),
        query_starts=jnp.asarray(np.concatenate([[0], np.cumsum(counts), np.full(padding, total)]), jnp.int32),
        num_decode=jnp.int32(num_decode),
        ranks=SequenceRanks(jnp.asarray(ranks), ROWS_OF_RANK, TOKENS_OF_RANK),
    )
    return batch, ranks[: len(rows)], counts


@pytest.mark.parametrize("decode_only", [True, False])
def test_each_sequence_is_on_its_rank_and_on_no_other(decode_only: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(12):
        batch, ranks, counts = make_batch(rng, decode_only=decode_only)
        starts = np.asarray(batch.query_starts)
        seen = np.zeros(len(batch.tokens), int)
        for rank in range(RANKS):
            found = part_of(batch, batch.ranks, jnp.int32(rank))
            own, places = found.batch, np.asarray(found.places)
            (mine,) = np.nonzero(ranks == rank)
            tokens = np.concatenate([np.arange(starts[one], starts[one + 1]) for one in mine] or [[]]).astype(int)
            assert len(own.kv_lens) == ROWS_OF_RANK
            assert len(own.tokens) == (ROWS_OF_RANK if decode_only else TOKENS_OF_RANK)
            assert (len(own.tokens) == len(own.kv_lens)) is decode_only
            for whole, part in (
                (batch.tokens, own.tokens),
                (batch.positions, own.positions),
                (batch.write_slots, own.write_slots),
                (np.arange(len(batch.tokens)), found.tokens),
            ):
                np.testing.assert_array_equal(np.asarray(part)[: len(tokens)], np.asarray(whole)[tokens])
            assert not np.asarray(own.write_slots)[len(tokens) :].any(), "padding writes into a page"
            np.testing.assert_array_equal(
                np.asarray(own.kv_lens), [*np.asarray(batch.kv_lens)[mine], *[0] * (4 - len(mine))]
            )
            np.testing.assert_array_equal(np.asarray(own.page_table)[: len(mine)], np.asarray(batch.page_table)[mine])
            np.testing.assert_array_equal(np.diff(np.asarray(own.query_starts))[: len(mine)], counts[mine])
            assert int(own.num_decode) == np.count_nonzero(mine < int(batch.num_decode))
            np.testing.assert_array_equal(np.flatnonzero(places < len(own.tokens)), tokens)
            np.testing.assert_array_equal(places[tokens], np.arange(len(tokens)))
            seen[tokens] += 1
        np.testing.assert_array_equal(seen, np.arange(len(seen)) < counts.sum())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("qwen3", {}, "enable_dp_attention needs a model whose layers all have latent attention"),
        ("deepseek_v3", {"speculative_algorithm": "ngram"}, "does not support speculative_algorithm ngram yet"),
        (
            "deepseek_v3",
            {"enable_deterministic_inference": True},
            "not support enable_deterministic_inference yet",
        ),
    ],
)
def test_what_ranks_do_not_support_is_refused(kind: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, kind)
    config = EngineConfig(model_path=str(folder), tp_size=2, enable_dp_attention=True, **options)
    with pytest.raises(ConfigError, match=message):
        open_models(config, open_checkpoint(str(folder)))
