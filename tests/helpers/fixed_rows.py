"""Logits of the same tokens in different steps, which must be the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

Step = Mapping[int, int]


class Paged(Protocol):
    def run(
        self, sequences: Sequence[np.ndarray], steps: Sequence[Step], cached: Sequence[int] | None = None
    ) -> list[np.ndarray]: ...


def ways_to_compute(lengths: Sequence[int], most: int, seed: int) -> Iterator[list[Step]]:
    """Steps that compute all tokens of sequences: whole sequences; their last tokens one by one, by themselves or
    with the others; and all together in chunks of random length, of at most `most` tokens in a step. Decode rows come
    first."""
    yield [{row: length} for row, length in enumerate(lengths)]
    begins = [{row: length - 4} for row, length in enumerate(lengths)]
    yield [*begins, *({row: 1} for row in range(len(lengths)) for _ in range(4))]
    yield [*begins, *[dict.fromkeys(range(len(lengths)), 1)] * 4]
    rng = np.random.default_rng(seed)
    for largest in (3, most):
        left, steps = dict(enumerate(lengths)), []
        while left:
            room, step = most, {}
            for row in rng.permutation(list(left)).tolist():
                count = min(int(rng.integers(0, largest + 1)), left[row], room)
                if count:
                    step[row], room = count, room - count
                    left[row] -= count
            left = {row: count for row, count in left.items() if count}
            if step:
                steps.append(dict(sorted(step.items(), key=lambda item: item[1] != 1)))
        yield steps


def differences(model: Paged, sequences: Sequence[np.ndarray], most: int, *, states: bool = False) -> int:
    """The number of logits that differ between ways to compute the same tokens; also with some tokens already in pages,
    unless the model keeps `states`."""
    expected, found = None, 0
    for steps in ways_to_compute([len(tokens) for tokens in sequences], most, len(sequences)):
        logits = model.run(sequences, steps)
        expected = expected or logits
        found += sum(int((mine != theirs).sum()) for mine, theirs in zip(logits, expected, strict=True))
    assert expected is not None
    if not states:
        cached = [len(tokens) - 1 - row for row, tokens in enumerate(sequences)]
        step = {row: len(tokens) - start for row, (tokens, start) in enumerate(zip(sequences, cached, strict=True))}
        for logits, whole, start in zip(model.run(sequences, [step], cached), expected, cached, strict=True):
            found += int((logits != whole[start:]).sum())
    return found
