"""A server killed at random moments while clients upload files and run batches: in the end every line of every batch
that was created is answered once, and no finished line runs again."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.batch_command import CommandForks
from openai import APIConnectionError, OpenAI

from sglang_jax.batch.append_file import lines_of
from sglang_jax.batch.journal import number_of

LINES = 120
REFUSED = {7, 50, 119}
"""Lines that the route refuses."""


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    return tmp_path / "asked"


@pytest.fixture
def forks(audit: Path) -> Iterator[CommandForks]:
    with CommandForks(audit) as forks:
        yield forks


def prompt_of(batch: int, number: int) -> str:
    return f"g{number % 7} b{batch:03d} n{number:04d}"


def content_of(batch: int) -> bytes:
    lines = []
    for number in range(LINES):
        body = {"prompt": prompt_of(batch, number), "max_tokens": 14}
        if number in REFUSED:
            body["temperature"] = -1
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode() + b"\n")
    return b"".join(lines)


class Storm:
    """A server that is killed and started again, and its clients. `batches`: the id of each that was created, by the
    number in its prompts."""

    def __init__(self, forks: CommandForks, audit: Path, folder: Path, seed: int) -> None:
        self.choice = random.Random(seed)
        self.batches: dict[str, int] = {}
        self.redone: Counter[str] = Counter()
        self._forks = forks
        self._audit = audit
        self._folder = folder
        self._log = folder / "log"
        self._files = folder / "files"
        self._sent = 0
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self._port = unused.getsockname()[1]
        self.api = OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0)

    def start(self) -> int:
        command = ["serve", "--model-path", "echo:0.001", "--port", str(self._port), "--files-dir", str(self._files)]
        return self._forks.start(command, self._log)

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                assert httpx2.get(f"http://127.0.0.1:{self._port}/readyz").status_code == 200
                return
            except httpx2.TransportError:
                assert time.monotonic() < end, self._log.read_text()
                time.sleep(0.005)

    def kill_after(self, seconds: float, pid: int) -> None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert self._forks.wait(pid) == -signal.SIGKILL

    def create(self) -> None:
        """Uploads a file, and starts its batch, unless the server is killed."""
        number, self._sent = self._sent, self._sent + 1
        try:
            file = self.api.files.create(file=("in.jsonl", content_of(number)), purpose="batch")
            batch = self.api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            self.batches[batch.id] = number
        except APIConnectionError:
            pass

    def asked(self) -> list[str]:
        return self._audit.read_text().splitlines() if self._audit.exists() else []

    def finished(self) -> dict[str, set[int]]:
        """The lines of each batch that are whole on disk, wherever they are."""
        found: dict[str, set[int]] = {}
        for record in self._files.glob("batches/*/batch.json"):
            batch = json.loads(record.read_text())
            paths = [record.with_name("output.jsonl"), record.with_name("errors.jsonl")]
            paths += [self._files / "files" / f"{batch[name]}.data" for name in ("output_id", "error_id")]
            numbers = [number_of(line) for path in paths for _, line in lines_of(path)]
            found[batch["id"]] = {number for number in numbers if number is not None}
        return found

    def tear(self) -> None:
        """Leaves in one of the growing files what a kill in the middle of a write leaves."""
        growing: list[Path] = []
        for record in self._files.glob("batches/*/batch.json"):
            if json.loads(record.read_text())["status"] == "in_progress":
                growing += record.parent.glob("*s.jsonl")
                growing += record.parent.glob("output.jsonl")
        if growing:
            with self.choice.choice(growing).open("ab") as file:
                file.write(self.choice.choice([b"{", b'{"id":"batch_req_7","cust', b"\0\0\0", b"\n"]))

    def round(self) -> None:
        before, already = self.finished(), len(self.asked())
        pid = self.start()
        if self.choice.random() < 0.2:
            self.kill_after(self.choice.uniform(0.0, 0.3), pid)  # perhaps while it starts
        else:
            self.wait_ready()
            clients = [threading.Thread(target=self.create) for _ in range(self.choice.randrange(3))]
            for client in clients:
                client.start()
            self.kill_after(self.choice.choice([0.02, 0.1, 0.3, 0.6]) * self.choice.random() * 2, pid)
            for client in clients:
                client.join()
        now = self.asked()[already:]
        self._check_new(before, now)
        if self.choice.random() < 0.5:
            self.tear()

    def _check_new(self, before: dict[str, set[int]], now: list[str]) -> None:
        """No finished line was asked again, and none twice."""
        names = {number: name for name, number in self.batches.items()}
        assert len(now) == len(set(now))
        after = self.finished()
        for prompt in now:
            batch, number = (int(part[1:]) for part in prompt.split()[1:3])
            name = names.get(batch)
            if name is not None:
                assert number not in before.get(name, set()), f"{prompt} had an answer"
                self.redone[name] += number not in after[name]

    def check_end(self) -> None:
        """Every batch is completed, also those whose client never learnt of them, and each line has one answer."""
        self.wait_ready()
        end = time.monotonic() + 120
        while any(one.status != "completed" for one in self.api.batches.list()):
            assert time.monotonic() < end, [(one.id, one.status, one.errors) for one in self.api.batches.list()]
            time.sleep(0.05)
        found = {one.id: one for one in self.api.batches.list()}
        assert set(self.batches) <= set(found)
        counts = Counter(self.asked())
        for name, batch in found.items():
            outputs, errors = self._lines(batch.output_file_id), self._lines(batch.error_file_id)
            names = [int(one["custom_id"]) for one in outputs]
            assert sorted(names) == [number for number in range(LINES) if number not in REFUSED]
            assert {int(one["custom_id"]) for one in errors} == REFUSED
            assert len(errors) == len(REFUSED)
            assert batch.request_counts is not None
            assert batch.request_counts.completed == len(outputs)
            texts = {int(one["custom_id"]): one["response"]["body"]["choices"][0]["text"] for one in outputs}
            sent = self.batches.get(name)
            if sent is not None:
                assert texts == {number: prompt_of(sent, number)[:14] for number in texts}
                times = sum(count for prompt, count in counts.items() if f" b{sent:03d} " in prompt)
                assert times == len(outputs) + self.redone[name]
        assert list((self._files / "drafts").iterdir()) == []
        assert "Traceback" not in self._log.read_text()

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(one) for one in self.api.files.content(file_id).text.splitlines()]


def storm(forks: CommandForks, audit: Path, folder: Path, kills: int, seed: int) -> None:
    one = Storm(forks, audit, folder, seed)
    for _ in range(kills):
        one.round()
    assert one.batches, "not one batch was created"
    pid = one.start()
    one.check_end()
    os.kill(pid, signal.SIGTERM)
    assert forks.wait(pid) == 0
    already = len(one.asked())
    pid = one.start()  # once more: nothing is left to do
    one.check_end()
    assert len(one.asked()) == already
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid)


@pytest.mark.slow
def test_eight_kills(forks: CommandForks, audit: Path, tmp_path: Path) -> None:
    storm(forks, audit, tmp_path, 8, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_fifty_kills(forks: CommandForks, audit: Path, tmp_path: Path, seed: int) -> None:
    storm(forks, audit, tmp_path, 50, seed)
