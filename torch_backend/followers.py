"""Starts a tensor-parallel group: this process is rank 0, whose runner the scheduler uses; the others are processes on
the same machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from sglang_jax import logs
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import Checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.runner.assembly import open_models
from sglang_jax.runner.determinism import shards_of
from sglang_jax.runner.group import ORDERS, GroupRunner, Leave, Order
from sglang_jax.runner.rank_beats import NoteBeat, steps_in
from sglang_jax.runner.wire import Codec
from torch_backend.building import refuse_orbax
from torch_backend.devices import select_device
from torch_backend.layers.shard import ModelShard
from torch_backend.loading import load_rank
from torch_backend.process_group import join, leave

_SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """The task of a follower. `config`: `EngineConfig` as JSON."""

    config: str
    rank: int
    size: int
    meeting_point: str
    log_level: int
    json_logs: bool

    def engine_config(self) -> EngineConfig:
        return EngineConfig.model_validate_json(self.config)


ASSIGNMENTS = Codec(Assignment)
READY = b"ready"
"""A follower sends this once it has opened the checkpoint and is about to join the group."""


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    orders: Connection


class LocalFollowers:
    """`Followers` on this machine: starts one process for each rank from 1. If one ends unexpectedly, `check` raises.
    They end with this process, however it ends, because the connection that they read from closes."""

    def __init__(self, config: EngineConfig, log_level: int) -> None:
        self._on_loss: Callable[[], None] = _do_nothing
        self._note: NoteBeat = _ignore_beat
        self._listeners: list[threading.Thread] = []
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-jax-ranks-", ignore_cleanup_errors=True)
        self.meeting_point = Path(self._folder.name) / "meeting-point"
        self._lost: str | None = None
        self._leaving = False
        self._followers = [self._start(rank) for rank in range(1, config.tp_size)]
        options = config.model_dump_json(include=set(EngineConfig.model_fields))
        for follower in self._followers:
            assignment = Assignment(
                options, follower.rank, config.tp_size, str(self.meeting_point), log_level, logs.writes_json()
            )
            follower.orders.send_bytes(ASSIGNMENTS.encode(assignment))
            watch = threading.Thread(target=self._watch, args=(follower,), name="follower-watch", daemon=True)
            watch.start()

    def on_loss(self, action: Callable[[], None]) -> None:
        """Sets the `action` that is called, on another thread, if a follower ends unexpectedly."""
        self._on_loss = action

    def announce(self, note: NoteBeat) -> None:
        self._note = note

    def wait_ready(self) -> None:
        """Blocks until every follower has opened the checkpoint and is about to join the group. Raises `RuntimeError`
        if one has ended."""
        for follower in self._followers:
            while not follower.orders.poll(0.1):
                self.check()
            try:
                follower.orders.recv_bytes()
            except EOFError:
                raise RuntimeError(_describe_end(follower)) from None
        self._listeners = [
            threading.Thread(target=self._listen, args=(follower,), name="follower-beats", daemon=True)
            for follower in self._followers
        ]
        for listener in self._listeners:
            listener.start()

    def send(self, order: Order) -> None:
        self.check()
        data = ORDERS.encode(order)
        for follower in self._followers:
            follower.orders.send_bytes(data)

    def check(self) -> None:
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def close(self) -> None:
        """Ends the followers, by force after a timeout."""
        self._leaving = True
        for follower in self._followers:
            with suppress(BrokenPipeError):  # it has already ended
                follower.orders.send_bytes(ORDERS.encode(Leave()))
        for follower in self._followers:
            try:
                follower.process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                follower.process.kill()
                follower.process.wait()
        for listener in self._listeners:
            listener.join()  # all data is read, so no connection is closed under its reader
        for follower in self._followers:
            follower.orders.close()
        self._folder.cleanup()

    def _start(self, rank: int) -> _Follower:
        mine, theirs = Pipe()
        command = [sys.executable, "-m", "torch_backend.follower", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        return _Follower(rank, process, mine)

    def _listen(self, follower: _Follower) -> None:
        with suppress(EOFError, OSError):
            while True:
                steps = steps_in(follower.orders.recv_bytes())
                if steps is not None:
                    self._note(follower.rank, steps)

    def _watch(self, follower: _Follower) -> None:
        """Notices a follower that ends unexpectedly, even while other threads wait."""
        end = _describe_end(follower)
        if not self._leaving:
            self._lost = end
            self._on_loss()


def _describe_end(follower: _Follower) -> str:
    status = follower.process.wait()
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return f"the process of tensor-parallel rank {follower.rank} {how}; for the reason see its log lines"


def _do_nothing() -> None:
    pass


def _ignore_beat(rank: int, steps: int) -> None:
    pass


class TorchGroupRunner(GroupRunner):
    """A `GroupRunner` that leaves the process group when it is closed."""

    def close(self) -> None:
        try:
            super().close()
        finally:
            leave()


def launch_group(config: EngineConfig, checkpoint: Checkpoint) -> TorchGroupRunner:
    """Returns a runner over `config.tp_size` devices, each with its own process; the first is this one. Raises
    `ConfigError`, `CheckpointError` as for one device, and `RuntimeError` if another process fails."""
    select_device(config.device, config.tp_size - 1)
    _refuse(config, checkpoint)
    followers = LocalFollowers(config, logs.own_level())
    with ExitStack() as undo:
        undo.callback(followers.close)
        followers.wait_ready()
        parallel = join(
            0,
            config.tp_size,
            followers.meeting_point,
            select_device(config.device),
            custom_all_reduce=not config.disable_custom_all_reduce,
            in_order=config.batch_invariant,
        )
        undo.callback(leave)
        followers.on_loss(parallel.abort)
        runner = load_rank(config, checkpoint, parallel)
        undo.pop_all()
    return TorchGroupRunner(runner, followers)


def _refuse(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises `ConfigError` early for options that every rank would refuse, each with a traceback."""
    refuse_orbax(checkpoint)
    models = open_models(config, checkpoint)
    shards_of(config, models.main.config)
    for model in models.all:
        ModelShard.of(model.config, 0, Parallelism.of(config))
