"""What a run says as long as it has no engine: a cluster may grow, so it waits, but not without a word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray.exceptions import RayError

from sglang_jax.batch.ray.attempts import SharedAttempts

SECONDS_BETWEEN = 60.0


@contextmanager
def telling_what_is_awaited(
    attempts: SharedAttempts,
    needs: Mapping[str, float],
    hosts: int,
    tell: Callable[[str], None],
    seconds_between: float = SECONDS_BETWEEN,
) -> Iterator[None]:
    """Around a run: tells now and then what it waits for, until its first engine has started, and when no engine has
    room any more, as nodes were lost.

    **Arguments:** `attempts`: those of the run; `needs`, `hosts`: what an engine takes of each of so many nodes.
    """
    if nodes_with(needs) < hosts:
        tell(f"{_lack(needs, hosts)}: waiting for {'one' if hosts == 1 else 'them'}.")
    over = threading.Event()
    begin = time.monotonic()

    def watch() -> None:
        while not over.wait(seconds_between):
            try:
                had_an_engine = attempts.finished() > 0
                short = nodes_with(needs) < hosts
            except RayError:  # the run is about to meet it too
                return
            since = f"after {time.monotonic() - begin:.0f} s"
            if short:
                tell(f"{'Again' if had_an_engine else 'Still'} without an engine {since}. {_lack(needs, hosts)}.")
            elif not had_an_engine:
                tell(f"Still without an engine {since}. It is starting, or its nodes are in use by others.")

    watcher = threading.Thread(target=watch, name="sglang-jax-waiting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def nodes_with(needs: Mapping[str, float]) -> int:
    """How many nodes of the cluster are large enough, whoever uses them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes)


def _lack(needs: Mapping[str, float], hosts: int) -> str:
    told = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
    if hosts == 1:
        return f"No node of the cluster has {told}, as an engine needs"
    return f"An engine needs {hosts} nodes with {told}, and the cluster has {nodes_with(needs)}"
