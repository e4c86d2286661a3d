"""From a step's inputs to the forward batch, on the device and without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_jax.runner.plan import LAST_TOKEN
from torch_backend.batch import ForwardBatch, GroupPages
from torch_backend.packing import StepInputs


class Model(Protocol):
    """What a step asks of a model; it owns its KV pages."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states `[T, hidden]`; writes the step's keys and values into the pages."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[m, vocab]` of hidden states `[m, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class RowTensors:
    """What steps keep for each row. One row more than the runner offers, the dump row, takes what padding writes.

    - `page_table`: int32 `[rows + 1, groups * pages]`, those of all cache groups side by side; the dump row holds page
      0 alone.
    - `last_tokens`: int32 `[rows + 1]`, what each row sampled last.
    """

    page_table: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, pages: int, device: torch.device) -> RowTensors:
        """For `rows` rows, the dump row included."""
        return cls(
            torch.zeros((rows, pages), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def build_batch(inputs: StepInputs, state: RowTensors, page_size: int, num_groups: int = 1) -> ForwardBatch:
    """Applies the page-table deltas, and says where each token stands and which slots its KV goes to."""
    state.page_table.index_put_((inputs.delta_rows.long(), inputs.delta_columns.long()), inputs.delta_pages)
    rows = inputs.rows.long()
    tables = [table[rows] for table in state.page_table.chunk(num_groups, 1)]
    last_tokens = state.last_tokens[rows]
    if inputs.num_decode == len(rows):
        tokens = last_tokens
        positions = (inputs.kv_lens - 1).clamp(min=0)
        columns = (positions // page_size).long()[:, None]
        pages = [table.gather(1, columns)[:, 0] for table in tables]
    else:
        count = len(inputs.tokens)
        ends = inputs.query_starts[1:]
        places = torch.arange(count, dtype=torch.int32, device=rows.device)
        sequences = torch.repeat_interleave(ends - inputs.query_starts[:-1], output_size=count)
        tokens = torch.where(inputs.tokens == LAST_TOKEN, last_tokens[sequences], inputs.tokens)
        positions = (inputs.kv_lens - ends)[sequences] + places
        columns = (positions // page_size).long()
        pages = [table[sequences, columns] for table in tables]
    first, *further = [
        GroupPages(own.long() * page_size + positions % page_size, table)
        for own, table in zip(pages, tables, strict=True)
    ]
    return ForwardBatch(
        # A row whose logits were not finite holds no token; its request ends once the host has seen it.
        tokens=tokens.clamp(min=0),
        positions=positions,
        write_slots=first.write_slots,
        page_table=first.page_table,
        kv_lens=inputs.kv_lens,
        query_starts=inputs.query_starts,
        num_decode=inputs.num_decode,
        further=tuple(further),
    )
