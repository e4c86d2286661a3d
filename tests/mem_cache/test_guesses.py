"""Guesses where later prompts will diverge: how many, where, and what they may cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.mem_cache.guesses import Guesses

PAGE, COST, MAX_WRONG, MAX_LENGTHS = 16, 128, 32, 4

PROMPTS = st.lists(
    st.tuples(st.integers(1, 20_000), st.integers(0, 600), st.booleans(), st.integers(1, 5000)), max_size=80
)
"""Total tokens, pages known to the tree, whether the prompt teaches anything, and what a guess would have saved it."""


@given(PROMPTS)
def test_guesses_are_few_each_saves_what_it_costs_and_in_total_they_cost_little_more_than_they_save(
    prompts: list[tuple[int, int, bool, int]],
) -> None:
    guesses, spent, earned = Guesses(PAGE), 0, 0
    for total, pages, learns, saved in prompts:
        known = min(pages * PAGE, (total - 1) // PAGE * PAGE)
        if learns:
            guesses.learn(total - known, saved)
            earned += saved
        lengths = guesses.of(total, known)
        assert len(lengths) <= MAX_LENGTHS
        assert all(length % PAGE == 0 and length < total for length in lengths)
        gains = [end - start for start, end in zip((known, *lengths), lengths, strict=False)]
        assert all(gain >= COST for gain in gains)
        assert not lengths or total > 2 * known
        for _ in lengths:
            if guesses.affordable:
                guesses.pay()
                spent += COST
        assert spent < (MAX_WRONG + 1) * COST + earned


@given(st.integers(40, 4000), st.integers(5000, 10_000), st.data())
def test_of_prompts_with_similar_tails_one_length_is_guessed_before_the_longest_tail(
    tail: int, shared: int, data: st.DataObject
) -> None:
    """Tails vary by a tenth."""
    similar = st.integers(tail - tail // 10, tail + tail // 10)
    guesses = Guesses(PAGE)
    recent = [data.draw(similar) for _ in range(8)]
    for one in recent:
        guesses.learn(one, COST)
    total = shared + data.draw(similar)
    assert guesses.of(total, 0) == ((total - max(recent)) // PAGE * PAGE,)


def test_many_similar_and_some_other_tails_make_one_guess_for_each_kind() -> None:
    guesses = Guesses(PAGE, tails=(40, 44, 250, 240, 41, 1000))
    assert guesses.of(3000, 0) == (2000, 2736, 2944)
