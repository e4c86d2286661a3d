"""`python -m torch_backend.follower FD`: one tensor-parallel rank, which receives orders over a connection. It ends
when the connection closes, so it cannot outlive rank 0's process."""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from sglang_jax import logs
from sglang_jax.checkpoint import open_served
from sglang_jax.runner.group import ORDERS, GiveUp, Leave, Order, follow
from sglang_jax.runner.processes import die_with_parent, write_stacks_on_signal
from sglang_jax.runner.rank_beats import BEAT_EVERY_SECONDS, Progress
from sglang_jax.runner.wire import FrameError
from torch_backend.devices import select_device
from torch_backend.followers import ASSIGNMENTS, READY
from torch_backend.loading import load_rank
from torch_backend.process_group import join, leave

logger = logging.getLogger(__name__)


def main(orders: Connection) -> None:
    # A terminal sends interrupts to the whole process group; rank 0's parent handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write_stacks_on_signal()
    die_with_parent()
    assignment = ASSIGNMENTS.decode(orders.recv_bytes())
    inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(orders, inbox), name="orders", daemon=True).start()
    logs.configure(assignment.log_level, as_json=assignment.json_logs, process=f"rank {assignment.rank}")
    config = assignment.engine_config()
    checkpoint = open_served(config)
    device = select_device(config.device, assignment.rank)
    orders.send_bytes(READY)
    progress = Progress()
    threading.Thread(target=_send_beats, args=(orders, progress), name="beats", daemon=True).start()
    parallel = join(
        assignment.rank,
        assignment.size,
        Path(assignment.meeting_point),
        device,
        custom_all_reduce=not config.disable_custom_all_reduce,
        in_order=config.batch_invariant,
    )
    runner = load_rank(config, checkpoint, parallel)
    follow(runner, inbox.get, progress)
    leave()


def _send_beats(orders: Connection, progress: Progress) -> None:
    """Sends this rank's progress until rank 0 is gone, which `_receive` notices too."""
    with suppress(OSError):
        while True:
            orders.send_bytes(progress.beat())
            time.sleep(BEAT_EVERY_SECONDS)


def _receive(orders: Connection, inbox: queue.SimpleQueue[Order]) -> None:
    """Receives orders. Exiting the process is the only way out of a collective that waits for a dead rank 0."""
    while True:
        try:
            order = ORDERS.decode(orders.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(1)
        except FrameError as error:
            logger.error("rank 0 sent %s; this process cannot continue", error)
            os._exit(1)
        assert not isinstance(order, GiveUp), "rank 0 ends its own children by closing their connection"
        inbox.put(order)
        if isinstance(order, Leave):
            return


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
