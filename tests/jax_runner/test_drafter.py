"""Tokens that a draft model has missed are not written to pages that the row no longer has."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from sglang_jax.jax_runner.draft_model import DraftModel, DraftState, RowState, make_catch_up
from sglang_jax.jax_runner.drafts import DraftedTokens, KnownTokens
from sglang_jax.jax_runner.step import ModelFunctions, make_settle
from sglang_jax.runner.draft_model import AT_ONCE
from sglang_jax.runner.packing import pack_rows
from sglang_jax.runner.page_tables import TableLayout


def test_nothing_is_written_behind_windows() -> None:
    """Those pages were freed, and the table on the device still names them: they may belong to another row."""

    def forward(weights: object, batch: object, kv: object) -> tuple[object, list[object]]:
        return None, [batch.write_slots, batch.further[0].write_slots]  # type: ignore[attr-defined]

    page_size, columns, length = 4, 8, 20
    draft = DraftModel(ModelFunctions(forward, forward), (1, 2), 0, 2, (None, 5))  # type: ignore[arg-type]
    pages = jnp.arange(1, 1 + 3 * columns, dtype=jnp.int32)
    table = jnp.stack([pages, pages * 0])
    drafted = DraftedTokens.empty(2, 3)
    known = replace(KnownTokens.empty(2, columns * page_size), lengths=jnp.array([length, 0], jnp.int32))
    layout = TableLayout(tuple((first, first + columns) for first in (0, columns, 2 * columns)))
    run = make_catch_up(draft, 16, page_size, None, layout)
    packed = pack_rows(16, 1, np.zeros(1, np.int32), np.array([AT_ONCE], np.int32), np.array([14], np.int32))
    state = run([], DraftState((), drafted), RowState(table, known, None), jnp.asarray(packed))  # type: ignore[arg-type]
    full, window = (np.asarray(slots) for slots in state.kv)
    positions = np.arange(length - AT_ONCE - 14, length - AT_ONCE)
    own = np.asarray(pages).reshape(3, columns)[:, positions // page_size] * page_size + positions % page_size
    assert full[:14].tolist() == own[1].tolist()
    assert window[:14].tolist() == np.where(positions >= length - 5, own[2], 0).tolist()
    assert not full[14:].any()
    assert not window[14:].any()


def test_rows_keep_states_in_the_slot_that_their_column_names() -> None:
    """The column of slots may come before that of a draft model's pages."""
    table = jnp.array([[9, 1, 7], [8, 2, 6], [0, 0, 0]], jnp.int32)
    right = jnp.array([2, 0, 0], jnp.int32)
    packed = jnp.array([[0, 1, 2], [3, 5, 0]], jnp.int32)  # the second row had one draft, which was rejected
    ((pool,),) = make_settle(2, 1)([(jnp.arange(6.0),)], table, right, packed)
    assert pool.tolist() == [0, 4, 2, 3, 4, 5]
    ((of_shards,),) = make_settle(2, 1, 2)([(jnp.arange(12.0),)], table, right, packed)
    assert of_shards.tolist() == [0, 4, 2, 3, 4, 5, 6, 10, 8, 9, 10, 11]
