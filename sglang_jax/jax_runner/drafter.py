"""Runs a draft model before steps with drafts: see `runner.draft_model`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from sglang_jax.jax_runner.draft_model import pack_drafts, pack_missed
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.step import DeviceState, Weights
from sglang_jax.runner.draft_model import AT_ONCE, DraftLag
from sglang_jax.runner.drafts import FlatPlan
from sglang_jax.runner.plan import Int32


class Drafter:
    """Runs the draft model's programs. `weights`: of both models."""

    def __init__(self, programs: Programs, weights: Weights, max_rows: int) -> None:
        self._programs = programs
        self._weights = weights
        self._lag = DraftLag(max_rows)

    def propose(self, state: DeviceState, flat: FlatPlan) -> DeviceState:
        """The state with the drafts of `flat`, whose page-table deltas are applied."""
        programs = self._programs
        for packed in self._missed(*self._lag.missed(flat)):
            state = programs.catch_up(self._weights, state, packed)
        drafting = int(np.count_nonzero(flat.draft_numbers == 1))
        size = programs.draft_size(drafting)
        return programs.propose(self._weights, state, pack_drafts(flat, size, programs.dump_row))

    def launched(self, flat: FlatPlan) -> None:
        self._lag.launched(flat)

    def warm_up(self, state: DeviceState, names: Collection[str]) -> Iterator[tuple[str, DeviceState]]:
        """Runs each of the named programs in the dump row. Yields its name and the state."""
        dump_row = self._programs.dump_row
        for size in self._programs.draft_sizes:
            if (name := f"draft {size} rows") not in names:
                continue
            packed = np.full((2, size), 2, np.int32)
            packed[0] = dump_row
            state = self._programs.propose(self._weights, state, packed)
            yield name, state
        for size in self._programs.catch_up_sizes:
            if (name := f"catch up {size} tokens") not in names:
                continue
            one = np.array([1], np.int32)
            state = self._programs.catch_up(
                self._weights, state, pack_missed(one * dump_row, one * 0, one, size, dump_row)
            )
            yield name, state

    def _missed(self, rows: Int32, counts: Int32) -> Iterator[Int32]:
        """The parts in which to compute `counts` tokens of `rows`, `[n]` both, oldest first."""
        sizes, dump_row = self._programs.catch_up_sizes, self._programs.dump_row
        for start in range(0, len(rows), sizes[-1]):
            own, left = rows[start : start + sizes[-1]], counts[start : start + sizes[-1]]
            while len(own):
                size = next((size for size in sizes if size >= left.sum()), sizes[-1])
                part = np.minimum(left, size // len(own))
                left = left - part
                yield pack_missed(own, AT_ONCE + left, part, size, dump_row)
                own, left = own[left > 0], left[left > 0]
