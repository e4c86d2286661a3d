"""Steps that compute one sequence several times side by side: how often, in which chunks, and in which slots its states
are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

BLOCK = 64

SPLITS = (
    [1] * 3 + [BLOCK - 1, 2, BLOCK + 1],
    [BLOCK, 1, 1, BLOCK + 5],
    [2 * BLOCK + 1],
    [3, BLOCK - 3, BLOCK + 1],
    [1, 2, 2 * BLOCK - 3],
)
"""Chunks of single tokens, of a block and of one more or less; the rest of the sequence is a last chunk."""


@dataclass
class StateStep:
    """Some copies of the sequence in a step, decode rows first: the tokens that each computes, and its slots."""

    counts: list[int] = field(default_factory=list)
    begin: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    fresh: list[bool] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def num_decode(self) -> int:
        """Number of leading sequences with one token."""
        return next((number for number, count in enumerate(self.counts) if count > 1), len(self.counts))

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the sequence, in the order of the step."""
        return np.array(self.places)

    def add(self, first: int, count: int, begin: int, own: int) -> None:
        self.counts.append(count)
        self.begin.append(begin)
        self.own.append(own)
        self.fresh.append(first == 0)
        self.places += range(first, first + count)


def splits(length: int) -> Iterator[tuple[list[StateStep], int]]:
    """Each split of a sequence of `length` tokens, in one row or together with the previous split, and the slot in
    which the last state is then. A row changes its slot with each chunk, so that the state it started from stays."""
    for number, split in enumerate(SPLITS):
        steps, slot, done = [], 0, 0
        beside = SPLITS[number - 1]
        for turn, count in enumerate([*split, length - sum(split)]):
            sequences = [(done, count, slot, 1 + turn % 2)]
            if turn < len(beside):
                sequences.append((sum(beside[:turn]), beside[turn], 7 + turn, 8 + turn))
            step = StateStep()
            for sequence in sorted(sequences, key=lambda sequence: sequence[1] > 1):
                step.add(*sequence)
            slot, done = 1 + turn % 2, done + count
            steps.append(step)
        yield steps, slot


def random_scan(delta: bool) -> tuple[np.ndarray | None, ...]:
    """Queries, keys, values, decays and rates of three blocks of tokens, with 2 groups of keys for 4 heads."""
    rng = np.random.default_rng(5)
    tokens = 3 * BLOCK

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal((tokens, *shape), np.float32)

    keys = numbers(2, 8)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decays = -np.exp(numbers(4) - 2)
    return numbers(2, 8), keys, numbers(4, 16), decays, 1 / (1 + np.exp(-numbers(4))) if delta else None


@dataclass(frozen=True)
class DraftedStep:
    """A decode step of rows with some drafts each: for its sequences the slots that they start from and leave their
    states in, and the draft of its row that each stands for. The second row starts from another slot than its own."""

    begin: list[int]
    own: list[int]
    drafts: list[int]

    def source(self, sequence: int) -> int:
        """The slot from which a sequence starts, if all before it in its row have run."""
        return self.own[sequence - 1] if self.drafts[sequence] else self.begin[sequence]


def drafted_step() -> DraftedStep:
    """More drafts than a convolution has taps, fewer, and none."""
    begin, own, drafts = list[int](), list[int](), list[int]()
    for row, most in enumerate((0, 5, 0, 1, 2), 1):
        for draft in range(1 + most):
            begin.append(9 if row == 2 else row)
            own.append(row if draft == 0 else 10 + sum(number > 0 for number in drafts))
            drafts.append(draft)
    return DraftedStep(begin, own, drafts)


DRAFTED_SLOTS = 20
