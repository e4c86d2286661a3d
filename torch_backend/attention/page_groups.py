"""Groups the sequences of a step that are computed together, with one shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from torch_backend.batch import ForwardBatch

_MIN_SHARE = 0.6
"""A decode sequence joins a longer one if it has at least this share of its keys..."""

_MIN_LENGTH = 128
"""...or if the longer one has at most this many: another group would cost more than the padding."""

_TOKENS_TOGETHER = 4096
"""Keys of prefill sequences of equal length that are gathered at once."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences that have `count` queries each; if more than one, also the same length. `sequences`: their rows in the
    page table; `tokens`: indices of their queries in the step; `lens`: their keys, at least 1."""

    sequences: slice | torch.Tensor
    tokens: slice | torch.Tensor
    count: int
    lens: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lens)

    @property
    def shortest(self) -> int:
        return min(self.lens)

    @property
    def num_tokens(self) -> int:
        return self.count * len(self.lens)


def group_sequences(batch: ForwardBatch, first: int = 0) -> list[SequenceGroup]:
    """Groups all sequences of the step from index `first` on, except padding. Reads lengths on the host."""
    lens: list[int] = batch.kv_lens.tolist()
    starts: list[int] = batch.query_starts.tolist()
    counts = [after - before for before, after in pairwise(starts)]
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    single = []
    for sequence, (count, length) in enumerate(zip(counts, lens, strict=True)):
        if sequence < first:
            continue
        if length > 0 and count == 1:
            single.append(sequence)
        elif length > 0 and count > 0:
            by_shape[count, length].append(sequence)
    groups = [*_by_length(single, lens), *_bounded(by_shape)]
    return [_group(sequences, starts, counts, lens, batch.kv_lens.device) for sequences in groups]


def _by_length(sequences: list[int], lens: list[int]) -> Iterator[list[int]]:
    """Groups sequences of single queries so that there is little padding; each group is in the order of rows."""
    rest = sequences
    while rest:
        longest = max(lens[sequence] for sequence in rest)
        least = 0 if longest <= _MIN_LENGTH else longest * _MIN_SHARE
        yield [sequence for sequence in rest if lens[sequence] >= least]
        rest = [sequence for sequence in rest if lens[sequence] < least]


def _bounded(by_shape: dict[tuple[int, int], list[int]]) -> Iterator[list[int]]:
    for (_, length), sequences in by_shape.items():
        size = max(1, _TOKENS_TOGETHER // length)
        for first in range(0, len(sequences), size):
            yield sequences[first : first + size]


def _group(
    sequences: list[int], starts: list[int], counts: list[int], lens: list[int], device: torch.device
) -> SequenceGroup:
    count = counts[sequences[0]]
    tokens = [starts[sequence] + offset for sequence in sequences for offset in range(count)]
    return SequenceGroup(
        sequences=_indices(sequences, device),
        tokens=_indices(tokens, device),
        count=count,
        lens=tuple(lens[sequence] for sequence in sequences),
    )


def _indices(values: list[int], device: torch.device) -> slice | torch.Tensor:
    """Consecutive values as a slice, which copies nothing."""
    if values[-1] - values[0] == len(values) - 1:
        return slice(values[0], values[-1] + 1)
    return torch.tensor(values, device=device)
