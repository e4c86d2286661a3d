"""A draft model that catches up writes pages of its row, and no others."""

from __future__ import annotations

import numpy as np
import torch

from sglang_jax.runner.page_tables import TableLayout
from torch_backend.batch import ForwardBatch
from torch_backend.draft_model import Drafter, DraftRequest
from torch_backend.drafts import DraftedTokens, KnownTokens
from torch_backend.step import RowTensors

PAGE_SIZE, COLUMNS, LENGTH, WINDOW = 4, 8, 20, 5


class Recorder:
    """Computes nothing, and records what a model would write: `[tokens]` positions and slots by group."""

    def __init__(self) -> None:
        self.written: list[tuple[list[int], list[list[int]]]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        groups = [batch.write_slots, *(pages.write_slots for pages in batch.further)]
        self.written.append((batch.positions.tolist(), [slots.tolist() for slots in groups]))
        return torch.zeros(len(batch.tokens), 2)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_nothing_is_written_behind_windows() -> None:
    """Those pages were freed, and the device's table still names them: they may belong to another row."""
    known = KnownTokens.zeros(2, COLUMNS * PAGE_SIZE, torch.device("cpu"))
    drafted = DraftedTokens.zeros(2, 3, torch.device("cpu"))
    rows = RowTensors.zeros(2, 3 * COLUMNS, torch.device("cpu"), known, drafted)
    rows.page_table[0] = torch.arange(1, 1 + 3 * COLUMNS)
    known.lengths[0], drafted.lengths[0] = LENGTH, 4
    model = Recorder()
    layout = TableLayout(tuple((first, first + COLUMNS) for first in (0, COLUMNS, 2 * COLUMNS)), draft=(1, 2))
    drafter = Drafter(model, (None, WINDOW), rows, layout, PAGE_SIZE, torch.from_numpy)
    zero = np.zeros(1, np.int32)
    drafter.propose(DraftRequest(zero, zero + 2, zero, zero + 14), lambda logits, *_: torch.zeros(len(logits)).int())
    pages = rows.page_table[0].view(3, COLUMNS).tolist()
    seen = []
    for positions, (full, window) in model.written:
        for position, own, behind in zip(positions, full, window, strict=True):
            column, place = divmod(position, PAGE_SIZE)
            assert own == pages[1][column] * PAGE_SIZE + place or position == LENGTH - 2
            assert behind == (pages[2][column] * PAGE_SIZE + place if own and position >= LENGTH - WINDOW else 0)
            seen.append(position)
    assert seen == [*range(4, LENGTH - 2), LENGTH - 2, LENGTH - 1, LENGTH]
