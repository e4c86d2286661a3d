"""Conversations of many turns: the host's work for a turn does not grow with the turns before it, since their nodes of
the prefix tree are joined into one, and the join loses nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from helpers.caches import states_of
from helpers.scheduling import Bench, Sees
from helpers.simulation import STATE

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn

KINDS: list[tuple[Sees, ...]] = [(None,), (6,), (None, 6), (None, STATE), (STATE,), (None, STATE, 6)]
TURNS, SLOTS, PERIOD = 24, 8, 6
"""Turns repeat after `PERIOD`, in the tokens they send and ask for."""


def bench_of(sees: tuple[Sees, ...], slots: int = SLOTS) -> Bench:
    pools = [(one, slots if one is STATE else 400) for one in sees]
    (first, pages), *more = pools
    return Bench(pages, 4, window=first, more=tuple(more), context=400, least_gain=4)


def converse(
    bench: Bench, turns: int, *, in_session: bool, start: list[int], seed: int = 5, name: str = "s"
) -> Iterator[list[int]]:
    """Runs a conversation one turn at a time; returns its tokens after each."""
    if in_session:
        bench.scheduler.sessions.open(OpenSession(name, "me", True, None))
    history = start
    for turn in range(turns):
        new = [1 + (7 * turn + seed) % 30, 2, 3][: 1 + turn % 3]
        sent = [*start, *new] if turn == 0 else new
        asked = {"session": SessionTurn(name, "me", str(turn), None), "sent": sent} if in_session else {}
        sampling = SamplingParams(max_new_tokens=3 + turn % 3, seed=seed, ignore_eos=True)
        number = bench.add([*history, *new], sampling=sampling, **asked)
        bench.run()
        history = [*bench.prompts[number], *bench.channel.output(number)]
        yield history


def cached(bench: Bench, tokens: list[int]) -> int:
    return bench.scheduler.cache.peek(np.array(tokens, np.int32).tobytes(), len(tokens), None)


class Calls:
    """Counts calls of functions of scheduler and cache: a measure of host work that does not depend on the machine's
    load."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            folder = Path(frame.f_code.co_filename).parent.name
            self.count += folder in ("scheduler", "mem_cache") and "sglang_jax" in frame.f_code.co_filename


@pytest.mark.parametrize("in_session", [True, False])
@pytest.mark.parametrize("sees", KINDS, ids=str)
def test_a_turn_costs_the_host_as_much_as_an_earlier_one(sees: tuple[Sees, ...], in_session: bool) -> None:
    """In function calls, and in the nodes that a turn's row follows: one, and one for each state that is kept."""
    bench, calls, nodes = bench_of(sees), [], []
    turns = converse(bench, TURNS, in_session=in_session, start=[])
    while True:
        with Calls() as counted:
            if next(turns, None) is None:
                break
        calls.append(counted.count)
        nodes.append(bench.scheduler.cache.tree.num_nodes)
        check_everything(bench.scheduler.cache)
    assert max(nodes) <= 1 + (SLOTS if STATE in sees else 0), nodes
    early, late = sum(calls[PERIOD : 2 * PERIOD]), sum(calls[-PERIOD:])
    assert late <= 1.15 * early, calls
    bench.check_outputs()


@pytest.mark.parametrize("in_session", [True, False])
def test_states_of_older_turns_are_evicted_for_those_of_the_newest(in_session: bool) -> None:
    """Four conversations alternate, and after some turns their states fill all slots: each turn computes its new
    tokens, the output before it, less than a page, and at most the tokens that a state is worth, both in a session and
    as a whole prompt."""
    bench = Bench(400, 4, more=((STATE, 16),), context=400, least_gain=8)
    talks = [
        converse(bench, TURNS, in_session=in_session, start=[seed], seed=seed, name=f"s{seed}") for seed in range(4)
    ]
    for _ in range(TURNS):
        for talk in talks:
            next(talk)
    computed = [len(prompt) - bench.channel.cached[number] for number, prompt in bench.prompts.items()]
    assert max(computed) <= 3 + 5 + 4 + 8, computed
    states = states_of(bench.scheduler.cache)
    assert states is not None
    assert states.num_evicted > 2 * TURNS, "slots were free all the time"
    bench.check_outputs()


@pytest.mark.parametrize("sees", KINDS, ids=str)
def test_joined_nodes_lose_no_place_to_resume(sees: tuple[Sees, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached length of every prefix is the same as without joining: three conversations, two of which diverge in
    the middle of a turn of the first."""

    def of(join: bool) -> list[int]:
        bench = bench_of(sees)
        if not join:
            monkeypatch.setattr(bench.scheduler.cache.tree, "_join", lambda upper: False)
        *_, first = converse(bench, 12, in_session=True, start=[9, 9, 8, 7])
        *_, second = converse(bench, 6, in_session=False, start=first[:21], seed=6)
        *_, third = converse(bench, 6, in_session=False, start=[*first[:33], 1], seed=7)
        check_everything(bench.scheduler.cache)
        bench.check_outputs()
        nodes.append(bench.scheduler.cache.tree.num_nodes)
        return [cached(bench, one[:end]) for one in (first, second, third) for end in range(len(one) + 1)]

    nodes: list[int] = []
    assert of(join=True) == of(join=False)
    assert nodes[0] < nodes[1], nodes
