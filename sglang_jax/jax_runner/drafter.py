"""Runs a draft model before steps with drafts: see `runner.draft_model`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.step import DeviceState, Weights
from sglang_jax.runner.draft_model import DraftLag, in_parts
from sglang_jax.runner.drafts import FlatPlan
from sglang_jax.runner.packing import pack_rows


class Drafter:
    """Runs the draft model's programs. `weights`: of both models."""

    def __init__(self, programs: Programs, weights: Weights, max_rows: int) -> None:
        self._programs = programs
        self.use(weights)
        self._lag = DraftLag(max_rows)

    def use(self, weights: Weights) -> None:
        """Takes other weights of the model, from the next step on."""
        self._weights = weights

    def propose(self, state: DeviceState, flat: FlatPlan) -> DeviceState:
        """The state with the drafts of `flat`, whose page-table deltas are applied."""
        programs = self._programs
        for size, *part in in_parts(*self._lag.missed(flat), programs.catch_up_sizes):
            state = programs.catch_up(self._weights, state, pack_rows(size, programs.dump_row, *part))
        rows, counts = flat.drafting()
        packed = pack_rows(programs.draft_size(len(rows)), programs.dump_row, rows, counts)
        return programs.propose(self._weights, state, packed)

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
            packed = pack_rows(size, dump_row, one * dump_row, one * 0, one)
            state = self._programs.catch_up(self._weights, state, packed)
            yield name, state
