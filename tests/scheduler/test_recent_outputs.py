"""Recent outputs of a namespace, searched for the ends of texts: matches are exact, memory is bounded, and no match
comes from another namespace."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.scheduling import VOCAB, Bench
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.runner.plan import HINT_TOKENS
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import recent_outputs
from sglang_jax.scheduler.recent_outputs import KEY_TOKENS, MAX_NAMESPACES, OutputsOfNamespace, RecentOutputs


def integers(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


OUTPUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(outputs=OUTPUTS, keys=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_latest_place_with_the_key_is_found(outputs: list[list[int]], keys: list[list[int]]) -> None:
    kept = OutputsOfNamespace(begin=1000)
    for output in outputs:
        kept.add(integers(output))
    whole = [token for output in outputs for token in (*output, -1)]
    places = kept.find(integers(keys).reshape(-1, KEY_TOKENS))
    for key, place in zip(keys, places.tolist(), strict=True):
        ends = [end for end in range(KEY_TOKENS, len(whole) + 1) if whole[end - KEY_TOKENS : end] == key]
        if not ends:
            assert place == -1
            continue
        assert place == 1000 + ends[-1] - 1
        behind = whole[ends[-1] - KEY_TOKENS :][:HINT_TOKENS]
        assert kept.hint(place).tolist() == behind[: behind.index(-1) if -1 in behind else None]


def test_overwritten_tokens_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_outputs, "MAX_TOKENS", 64)
    kept = OutputsOfNamespace()
    kept.add(integers([90, 91, 92, 93, 94]))
    first = integers([[90, 91, 92, 93]])
    for number in range(8):
        assert (kept.find(first)[0] >= 0) == (kept.end <= 64)
        kept.add(integers(list(range(8 * number, 8 * number + 8))))
    kept.add(integers(list(range(500))))
    assert kept.find(integers([[496, 497, 498, 499]]))[0] == kept.end - 2
    assert kept.find(integers([[400, 401, 402, 403]]))[0] == -1


def drafting(**options: object) -> Bench:
    bench = Bench(**{"max_samples": 4, "budget": 64, **options})  # type: ignore[arg-type]
    bench.runner.keep_plans = True
    return bench


def prompt(length: int = 9, first: int = 1) -> list[int]:
    return [1 + (first + 3 * position) % (VOCAB - 2) for position in range(length)]


def ask(bench: Bench, tokens: list[int], namespace: str | None, seed: int = 5) -> list[list[int]]:
    """Serves a request; returns the hints that its row got."""
    before = len(bench.runner.plans)
    sampling = SamplingParams(max_new_tokens=30, seed=seed, ignore_eos=True)
    bench.add(tokens, sampling=sampling, extra_key=namespace)
    bench.run()
    bench.check_outputs()
    plans = bench.runner.plans[before:]
    return [update.tokens.tolist() for plan in plans for update in plan.row_updates.hints]


def test_a_text_that_continues_like_another_gets_the_rest_of_it_as_hints() -> None:
    bench = drafting()
    assert ask(bench, prompt(), None) == []
    output = bench.channel.output(1)
    first, *others = ask(bench, prompt(), None)
    whole = [*prompt()[-KEY_TOKENS:], *output]
    place = whole.index(first[0])
    assert first == whole[place : place + HINT_TOKENS]
    assert len(first) > 25, "it is found by the end of the prompt, or a token or two later"
    assert not others, "one hint does for the whole output"


def test_texts_of_other_namespaces_are_never_hints() -> None:
    """Drafts, and so their metrics, are the same whether another namespace has produced the text or not."""
    told = []
    for others in (False, True):
        bench = drafting()
        if others:
            for seed in (5, 5, 6):
                ask(bench, prompt(), "theirs", seed)
        before = bench.scheduler.log.counts.draft_tokens, bench.scheduler.log.counts.accepted_tokens
        assert ask(bench, prompt(), "ours") == []
        after = bench.scheduler.log.counts.draft_tokens, bench.scheduler.log.counts.accepted_tokens
        told.append((after[0] - before[0], after[1] - before[1]))
    assert told[0] == told[1]
    assert ask(bench, prompt(), "theirs"), "it is there for those whose it is"


def test_the_planted_fault_of_one_namespace_for_all_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    add = RecentOutputs.add
    monkeypatch.setattr(RecentOutputs, "add", lambda self, namespace, tokens: add(self, "ours", tokens))
    bench = drafting()
    ask(bench, prompt(), "theirs")
    assert ask(bench, prompt(), "ours")


def test_a_bounded_number_of_namespaces_is_kept() -> None:
    bench = drafting()
    recent = bench.scheduler._recent
    assert recent is not None
    for number in range(MAX_NAMESPACES + 5):
        recent.add(f"tenant {number}", integers([1, 2, 3, 4, 5, 6]))
        recent.add("busy", integers([1, 2, 3, 4, 5, 6]))
    assert len(recent) == MAX_NAMESPACES
    assert {"busy", f"tenant {MAX_NAMESPACES + 4}"} <= set(recent._of)
    assert "tenant 0" not in recent._of


def test_failed_outputs_give_no_hints_and_a_flush_forgets_the_others() -> None:
    bench = drafting()
    request = bench.add(prompt(), sampling=SamplingParams(max_new_tokens=30, seed=5, ignore_eos=True))
    for _ in range(6):
        bench.scheduler.step()
    bench.scheduler.abort(request)
    bench.run()
    assert ask(bench, prompt(), None) == []
    assert bench.scheduler.flush_cache()
    assert ask(bench, prompt(), None) == []
    assert ask(bench, prompt(), None)


def test_an_engine_without_drafts_keeps_no_outputs() -> None:
    assert Bench(max_samples=1).scheduler._recent is None
