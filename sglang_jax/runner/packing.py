"""Packs a plan's integers into one int32 array, so that a step needs one transfer to the device. Each backend adds its
own fields, and unpacks all of them on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_jax.runner.page_tables import pack_copies
from sglang_jax.runner.plan import Bool, Int32, PageDeltas, StepPlan

SAMPLES, LENGTH_ON_DEVICE, DRAFT_NUMBER = 1, 2, 4
"""The flags of a sequence: two bits, and from `DRAFT_NUMBER` up the number of its draft."""

Array = TypeVar("Array")


@dataclass(frozen=True, slots=True)
class PlanFields(Generic[Array]):
    """A plan in a shape of R sequences, D page-table deltas and T tokens, with padding.

    - `rows`, `kv_lens`, `flags`: `[R]`; padding has the dump row, length 0 and no flags.
    - `query_starts`: `[R + 1]`.
    - `delta_rows`, `delta_columns`, `delta_pages`: `[D]`; padding writes page 0 into the dump row.
    - `tokens`: `[T]`, as in the plan, 0 for padding. Empty for a decode step, where each row computes its last token.
    - `copy_sources`, `copy_targets`: `[R]`, slots of states that sequences start with instead of their own (the
      targets); unused targets are -1. Empty for a model without states.
    """

    rows: Array
    kv_lens: Array
    flags: Array
    query_starts: Array
    delta_rows: Array
    delta_columns: Array
    delta_pages: Array
    tokens: Array
    copy_sources: Array
    copy_targets: Array


def field_places(rows: int, deltas: int, tokens: int, *others: int, states: bool, flags: bool = True) -> list[slice]:
    """The places of `PlanFields` in a packed array, then those of fields with the lengths `others`; the last one ends
    where the array does. `states`: whether the model keeps states; `flags`: whether sequences have flags."""
    copies = rows if states else 0
    of_plan = (rows, rows, rows if flags else 0, rows + 1, deltas, deltas, deltas, tokens, copies, copies)
    return [slice(*ends) for ends in pairwise(accumulate((*of_plan, *others), initial=0))]


def write_plan(
    fields: Sequence[Int32],
    plan: StepPlan,
    deltas: PageDeltas,
    dump_row: int,
    num_decode: int,
    flags: Int32 | None,
    *,
    padded_tokens: bool = False,
) -> slice | NDArray[np.intp]:
    """Writes a plan that fits, with page `deltas` and the sequences' `flags`, into the `PlanFields`, which are zero.
    Chunks start at sequence and token `num_decode`, after the decode rows and padding of one token each.
    `padded_tokens`: padding after the chunks has the tokens of padding, in the last sequence; by default, it has none.
    Returns the places of the plan's sequences."""
    rows, kv_lens, own_flags, query_starts, delta_rows, delta_columns, delta_pages, tokens, *copied = fields
    decoding, sequences, entries = plan.num_decode, len(plan.rows), len(deltas.rows)
    places: slice | NDArray[np.intp] = slice(sequences)
    ends = query_starts[1:]
    if decoding < num_decode:
        ends[decoding:num_decode] = 1
        places = np.arange(sequences)
        places[decoding:] += num_decode - decoding
    rows[:] = dump_row
    rows[places] = plan.rows
    kv_lens[places] = plan.kv_lens
    if flags is not None:
        own_flags[places] = flags
    ends[places] = plan.query_lens
    ends.cumsum(out=ends)
    delta_rows[:entries] = deltas.rows
    delta_rows[entries:] = dump_row
    delta_columns[:entries] = deltas.columns
    delta_pages[:entries] = deltas.pages
    if len(tokens):
        tokens[:decoding] = plan.tokens[:decoding]
        tokens[num_decode : plan.num_tokens + num_decode - decoding] = plan.tokens[decoding:]
        if padded_tokens:
            ends[-1] = len(tokens)
    pack_copies(plan.copies, *copied)
    return places


def pack_rows(size: int, dump_row: int, rows: Int32, *others: Int32) -> Int32:
    """`rows` and `others`, `[n]` each, as int32 `[1 + others, size]`. Padding has the dump row, and 0 otherwise."""
    packed = np.zeros((1 + len(others), size), np.int32)
    packed[0] = dump_row
    packed[:, : len(rows)] = (rows, *others)
    return packed


def flags_of(plan: StepPlan, samples: Bool | None, draft_numbers: Int32 | None) -> Int32:
    """The flags of the plan's sequences. `samples`: those with the flag `SAMPLES`; `draft_numbers`: as in
    `FlatPlan`."""
    flags = np.zeros(len(plan.rows), np.int32)
    if samples is not None:
        flags += SAMPLES * samples
    if plan.length_on_device is not None:
        flags += LENGTH_ON_DEVICE * plan.length_on_device
    if draft_numbers is not None:
        flags += DRAFT_NUMBER * draft_numbers
    return flags
