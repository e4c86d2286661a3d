"""A server under every kind of request and fault at once, for half an hour.

    python benchmarks/soak_server.py [--minutes 30] [--clients 32] [--kill-every 120] [--stop-every 300] [--json FILE]

A server with two replicas of a small random model has clients that send every kind of valid and invalid request
(`soak_clients.py`), a batch in the background that restarts when it has ended, and a saboteur that kills the core of
one replica and sometimes stops it (`soak_watch.py`). The run passes, with exit status 0, if

- every failure is explained by a fault: a request that fails with `replica_lost` or `engine_dead` must have run while a
  core was lost, and every answer must be the one that the same request had the first time;
- the memory of every process is flat: over the last two thirds of the run no minute's median is more than 2 % above
  that of another; cores that were started again in the second half of the run have at most 2 % more than those of the
  first, at the same age and by their medians;
- no state is left at the end: no request runs or waits, no KV page is in use, pages add up, the prefix cache empties;
  open files and threads are as many as at the start, except for idle workers; the server drains with status 0 and
  leaves no process behind.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from machine import format_table, report
from malformed import malformed_requests
from soak_clients import CLIENT_TIMEOUT, Client, Oracle, Outcome
from soak_watch import ADMIN_KEY, Fault, Saboteur, Samples, Scales, ask, cores

FLAT = 0.02
"""How much more memory one minute may have than another."""

IDLE_WORKERS = 16
"""Threads that a server may gain once it has worked."""

LOST = ("503 replica_lost", "500 replica_lost", "500 engine_dead", "404 session_not_found")
"""Errors that requests of a lost core may get."""

OPENS_BY_ID = "bad_input"
"""The operation that opens sessions with a chosen id, which may belong to the replica that is down: 503 until it is
back. All other operations go to a replica that serves."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Tiny, with the demo model's vocabulary: the engine is what runs."""

OPTIONS = (
    *("--tokenizer-path", "demo", "--load-format", "dummy", "--device", "cpu", "--dtype", "float32"),
    *("--dp-size", "2", "--context-length", "1024", "--max-running-requests", "16", "--max-total-tokens", "8192"),
    *("--chunked-prefill-size", "128", "--client-timeout", str(CLIENT_TIMEOUT), "--watchdog-timeout", "15"),
    *("--admin-api-key", ADMIN_KEY, "--served-model-name", "soak", "--max-engine-restarts", "100"),
)


@contextmanager
def running_server(folder: Path) -> Iterator[tuple[int, psutil.Process, subprocess.Popen[bytes]]]:
    """The port of a ready server, and its process. It is killed if it still runs at the end."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang_jax.launch_server", "--model-path", str(folder), "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as errors:
        server = subprocess.Popen([*command, *OPTIONS], stdout=errors, stderr=errors)
    try:
        while b"Ready after" not in log.read_bytes():
            if server.poll() is not None:
                raise SystemExit(f"the server ended: {log.read_text()}")
            time.sleep(0.2)
        yield port, psutil.Process(server.pid), server
    finally:
        if server.poll() is None:
            for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
                process.kill()
        server.wait()


class Crowd:
    """The clients, each in a thread, and the batch."""

    def __init__(self, port: int, count: int, seed: int) -> None:
        description = _openapi(port)
        malformed, lock = malformed_requests(description, 10**9, seed), threading.Lock()
        oracle = Oracle()
        self._over = threading.Event()
        self.outcomes: list[Outcome] = []
        clients = [Client(port, seed * 1000 + number, oracle, malformed, lock) for number in range(count + 1)]
        self._threads = [threading.Thread(target=self._use, args=(client,), daemon=True) for client in clients[1:]]
        self._threads.append(threading.Thread(target=self._batches, args=(clients[0],), daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Lets each finish its operation; returns all outcomes."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.outcomes

    def _use(self, client: Client) -> None:
        while not self._over.is_set():
            self.outcomes.append(client.step())

    def _batches(self, client: Client) -> None:
        while not self._over.is_set():
            self.outcomes.append(client.do(Client.batch))


def _openapi(port: int) -> Any:
    return ask(port, "/openapi.json")


def unexplained(outcomes: list[Outcome], faults: list[Fault]) -> list[Outcome]:
    """Failures without a known reason."""

    def explained(outcome: Outcome) -> bool:
        when = outcome.begin, outcome.end
        if outcome.name == OPENS_BY_ID and outcome.error == "503 replica_lost":
            return any(fault.keeps_out(*when) for fault in faults)
        return outcome.error in LOST and any(fault.explains(*when) for fault in faults)

    return [outcome for outcome in outcomes if outcome.error and not explained(outcome)]


def tally(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The outcomes of each operation, counted."""
    rows = []
    for name in sorted({outcome.name for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.name == name]
        errors = Counter(outcome.error[:60] for outcome in mine if outcome.error)
        seconds = sorted(outcome.end - outcome.begin for outcome in mine)
        rows.append(
            {
                "operation": name,
                "done": len(mine),
                "failed": errors.total(),
                "median s": statistics.median(seconds),
                "worst s": seconds[-1],
                "how": ", ".join(f"{error} ({count})" for error, count in errors.most_common(3)),
            }
        )
    return rows


def memory_rows(processes: dict[int, Samples], since: float, until: float) -> list[dict[str, Any]]:
    """The memory of each process that ran throughout, by minutes; and of later cores, at the same age."""
    rows = []
    steady = [samples for samples in processes.values() if samples.born < since and samples.times[-1] > until - 5.0]
    for samples in steady:
        rows.append(_flatness(samples.name, samples.minutes(since)))
    # later cores in the half minute after their first: when the programs have been loaded, and before a fault
    later = [
        one.minutes(one.born + 60.0, 30.0)[:1] for one in processes.values() if one.name == "core" and one not in steady
    ]
    weights = [first for found in later for first in found]
    half = len(weights) // 2
    if half:
        rows.append(_flatness(f"{len(weights)} later cores", weights))
        rows[-1]["spread"] = statistics.median(weights[half:]) / statistics.median(weights[:half]) - 1
    return rows


def by_minutes(processes: dict[int, Samples], begin: float, end: float) -> Iterator[tuple[str, list[float]]]:
    """The memory of each process that ran throughout, by minutes."""
    for samples in processes.values():
        if samples.born < begin + 60.0 and samples.times[-1] > end - 5.0:
            yield samples.name, samples.minutes(begin, until=end)


def _flatness(name: str, minutes: list[float]) -> dict[str, Any]:
    if not minutes:
        return {"process": name, "spread": 0.0}
    return {
        "process": name,
        "first MiB": minutes[0],
        "least MiB": min(minutes),
        "most MiB": max(minutes),
        "last MiB": minutes[-1],
        "spread": max(minutes) / min(minutes) - 1,
    }


def what_is_left(port: int, server: psutil.Process, process: subprocess.Popen[bytes], handles: int) -> list[str]:
    """Leftovers once there are no requests; ends the server. `handles`: its open files and threads at the start."""
    wrong = []
    time.sleep(CLIENT_TIMEOUT + 10)
    if (now := server.num_fds() + server.num_threads()) > handles + IDLE_WORKERS:
        wrong.append(f"{now} files and threads are open; at the start there were {handles}")
    for load in ask(port, "/v1/loads")["loads"]:
        wrong += [
            f"replica {load['dp_rank']}: {name} is {load[name]}"
            for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "in_flight")
            if load[name]
        ]
    for state in ask(port, "/server_info")["internal_states"]:
        if state["num_memory_faults"]:
            wrong.append(f"replica {state['replica']}: pages did not add up {state['num_memory_faults']} times")
        if state["compiles_after_warm_up"]:
            wrong.append(f"replica {state['replica']}: {state['compiles_after_warm_up']} programs compiled late")
    if not ask(port, "/flush_cache", "POST")["success"]:
        wrong.append("the prefix cache cannot be cleared")
    everybody = [server, *server.children(recursive=True)]
    process.terminate()
    if (status := process.wait(120)) != 0:
        wrong.append(f"the server ended with status {status}")
    time.sleep(1)
    wrong += [f"process {one.pid} is left" for one in everybody if one.is_running() and one.status() != "zombie"]
    return wrong


