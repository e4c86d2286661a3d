"""The effect of killing or stopping one of a server's processes under load.

    python benchmarks/faults.py [SCENARIO ...] [--watchdog-timeout 10] [--users 6] [--model-path M] [--json FILE]

Starts a server for each scenario, has users send requests one after the other, sends one process a signal, and
continues until the server has served for some seconds again, or has ended. SIGKILL stands for crashes, SIGSTOP for
hangs; in "out of memory" the kernel kills the process (`memory_limit.py`). Figures are in seconds after the signal:

- `noticed`: until a client got an error, or `/readyz` was not 200, or `/v1/loads` said that an engine does not serve.
- `answered`: until a request sent after that was answered in full.
- `whole`: until all engines serve and the server says that it is ready.
- `ended`: until the server had ended, if it did; `status`: its exit status; `left`: its processes a second later.
- `ok`, `failed`: requests answered and failed since the signal; `codes`: the errors of the failed ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from machine import report
from memory_limit import out_of_memory, why_not

LOAD_SECONDS = 4.0
SERVED_SECONDS = 4.0
START_SECONDS = 400.0
PATIENCE_SECONDS = 300.0
TOKENS = 24


def children(pid: int) -> list[int]:
    """The child processes of this one, started on any of its threads."""
    found: list[int] = []
    for threads in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in threads.read_text().split()]
    return sorted(found)


def descendants(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants(child))]


def is_there(pid: int) -> bool:
    """Whether it runs: it has not ended and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def engines(pid: int) -> list[int]:
    """Engine processes of a server: the children that lead a process group."""
    return [child for child in children(pid) if os.getpgid(child) == child]


def front_end(pid: int) -> int:
    return pid


def engine(pid: int) -> int:
    return engines(pid)[0]


def rank(pid: int) -> int:
    """The last tensor-parallel rank of the engine."""
    return children(engine(pid))[-1]


@dataclass(frozen=True)
class Scenario:
    """`victim`: the server's process that gets `number`. `behind`: it is one of two servers behind a router
    (`--connect`), which gets the requests; `ranks`: this many processes of one machine share the model (torch);
    `nodes`: this many share it as if each were a machine (JAX), and the last one gets the signal; `goes_on`: seconds
    until it is continued, None for never; `no_memory`: the kernel kills it for lack of memory, instead of the
    signal."""

    name: str
    victim: Callable[[int], int]
    number: signal.Signals
    options: tuple[str, ...] = ()
    behind: bool = False
    ranks: bool = False
    nodes: bool = False
    goes_on: float | None = None
    no_memory: bool = False


FAULTS = [
    Scenario("engine killed", engine, signal.SIGKILL),
    Scenario("engine stopped", engine, signal.SIGSTOP),
    Scenario("replica killed", engine, signal.SIGKILL, ("--dp-size", "2")),
    Scenario("replica stopped", engine, signal.SIGSTOP, ("--dp-size", "2")),
    Scenario("rank killed", rank, signal.SIGKILL, ranks=True),
    Scenario("rank stopped", rank, signal.SIGSTOP, ranks=True),
    Scenario("server behind killed", front_end, signal.SIGKILL, behind=True),
    Scenario("server behind stopped", front_end, signal.SIGSTOP, behind=True),
    Scenario("engine behind stopped", engine, signal.SIGSTOP, behind=True),
    Scenario("front end killed", front_end, signal.SIGKILL),
    Scenario("front end stopped", front_end, signal.SIGSTOP, goes_on=30.0),
    Scenario("node killed", front_end, signal.SIGKILL, nodes=True),
    Scenario("node stopped", front_end, signal.SIGSTOP, nodes=True),
]


def for_lack_of_memory(scenario: Scenario) -> list[Scenario]:
    """The same, except that the kernel kills the victim."""
    if scenario.number != signal.SIGKILL:
        return []
    return [replace(scenario, name=scenario.name.replace("killed", "out of memory"), no_memory=True)]


SCENARIOS = [one for fault in FAULTS for one in (fault, *for_lack_of_memory(fault))]


