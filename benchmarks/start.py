"""What one waits for: the first token of `generate` and of `chat`, and a server that takes requests.

    python benchmarks/start.py [--turns 3] [--port 30119] [--json FILE]

From the command to the first character of the embedded model's answer, and to the line `Ready after`; wall time and
processor time of all processes, medians. What was compiled before is in the user's cache: a first turn, which is not
counted, sees to that.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import report

COMMAND = [sys.executable, "-m", "sglang_jax"]
QUESTION = "What is the capital of France?"
GENERATE = [*COMMAND, "generate", "--max-new-tokens", "1", QUESTION]
CHAT = [*COMMAND, "chat", "--max-new-tokens", "1"]
SERVE = [*COMMAND, "serve", "--port"]


def turn(command: list[str]) -> tuple[float, float]:
    """Seconds until the command, which may read a question, prints something, and of the processors until it has ended,
    as it is told to then. Raises `RuntimeError` if it prints nothing."""
    before, start = os.times(), time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if command == CHAT:
            process.stdin.write(f"{QUESTION}\n")
        process.stdin.close()
        said = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    if not said:
        raise RuntimeError(f"{' '.join(command)} said nothing: run it by itself to see why")
    after = os.times()
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--port", default="30119", help="of the server")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    commands = {
        "first token of generate": GENERATE,
        "first token of chat": CHAT,
        "server ready": [*SERVE, options.port],
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(options.turns + 1):
        for name, command in commands.items():
            found = turn(command)
            if number:
                taken[name].append(found)
    rows = [
        {
            "what": name,
            "s": statistics.median(wall for wall, _ in turns),
            "most s": max(wall for wall, _ in turns),
            "processor s": statistics.median(used for _, used in turns),
        }
        for name, turns in taken.items()
    ]
    report("Starting with a warm cache", rows, options.json)


if __name__ == "__main__":
    main()
