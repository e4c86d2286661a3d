"""The drafts of runners (how a text continued where its end occurred before), on both backends, against plain
Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.jax_runner import drafts as jax_drafts
from sglang_jax.runner.drafts import LONGEST_MATCH, SHORTEST_MATCH, pack_hints
from sglang_jax.runner.packing import DRAFT_NUMBER, LENGTH_ON_DEVICE, SAMPLES
from sglang_jax.runner.plan import DRAFT, HINT_TOKENS, INVALID_TOKEN, HintUpdate
from torch_backend import drafts as torch_drafts

CONTEXT = 40
MOST = 5
LINES = 4 * (MOST + 1)
WITH_DRAFTS = jax.jit(jax_drafts.Sequences.with_drafts)
SET_HINTS = jax.jit(jax_drafts.set_hints)
KEPT_SAMPLES = jax.jit(jax_drafts.kept_samples, static_argnums=3)


def most_alike(text: Sequence[int], other: Sequence[int], places: int) -> tuple[int, int]:
    """The latest of the first `places` of `other` with the longest match of the text's end: its length, and where."""
    best, where = 0, 0
    for place in range(places):
        length = 0
        while length < min(LONGEST_MATCH, place + 1, len(text)) and other[place - length] == text[-1 - length]:
            length += 1
        if length >= max(best, SHORTEST_MATCH):
            best, where = length, place
    return best, where


def expected(text: Sequence[int], hint: Sequence[int], count: int) -> list[int]:
    """The tokens after the latest of the places with the longest match of the text's end, as if the text continued in
    the same way; or those of its hint, where that match is longer."""
    best, where = most_alike(text, text, len(text) - 1)
    hinted, place = most_alike(text, hint, len(hint))
    if hinted > best:
        return [*hint[place + 1 :], *[DRAFT] * count][:count]
    if not best:
        return [DRAFT] * count
    grown = list(text)
    for _ in range(count):
        where += 1
        grown.append(grown[where])
    return grown[len(text) :]


def by_jax(texts: list[list[int]], hints: list[list[int]], stale: int) -> list[list[int]]:
    tokens = np.full((len(texts) + 1, CONTEXT + 1), stale, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.array([*map(len, texts), 0], jnp.int32)
    known = jax_drafts.KnownTokens.empty(len(texts) + 1, CONTEXT)
    updates = [HintUpdate(row, np.array(hint, np.int32)) for row, hint in enumerate(hints)]
    known = SET_HINTS(replace(known, tokens=jnp.array(tokens), lengths=lengths), pack_hints(updates, 8, len(texts)))
    rows = np.repeat(np.arange(len(texts)), MOST + 1)
    drafts = np.tile(np.arange(MOST + 1), len(texts))
    flags = jnp.array(SAMPLES | LENGTH_ON_DEVICE | DRAFT_NUMBER * drafts, jnp.int32)
    last_tokens = jnp.full(len(rows), 77, jnp.int32)
    nothing = jnp.zeros(len(rows), jnp.int32)
    found = WITH_DRAFTS(flags, jnp.array(rows), nothing, last_tokens, known)
    assert found.kv_lens.tolist() == (np.repeat([*map(len, texts)], MOST + 1) + drafts).tolist()
    own = np.array(found.own).reshape(len(texts), MOST + 1)
    assert (own[:, 0] == 77).all()
    return own[:, 1:].tolist()


def by_torch(texts: list[list[int]], hints: list[list[int]], stale: int) -> list[list[int]]:
    known = torch_drafts.KnownTokens.zeros(len(texts) + 1, CONTEXT, torch.device("cpu"))
    known.tokens.fill_(stale)
    for row, text in enumerate(texts):
        known.tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        known.lengths[row] = len(text)
    updates = [HintUpdate(row, np.array(hint, np.int32)) for row, hint in enumerate(hints)]
    known.hint(torch.from_numpy(pack_hints(updates, len(updates), len(texts))))
    numbers = torch.arange(1, MOST + 1).repeat(len(texts))
    rows = torch.arange(len(texts))
    owners, longest = rows.repeat_interleave(MOST), max(map(len, texts)) + 1
    drafts = torch_drafts.DraftSequences(torch.arange(len(numbers)), numbers, owners, rows, longest)
    return known.propose(drafts).view(len(texts), MOST).tolist()


Guesser = Callable[[list[list[int]], list[list[int]], int], list[list[int]]]
GUESSERS: dict[str, Guesser] = {"jax": by_jax, "torch": by_torch}
HINTS = st.lists(st.lists(st.integers(0, 3), max_size=HINT_TOKENS), min_size=3, max_size=3)
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=3, max_size=3)


@pytest.mark.parametrize("guess", GUESSERS.values(), ids=GUESSERS)
@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, hints=HINTS, stale=st.integers(0, 3))
def test_drafts_are_the_earlier_continuation_of_the_text(
    guess: Guesser, texts: list[list[int]], hints: list[list[int]], stale: int
) -> None:
    found = [expected(text, hint, MOST) for text, hint in zip(texts, hints, strict=True)]
    assert guess(texts, hints, stale) == found


@pytest.mark.parametrize("backend", GUESSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_accepted_samples_end_with_the_first_that_differs_from_its_draft(backend: str, data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.integers(1, MOST + 1), min_size=1, max_size=4))
    tokens = st.lists(st.sampled_from([1, 2, INVALID_TOKEN]), min_size=sum(widths), max_size=sum(widths))
    sampled = np.array(data.draw(tokens), np.int32)
    computed = np.array(data.draw(st.lists(st.integers(1, 2), min_size=sum(widths), max_size=sum(widths))), np.int32)
    drafts = np.concatenate([np.arange(width) for width in widths]).astype(np.int32)
    kept, last = [], []
    for first, width in zip(np.cumsum(widths) - widths, widths, strict=True):
        right = 1
        while right < width and sampled[first + right - 1] == computed[first + right]:
            right += 1
        kept += [place < right for place in range(width)]
        last += [place == right - 1 for place in range(width)]
    given = [np.pad(array, (0, LINES - len(array))) for array in (drafts, computed, sampled)]
    if backend == "jax":
        found = KEPT_SAMPLES(*map(jnp.array, given), MOST)
    else:
        found = torch_drafts.kept_samples(*map(torch.tensor, given), MOST)
    assert [part.tolist()[: len(kept)] for part in found] == [kept, last]
