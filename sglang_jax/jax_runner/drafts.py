"""Drafts tokens on the device, and determines which samples after drafts count.

Drafts come from a draft model (`draft_model.py`), or continue the row's text as after an earlier occurrence of its end:
prompt lookup decoding (Saxena 2023), whose drafts are accepted if a text repeats itself: edited code, quotations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.runner.drafts import LONGEST_MATCH, SHORTEST_MATCH
from sglang_jax.runner.packing import DRAFT_NUMBER, LENGTH_ON_DEVICE, SAMPLES
from sglang_jax.runner.plan import DRAFT, HINT_TOKENS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KnownTokens:
    """The text of every row, for runners with drafts, as int32 arrays.

    - `tokens` `[rows + 1, max_context + 1]`: prompt and output; arbitrary after a row's length.
    - `lengths` `[rows + 1]`: tokens of each row that has sampled; the last one is not computed yet.
    - `hints` `[rows + 1, HINT_TOKENS]`: parts of other texts to search, too; padded with `DRAFT`.
    - `accepted` `[rows + 1]`: accepted drafts of the previous step, of each row in it.
    """

    tokens: jax.Array
    lengths: jax.Array
    hints: jax.Array
    accepted: jax.Array

    @classmethod
    def empty(cls, rows: int, max_context: int) -> KnownTokens:
        return cls(
            jnp.zeros((rows, max_context + 1), jnp.int32),
            jnp.zeros(rows, jnp.int32),
            jnp.full((rows, HINT_TOKENS), DRAFT, jnp.int32),
            jnp.zeros(rows, jnp.int32),
        )

    def append(self, rows: jax.Array, kv_lens: jax.Array, tokens: jax.Array, kept: jax.Array) -> KnownTokens:
        """Appends `tokens` of `kept` sequences to the texts of `rows`, at `kv_lens`: all `[R]`."""
        dump_row = self.lengths.shape[0] - 1
        rows = jnp.where(kept, rows, dump_row)
        return replace(
            self,
            tokens=self.tokens.at[rows, kv_lens].set(tokens),
            lengths=self.lengths.at[rows].max(jnp.where(kept, kv_lens + 1, 0)),
        )

    def set_accepted(self, rows: jax.Array, draft_numbers: jax.Array, last: jax.Array) -> KnownTokens:
        """Sets `accepted` of `rows` to the `draft_numbers` of their `last` accepted sequences: all `[R]`."""
        dump_row = self.lengths.shape[0] - 1
        return replace(self, accepted=self.accepted.at[jnp.where(last, rows, dump_row)].set(draft_numbers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftedTokens:
    """The drafts of a draft model for the present step, int32 `[rows + 1, drafts]`, `DRAFT` for none; and how many of
    each row's first tokens have keys and values of the draft model, int32 `[rows + 1]`."""

    tokens: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(cls, rows: int, drafts: int) -> DraftedTokens:
        return cls(jnp.full((rows, drafts), DRAFT, jnp.int32), jnp.zeros(rows, jnp.int32))

    def computed_with(self, rows: jax.Array, starts: jax.Array, ends: jax.Array, chunks: jax.Array) -> DraftedTokens:
        """Notes that the draft model has computed tokens `[starts, ends)` of `rows`, all `[R]`. Before `chunks` (bool
        `[R]`) no token is missing; tokens after missing ones are computed again."""
        before = self.lengths[rows]
        return replace(self, lengths=self.lengths.at[rows].set(jnp.where(chunks | (before >= starts), ends, before)))

    def up_to(self, known: KnownTokens) -> DraftedTokens:
        """Cuts lengths after a step: KV of rejected drafts does not count, and the last sample is not computed yet."""
        return replace(self, lengths=jnp.minimum(self.lengths, known.lengths - 1))


