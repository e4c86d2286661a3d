"""Conversations of many turns: what the host does for a turn does not grow with those before it, since their nodes of
the prefix tree become one; and nothing is lost by that."""

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
from sglang_jax.scheduler.messages import OpenSession, SessionTurn

KINDS: list[tuple[Sees, ...]] = [(None,), (6,), (None, 6), (None, STATE), (STATE,), (None, STATE, 6)]
TURNS, SLOTS, PERIOD = 24, 8, 6
"""Turns repeat themselves after `PERIOD`, in what they send and ask for."""


def bench_of(sees: tuple[Sees, ...], slots: int = SLOTS) -> Bench:
    pools = [(one, slots if one is STATE else 400) for one in sees]
    (first, pages), *more = pools
    return Bench(pages, 4, window=first, more=tuple(more), context=400, least_gain=4)


def converse(
    bench: Bench, turns: int, *, in_session: bool, start: list[int], seed: int = 5, name: str = "s"
) -> Iterator[list[int]]:
    """A conversation, one turn at a time: its tokens after each."""
    if in_session:
        bench.scheduler.sessions.open(OpenSession(0, name, "me", True, None))
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
    """Counts calls of functions of scheduler and cache: what a turn costs the host, however busy the machine."""

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
def test_a_turn_costs_the_host_what_an_earlier_one_does(sees: tuple[Sees, ...], in_session: bool) -> None:
    """In calls of functions, and the nodes that a turn's row goes along: one, and one for each state that is kept."""
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
def test_states_of_turns_that_went_on_make_room_for_those_of_the_newest(in_session: bool) -> None:
    """Four conversations in turn, whose states fill all slots after some turns: each turn computes what is new, the
    output before it, and less than a page and what a state is worth, in a session or as a whole prompt."""
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
def test_no_place_to_start_is_lost(sees: tuple[Sees, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached of every beginning is what it is where no nodes are joined: three conversations, two of which part
    amid a turn of the first."""

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
