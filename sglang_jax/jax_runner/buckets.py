"""The shapes for which programs are compiled. A plan runs in the smallest one that it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_SMALLEST_DECODE = 2  # one bfloat16 row is 9 times slower than two on XLA's CPU backend
_SMALLEST_MIXED = 16
_GROWTH = 4
_ROUNDING = 64


@dataclass(frozen=True, slots=True)
class Bucket:
    """The static shape of a step program: maximum tokens and sequences, equal for decode programs, and maximum
    page-table entries that the program itself overwrites first (`deltas`)."""

    tokens: int
    rows: int
    deltas: int

    @property
    def decode_only(self) -> bool:
        """Whether every sequence has one query, so that token i belongs to sequence i."""
        return self.tokens == self.rows

    def __str__(self) -> str:
        if self.decode_only:
            return f"decode {self.rows}"
        return f"mixed {self.tokens} tokens, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Buckets:
    """Every step program of a runner, smallest first."""

    decode: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]

    @classmethod
    def ladder(
        cls, max_rows: int, token_budget: int, page_size: int, num_groups: int = 1, *, pools: bool = False
    ) -> Buckets:
        """Decode buckets double from 2; mixed ones grow by a factor of 4 from 16. `num_groups`: cache groups with
        pages; `pools`: the model has a pooler, and no decode steps.

        Most steps are decode steps, and their time grows with the rows, padding included. A mixed bucket has one row
        per two tokens, up to all rows: with fewer, a short chunk with many decode rows would not fit; with more, steps
        of mostly decode rows would compute logits of unused rows.
        """
        decode = []
        rows = _SMALLEST_DECODE
        while rows < max_rows:
            decode.append(Bucket(rows, rows, deltas=num_groups * rows))
            rows *= 2
        rows = max(max_rows, _SMALLEST_DECODE)
        decode.append(Bucket(rows, rows, deltas=num_groups * rows))
        mixed = []
        tokens = _SMALLEST_MIXED
        while tokens < token_budget:
            mixed.append(cls._mixed(tokens, max_rows, page_size, num_groups))
            tokens *= _GROWTH
        largest = max(token_budget, max_rows + 1, _SMALLEST_MIXED)
        if largest > _ROUNDING:
            largest = -(-largest // _ROUNDING) * _ROUNDING
        mixed.append(Bucket(largest, max_rows, deltas=num_groups * (largest // page_size + 2 * max_rows)))
        return cls(() if pools else tuple(decode), tuple(mixed))

    @staticmethod
    def _mixed(tokens: int, max_rows: int, page_size: int, num_groups: int) -> Bucket:
        rows = min(max_rows, tokens // 2)
        return Bucket(tokens, rows, deltas=num_groups * (tokens // page_size + 2 * rows))

    def __iter__(self):
        yield from self.decode
        yield from self.mixed

    def pick(
        self, num_tokens: int, num_rows: int, num_decode: int, usable: Callable[[Bucket], bool] | None = None
    ) -> Bucket:
        """The smallest program for a step with these numbers of tokens, sequences and decode rows, preferring `usable`
        ones. Raises `ValueError` for a step beyond the token budget or the rows."""
        candidates = self.decode if num_decode == num_tokens and self.decode else self.mixed
        fitting = [bucket for bucket in candidates if num_tokens <= bucket.tokens and num_rows <= bucket.rows]
        if fitting:
            return next(filter(usable, fitting), fitting[0])
        largest = candidates[-1]
        raise ValueError(
            f"a step of {num_tokens} tokens in {num_rows} rows does not fit the largest program "
            f"({largest.tokens} tokens, {largest.rows} rows)"
        )