def soak(options: argparse.Namespace, folder: Path) -> bool:
    """The whole run; returns whether it passed."""
    with running_server(folder) as (port, server, process):
        handles = server.num_fds() + server.num_threads()
        scales = Scales(server)
        spared = cores(server)[-1]
        crowd = Crowd(port, options.clients, options.seed)
        saboteur = Saboteur(port, spared, server, options.kill_every, options.stop_every)
        begin = time.monotonic()
        while time.monotonic() - begin < options.minutes * 60 and process.poll() is None and not saboteur.trouble:
            time.sleep(1.0)
        end = time.monotonic()
        saboteur.stop()
        outcomes = crowd.stop()
        scales.stop()
        wrong = [saboteur.trouble] if saboteur.trouble else []
        wrong += ["the server ended"] if process.poll() is not None else what_is_left(port, server, process, handles)
    memory = memory_rows(scales.processes, begin + (end - begin) / 3, end)
    errors = unexplained(outcomes, saboteur.faults)
    wrong += [f"{len(errors)} errors that nothing explains"] if errors else []
    wrong += [f"memory of {row['process']} varies by {row['spread']:.1%}" for row in memory if row["spread"] > FLAT]
    print(
        f"seed {options.seed}, {(end - begin) / 60:.1f} minutes, {options.clients} clients, {len(outcomes)} operations"
    )
    report("What clients did", tally(outcomes), options.json)
    print("Faults of cores, seconds\n" + format_table([_times(fault) for fault in saboteur.faults]))
    print("Memory over the last two thirds\n" + format_table(memory))
    for name, minutes in by_minutes(scales.processes, begin, end):
        print(f"MiB of {name}, by minutes: {' '.join(f'{size:.1f}' for size in minutes)}")
    for outcome in errors[:20]:
        print(f"unexplained: {outcome} ({outcome.begin - begin:.1f} s after the start)")
    print("\n".join(["FAILED:", *wrong]) if wrong else "PASSED")
    return not wrong


def _times(fault: Fault) -> dict[str, Any]:
    def since(when: float | None) -> float | str:
        return "" if when is None else when - fault.at

    return {"what": fault.what, "noticed": since(fault.noticed), "serves again": since(fault.back)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--stop-every", type=float, default=300.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--keep-log", type=Path, default=None, help="a file for the server's log")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            passed = soak(options, Path(folder))
        finally:
            log = Path(folder) / "server.log"
            if options.keep_log is not None and log.exists():
                options.keep_log.write_bytes(log.read_bytes())
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
