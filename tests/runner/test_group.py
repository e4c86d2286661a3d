"""Rank 0's runner and its followers: the same plans, in the same order, everywhere."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
from helpers.plan_driver import DECODE, PlanDriver
from helpers.stand_in_model import VOCAB, dense_logits, random_weights
from helpers.stand_in_torch import stand_in_runner

from sglang_jax.runner.group import GroupRunner, Leave, Order, WarmUp, follow
from sglang_jax.runner.rank_beats import NoteBeat, Progress

WEIGHTS = random_weights()
PROMPT = np.random.default_rng(3).integers(0, VOCAB, 9).tolist()


class Threads:
    """`Followers` in threads, each with its own runner."""

    def __init__(self, count: int) -> None:
        self.runners = [stand_in_runner(WEIGHTS) for _ in range(count)]
        self.inboxes: list[queue.SimpleQueue[Order]] = [queue.SimpleQueue() for _ in self.runners]
        self.sent: list[Order] = []
        self.lost: str | None = None
        self.progress = [Progress() for _ in self.runners]
        self._threads = [
            threading.Thread(target=follow, args=(runner, inbox.get, progress))
            for runner, inbox, progress in zip(self.runners, self.inboxes, self.progress, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, order: Order) -> None:
        self.check()
        self.sent.append(order)
        for inbox in self.inboxes:
            inbox.put(order)

    def announce(self, note: NoteBeat) -> None:
        """No one listens to them."""

    def check(self) -> None:
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(Leave())
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def test_followers_run_what_rank_0_runs() -> None:
    followers = Threads(2)
    runner = GroupRunner(stand_in_runner(WEIGHTS), followers)
    runner.warm_up(lambda done, total, what: None)
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    output = driver.generate(request, 8, chunk=4)
    runner.close()
    tokens = list(PROMPT)
    for token in output:
        assert token == int(dense_logits(WEIGHTS, tokens)[-1].argmax())
        tokens.append(token)
    assert followers.sent[0] == WarmUp()
    assert len(followers.sent) == 1 + 3 + 7
    last_tokens = [follower._rows.last_tokens[request.row].item() for follower in followers.runners]
    assert last_tokens == [output[-1]] * 2
    assert [progress.steps for progress in followers.progress] == [3 + 7] * 2


def test_a_plan_that_rank_0_refuses_reaches_no_follower() -> None:
    followers = Threads(1)
    runner = GroupRunner(stand_in_runner(WEIGHTS), followers)
    driver = PlanDriver(runner)
    with pytest.raises(ValueError, match="a step of 40 tokens"):
        driver.launch([(driver.admit([1] * 40), 40)])
    assert followers.sent == []
    runner.close()


def test_followers_end_although_closing_rank_0_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    followers = Threads(1)
    own = stand_in_runner(WEIGHTS)
    runner = GroupRunner(own, followers)

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(own, "close", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        runner.close()
    assert not any(thread.is_alive() for thread in followers._threads)


def test_a_step_without_one_of_the_ranks_is_an_error() -> None:
    followers = Threads(1)
    runner = GroupRunner(stand_in_runner(WEIGHTS), followers)
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    driver.step([(request, 9)])
    launched = driver.launch([(request, DECODE)])
    followers.lost = "rank 1 is lost"
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        launched.finish()
    followers.lost = None
    runner.close()
