"""Drives published clients, each in a separate environment, against servers of the embedded model: `make client-test`.

    python tests/clients/run.py --environments FOLDER [NAME ...]    # all clients of clients.toml, or the named ones

Clients and their packages are fetched from PyPI and npm. A check that `clients.toml` lists under `not_served` must
fail; all others must pass. The exit status is 1 if one does not, or an environment cannot be built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TABLE = HERE / "clients.toml"
INSTALL = ROOT / "requirements/install.py"
MODEL = "demo"
SERVER = [
    *(sys.executable, "-m", "sglang_jax.launch_server", "--model-path", MODEL, "--port", "0"),
    *("--backend", "torch", "--device", "cpu"),
]
GENERATE, EMBED = "generate", "embed"
OPTIONS = {
    GENERATE: ["--chat-template", str(HERE / "chat_template.jinja"), "--reasoning-parser", "qwen3"],
    EMBED: [],
}
"""The options of the server for each task (`--model-task`)."""

SECONDS = 600
"""How long the checks of one client may take, and how long a server may take to stop."""

PASSED, NOT_SERVED = "passed", "not served"


class BuildError(Exception):
    """An environment could not be built."""


@dataclass(frozen=True)
class Client:
    """A published client. `packages`: pinned, in pip's or npm's notation; `driver`: the script of its checks;
    `not_served`: names or patterns of the checks that must fail, and why; `task`: of the server that it needs."""

    name: str
    packages: tuple[str, ...]
    driver: Path
    not_served: Mapping[str, str] = field(default_factory=dict)
    task: str = GENERATE

    @property
    def is_javascript(self) -> bool:
        return self.driver.suffix == ".mjs"


@dataclass(frozen=True)
class Table:
    """`before`: the day after which no package may have been published, as YYYY-MM-DD."""

    before: str
    clients: tuple[Client, ...]


def read_table(path: Path = TABLE) -> Table:
    """Raises `ValueError` for a task without a server."""
    content = tomllib.loads(path.read_text())
    clients = []
    for name, entry in content["clients"].items():
        driver = path.parent / entry["driver"]
        task = entry.get("task", GENERATE)
        if task not in OPTIONS:
            raise ValueError(f"the task of {name} must be one of {', '.join(OPTIONS)}, got {task!r}")
        clients.append(Client(name, tuple(entry["packages"]), driver, entry.get("not_served", {}), task))
    return Table(content["before"], tuple(clients))


def build(client: Client, folder: Path, before: str) -> list[str]:
    """Builds the client's environment, unless it is there already, and returns the command that runs its driver.
    Raises `BuildError`."""
    stamp = folder / "built.json"
    wanted = json.dumps([sys.version, before, client.packages])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (npm_install if client.is_javascript else pip_install)(client.packages, folder, before)
        stamp.write_text(wanted)
    if client.is_javascript:  # which finds packages next to the script
        for script in HERE.glob("*.mjs"):
            shutil.copy(script, folder)
        return ["node", str(folder / client.driver.name)]
    return [str(folder / "bin/python"), str(client.driver)]


def pip_install(packages: Sequence[str], folder: Path, before: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where uv is, if it is here
    environment = {**os.environ, "PATH": path, "UV_EXCLUDE_NEWER": before}
    call([sys.executable, "-m", "venv", str(folder)], os.environ)
    call([str(folder / "bin/python"), str(INSTALL), "--quiet", *packages], environment)


def npm_install(packages: Sequence[str], folder: Path, before: str) -> None:
    if shutil.which("npm") is None:
        raise BuildError("npm is not installed")
    (folder / "package.json").write_text('{"private": true}')
    quiet = ("--no-audit", "--no-fund", "--no-progress", "--save-exact", f"--before={before}")
    call(["npm", "install", "--prefix", str(folder), *quiet, *packages], os.environ)


def call(command: Sequence[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")


@contextmanager
def served(task: str, key: str, folder: Path) -> Iterator[str]:
    """A server for a task, with its log and its clients' files in the folder. Yields its URL."""
    log, files = folder / f"server-{task}.log", folder / "files"
    shutil.rmtree(files, ignore_errors=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_JAX_API_KEY": key}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*SERVER, "--model-task", task, *OPTIONS[task], "--files-dir", str(files)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if ready := re.search(r"http://[\d.]+:\d+", line):
                yield ready[0]
                break
        else:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(SECONDS)


def run_checks(command: Sequence[str], url: str, key: str, home: Path, log: Path) -> dict[str, str]:
    """The error of each check of a driver, empty if it passed. What the driver says besides goes to the log."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),  # clients write settings, caches and histories there
        "CLIENT_TEST_URL": url,
        "CLIENT_TEST_KEY": key,
        "CLIENT_TEST_MODEL": MODEL,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    home.mkdir(exist_ok=True)
    results, other = {}, []
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, cwd=home, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            results["driver"] = f"did not end within {SECONDS} s"
    for line in said.splitlines():
        if line.startswith('{"check":'):
            result = json.loads(line)
            results[result["check"]] = result["error"]
        else:
            other.append(line)
    if other:
        log.write_text("\n".join([log.read_text(), *other]))
    if process.returncode and "driver" not in results:
        results["driver"] = f"ended with status {process.returncode}"
    return results


def judged(client: Client, results: Mapping[str, str]) -> dict[str, str]:
    """The verdict on each check: passed, not served, or what is wrong with it."""
    verdicts = {}
    for name, error in results.items():
        if any(fnmatchcase(name, pattern) for pattern in client.not_served):
            verdicts[name] = NOT_SERVED if error else "passes, although clients.toml lists it as not served"
        else:
            verdicts[name] = error or PASSED
    return verdicts or {"driver": "has no checks"}


def main() -> None:
    table = read_table()
    names = [client.name for client in table.clients]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--environments", type=Path, required=True, help="folder of the clients' environments")
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*names}):
        parser.error(f"unknown clients {' '.join(unknown)}: choose from {', '.join(names)}")
    folder, key = options.environments.resolve(), secrets.token_hex(16)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [client for client in table.clients if not options.names or client.name in options.names]
    failed = 0
    for task in OPTIONS:
        if clients := [client for client in chosen if client.task == task]:
            with served(task, key, folder) as url:
                failed += sum(drive(client, table.before, url, key, folder) for client in clients)
    logs = folder / "server-*.log"
    print(f"{failed} checks failed; logs of the servers: {logs}" if failed else "all checks passed")
    sys.exit(1 if failed else 0)


def drive(client: Client, before: str, url: str, key: str, folder: Path) -> int:
    """Prints the verdicts on a client's checks. Returns how many are wrong."""
    print(f"{client.name}: {' '.join(client.packages)}", flush=True)
    try:
        command = build(client, folder / client.name, before)
    except BuildError as error:
        print(f"  its environment could not be built: {error}", flush=True)
        return 1
    log = folder / f"{client.name}.log"
    verdicts = judged(client, run_checks(command, url, key, folder / "home", log))
    for name, verdict in verdicts.items():
        print(f"  {name:24} {verdict.splitlines()[0][:200]}", flush=True)
    wrong = [verdict for verdict in verdicts.values() if verdict not in (PASSED, NOT_SERVED)]
    if wrong:
        print(f"  more in {log}")
    return len(wrong)


if __name__ == "__main__":
    main()