class Server:
    """A server process; `log` is its output."""

    def __init__(self, options: list[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "sglang_jax.launch_server", "--port", "0", "--device", "cpu", *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.url = ""

    async def ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"^Ready after .* at (http://\S+?)\. ", self.log.read_text(), re.MULTILINE)
            if found is not None:
                self.url = found[1]
                return
            if self.process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        raise SystemExit(f"a server did not start:\n{self.log.read_text()}")

    def end(self) -> None:
        """Ends it and its descendants."""
        for pid in [*descendants(self.process.pid), self.process.pid] if self.process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Tally:
    """Observations at times of the monotonic clock.

    - `answers`: when each was requested and complete; `failures`: when, and with which error.
    - `not_whole`: when an engine did not serve, or the server did not answer or was not ready; `whole`: when all
      were well.
    """

    answers: list[tuple[float, float]] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)
    not_whole: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def times(self, begin: float) -> tuple[float | None, float | None, float | None]:
        """When a fault at `begin` was noticed, when a later request was answered, and when all was well."""
        noticed = _first([when for when, _ in self.failures] + self.not_whole, begin)
        if noticed is None:
            return None, None, None
        return (
            noticed,
            _first([end for asked, end in self.answers if asked > noticed], begin),
            _first(self.whole, noticed),
        )


def _first(times: list[float], after: float) -> float | None:
    return min((when for when in times if when > after), default=None)


