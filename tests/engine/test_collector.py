"""The garbage collector runs rarely while a model is loaded, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from helpers import heap

from sglang_jax.config import EngineConfig
from sglang_jax.engine.collector import RARE_THRESHOLDS, frozen_heap, rare_collections
from sglang_jax.engine.core import run_core

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_two_blocks_may_end_in_either_order() -> None:
    for first, second in ((0, 1), (1, 0)):
        stacks = [ExitStack(), ExitStack()]
        for stack in stacks:
            stack.enter_context(rare_collections())
        assert gc.get_threshold() == RARE_THRESHOLDS
        stacks[first].close()
        assert gc.get_threshold() == RARE_THRESHOLDS
        stacks[second].close()
        assert gc.get_threshold() == USUAL


def test_a_collector_switched_off_or_changed_meanwhile_keeps_its_setting() -> None:
    gc.set_threshold(0)
    with rare_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(*USUAL)
    with rare_collections():
        gc.set_threshold(900, 9, 9)
    assert gc.get_threshold() == (900, 9, 9)


@pytest.fixture
def with_freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector's own functions, which otherwise do nothing in tests."""
    monkeypatch.setattr(gc, "freeze", heap.freeze)
    monkeypatch.setattr(gc, "unfreeze", heap.unfreeze)
    yield
    heap.freeze()


@pytest.mark.usefixtures("with_freezing")
def test_objects_of_the_load_are_not_scanned_while_a_process_serves() -> None:
    kept: list[object] = [[]]
    before = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > before
        assert not any(kept is one for one in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert any(kept is one for one in gc.get_objects())


def test_the_heap_of_the_tests_stays_frozen_after_a_server_that_ends_here() -> None:
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0


class Channel:
    """Ignores what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def test_the_block_is_open_while_a_core_loads_and_ends_when_that_fails() -> None:
    seen: list[tuple[int, int, int]] = []

    def load(config: EngineConfig, channel: Any) -> Any:
        seen.append(gc.get_threshold())
        raise ValueError("no model")

    channel: Any = Channel()
    assert not run_core(EngineConfig(), channel, load)
    assert seen == [RARE_THRESHOLDS]
    assert gc.get_threshold() == USUAL
    assert len(channel.sent) == 1