class Sequences(NamedTuple):
    """The sequences of a step, `[R]` each.

    - `samples`: bool, whether they sample.
    - `kv_lens`: int32, length after the step, also of sequences that start where the previous step ended.
    - `own`: int32, tokens of decode sequences: the row's last sample, or a draft; `DRAFT` if there is none.
    - `draft_numbers`: int32, the draft's number in its row, from 1; 0 for no draft. None in steps without drafts.
    """

    samples: jax.Array
    kv_lens: jax.Array
    own: jax.Array
    draft_numbers: jax.Array | None

    @classmethod
    def with_drafts(
        cls,
        flags: jax.Array,
        rows: jax.Array,
        kv_lens: jax.Array,
        last_tokens: jax.Array,
        known: KnownTokens,
        drafted: DraftedTokens | None = None,
    ) -> Sequences:
        """`drafted`: the drafts of a draft model; None to draft from the rows' texts."""
        draft_numbers = flags // DRAFT_NUMBER
        length_on_device = flags & LENGTH_ON_DEVICE != 0
        kv_lens = jnp.where(length_on_device, known.lengths[rows] + draft_numbers, kv_lens)
        if drafted is not None:
            own = jnp.where(draft_numbers > 0, drafted.tokens[rows, draft_numbers - 1], last_tokens)
            return cls(flags & SAMPLES != 0, kv_lens, own, draft_numbers)
        own = lax.cond(
            jnp.any(draft_numbers > 0),
            lambda: jnp.where(draft_numbers > 0, _guess(known, rows, draft_numbers), last_tokens),
            lambda: last_tokens,
        )
        return cls(flags & SAMPLES != 0, kv_lens, own, draft_numbers)


def set_known_tokens(known: KnownTokens, packed: jax.Array) -> KnownTokens:
    """Replaces the texts of rows: `packed` int32 `[n, 2 + max_context + 1]` has row, length and tokens of each."""
    rows, lengths, tokens = packed[:, 0], packed[:, 1], packed[:, 2:]
    return replace(
        known,
        tokens=known.tokens.at[rows].set(tokens),
        lengths=known.lengths.at[rows].set(lengths),
        hints=known.hints.at[rows].set(DRAFT),
    )


def set_hints(known: KnownTokens, packed: jax.Array) -> KnownTokens:
    """Replaces the hints of rows: `packed` int32 `[n, 1 + HINT_TOKENS]`, see `pack_hints`."""
    return replace(known, hints=known.hints.at[packed[:, 0]].set(packed[:, 1:]))


def _guess(known: KnownTokens, rows: jax.Array, draft_numbers: jax.Array) -> jax.Array:
    """Drafts `[R]` that continue the texts of `rows` `[R]` as after the latest of their longest matches with the end,
    in the text or in the hint. A match so close to the end that the text runs out is continued periodically."""
    own = known.tokens.shape[1]  # columns of a text; those after them are a hint's
    tokens = jnp.concatenate((known.tokens[rows], known.hints[rows]), axis=1)
    width = tokens.shape[1]
    columns = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    in_hint = columns >= own
    since_begin = jnp.where(in_hint, columns - own, columns)
    last = (known.lengths[rows] - 1)[:, None]
    matching = in_hint | (columns < last)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(LONGEST_MATCH):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        matching &= (jnp.roll(tokens, back, axis=1) == wanted) & (since_begin >= back) & (last >= back)
        matched += matching
    later = jnp.where(in_hint, since_begin, columns + HINT_TOKENS)
    score = jnp.where(matched >= SHORTEST_MATCH, matched * width + later, -1)
    place = jnp.argmax(score, axis=1)[:, None]
    ahead = draft_numbers[:, None] - 1
    ahead = jnp.where(place < own, ahead % jnp.maximum(last - place, 1), ahead)
    found = jnp.take_along_axis(tokens, jnp.minimum(place + 1 + ahead, width - 1), axis=1)
    found = jnp.where((jnp.max(score, axis=1) >= 0)[:, None] & (place + 1 + ahead < width), found, DRAFT)
    return found[:, 0]


def kept_samples(
    draft_numbers: jax.Array, computed: jax.Array, sampled: jax.Array, most: int
) -> tuple[jax.Array, jax.Array]:
    """Which sequences sampled after accepted drafts only, and which of them are the last of their rows: bool `[R]`
    each. `computed`: each sequence's token; `sampled`: its sample. `most`: maximum drafts of a row."""
    first = draft_numbers == 0
    accepted = jnp.roll(sampled, 1) == computed
    kept = first
    for _ in range(most):
        kept = first | (accepted & jnp.roll(kept, 1))
    continued = jnp.roll(kept & ~first, -1)
    return kept, kept & ~continued