async def use(http: httpx2.AsyncClient, number: int, tally: Tally, over: asyncio.Event) -> None:
    """One user, who sends the next request when the last one has ended, or some time after it has failed."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0.0}
    body = {"text": f"User {number} asks:", "sampling_params": sampling, "stream": number % 2 == 0}
    while not over.is_set():
        begin = time.monotonic()
        try:
            response = await http.post("/generate", json=body)
            text = response.text
            error = re.search(r'"code": ?"(\w+)"', text)
            if error is not None or f'"completion_tokens":{TOKENS}' not in text.replace(" ", ""):
                raise RuntimeError(error[1] if error else f"status {response.status_code}")
            tally.answers.append((begin, time.monotonic()))
        except (httpx2.TransportError, RuntimeError) as error:
            what = str(error) if isinstance(error, RuntimeError) else type(error).__name__
            tally.failures.append((time.monotonic(), what))
            await asyncio.sleep(0.1)


async def look(http: httpx2.AsyncClient, tally: Tally, over: asyncio.Event) -> None:
    """Polls readiness, as a load balancer does, and the state of the engines."""
    while not over.is_set():
        try:
            ready = (await http.get("/readyz", timeout=1.0)).status_code == 200
            loads = (await http.get("/v1/loads", timeout=1.0)).json()["loads"]
            whole = ready and all(load["state"] == "serving" for load in loads)
        except httpx2.TransportError:
            whole = False
        (tally.whole if whole else tally.not_whole).append(time.monotonic())
        await asyncio.sleep(0.05)


def options_of(scenario: Scenario, arguments: argparse.Namespace) -> list[str]:
    ranks = ["--backend", "torch", "--tp-size", str(arguments.ranks)] if scenario.ranks else []
    return [
        *ranks,
        *("--model-path", arguments.model_path, "--context-length", "512", "--max-running-requests", "4"),
        *("--chunked-prefill-size", "64", "--watchdog-timeout", str(arguments.watchdog_timeout), *scenario.options),
    ]


def start(scenario: Scenario, arguments: argparse.Namespace, folder: Path) -> list[Server]:
    """The servers of a scenario; where nodes share the model, requests go to the first."""
    options = options_of(scenario, arguments)
    if not scenario.nodes:
        return [Server(options, folder / f"server{number}.log") for number in range(2 if scenario.behind else 1)]
    address = f"127.0.0.1:{arguments.port}"
    shared = ["--nnodes", str(arguments.ranks), "--tp-size", str(arguments.ranks), "--dist-init-addr", address]
    return [
        Server([*options, *shared, "--node-rank", str(number)], folder / f"node{number}.log")
        for number in range(arguments.ranks)
    ]


async def run(scenario: Scenario, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    servers = start(scenario, arguments, folder)
    asked = servers[0]
    try:
        for server in servers[: 1 if scenario.nodes else None]:
            await server.ready()
        if scenario.behind:
            addresses = ",".join(server.url.removeprefix("http://") for server in servers)
            asked = Server(["--connect", addresses, "--model-path", arguments.model_path], folder / "router.log")
            await asked.ready()
        return await watch(scenario, arguments, [*servers, asked] if scenario.behind else servers, asked)
    finally:
        for server in {*servers, asked}:
            server.end()


async def watch(
    scenario: Scenario, arguments: argparse.Namespace, servers: list[Server], asked: Server
) -> dict[str, Any]:
    """The figures of one fault under load."""
    tally, over = Tally(), asyncio.Event()
    timeout = httpx2.Timeout(PATIENCE_SECONDS, connect=2.0)
    async with httpx2.AsyncClient(base_url=asked.url, timeout=timeout) as http, asyncio.TaskGroup() as tasks:
        for number in range(arguments.users):
            tasks.create_task(use(http, number, tally, over))
        tasks.create_task(look(http, tally, over))
        await asyncio.sleep(LOAD_SECONDS)
        victim = scenario.victim(servers[-1 if scenario.nodes else 0].process.pid)
        everybody = [one for server in servers for one in (server.process.pid, *descendants(server.process.pid))]
        begin = time.monotonic()
        with out_of_memory(victim) if scenario.no_memory else nullcontext():
            if not scenario.no_memory:
                os.kill(victim, scenario.number)
            if scenario.goes_on is not None:
                asyncio.get_running_loop().call_later(scenario.goes_on, os.kill, victim, signal.SIGCONT)
            ended = await until_over(scenario, tally, asked, begin)
        over.set()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_coro().__name__ == "use":  # requests that still wait
                task.cancel()
    row = figures(scenario, tally, begin, ended)
    if ended is not None:
        await asyncio.sleep(1.0)
        row |= {"status": asked.process.poll(), "left": sum(is_there(pid) for pid in everybody)}
    return row


async def until_over(scenario: Scenario, tally: Tally, asked: Server, begin: float) -> float | None:
    """Waits until the server has ended (then returns when), or has served for some time as well as it will."""
    while time.monotonic() - begin < PATIENCE_SECONDS:
        await asyncio.sleep(0.05)
        if asked.process.poll() is not None:
            return time.monotonic()
        _, answered, whole = tally.times(begin)
        last = answered if scenario.victim is front_end else whole
        if answered is not None and last is not None and time.monotonic() - max(answered, last) > SERVED_SECONDS:
            break
    return None


def figures(scenario: Scenario, tally: Tally, begin: float, ended: float | None) -> dict[str, Any]:
    noticed, answered, whole = tally.times(begin)
    failed = [what for when, what in tally.failures if when > begin]

    def since(when: float | None) -> float | str:
        return "" if when is None else round(when - begin, 1)

    return {
        "scenario": scenario.name,
        "noticed": since(noticed),
        "answered": since(answered),
        "whole": since(whole),
        "ended": since(ended),
        "ok": sum(end > begin for _, end in tally.answers),
        "failed": len(failed),
        "codes": " ".join(f"{code} ({number})" for code, number in Counter(failed).most_common(3)),
    }


def main() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(names))
    parser.add_argument("--watchdog-timeout", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=6)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--ranks", type=int, default=3, help="that share the model; its heads must be divisible by it")
    parser.add_argument("--port", type=int, default=29555, help="where nodes meet")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    unknown = set(arguments.scenarios) - set(names)
    if unknown:
        parser.error(f"no scenario is called {', '.join(unknown)}; there are {', '.join(names)}")
    rows = []
    for scenario in SCENARIOS:
        if scenario.no_memory and (reason := why_not()):
            print(f"{scenario.name}: {reason}", file=sys.stderr)
        elif not arguments.scenarios or scenario.name in arguments.scenarios:
            with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                rows.append(asyncio.run(run(scenario, arguments, Path(folder))))
            print(rows[-1], file=sys.stderr, flush=True)
    report(f"faults, --watchdog-timeout {arguments.watchdog_timeout:g}", rows, arguments.json)


if __name__ == "__main__":
    main()
