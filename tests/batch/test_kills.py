"""The real command, killed at random moments: in the end every line is answered once, and no finished line runs
again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.batch_command import CommandForks

from sglang_jax.batch.append_file import lines_of
from sglang_jax.batch.journal import number_of

pytestmark = pytest.mark.slow

NUM_LINES = 1000
BAD = {50, 51, 700, 999}
"""Lines that are not valid requests."""


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "asked"


@pytest.fixture(scope="module")
def forks(audit: Path) -> Iterator[CommandForks]:
    with CommandForks(audit) as forks:
        yield forks


def prompt_of(number: int) -> str:
    """In 40 scattered groups, so that lines are run in another order than they are read."""
    return f"group {number % 40:02d} line {number:04d}"


def write_input(path: Path) -> None:
    with path.open("w") as file:
        for number in range(NUM_LINES):
            line = {"prompt": prompt_of(number), "max_tokens": 19, "custom_id": f"id {number}"}
            file.write("nonsense\n" if number in BAD else json.dumps(line) + "\n")


def finished_on_disk(folder: Path) -> set[int]:
    """Lines whose whole answer is in the output, the error file or the spool."""
    finished: set[int] = set()
    for path in (folder / "out.jsonl", folder / "out.jsonl.errors.jsonl"):
        finished |= {number for _, line in lines_of(path) if (number := number_of(line)) is not None}
    for path in folder.glob("out.jsonl.run/spool-*"):
        finished |= {number for _, line in lines_of(path) if (number := number_of(line[1:])) is not None}
    return finished


def asked(audit: Path) -> list[int]:
    return [int(line.split()[-1]) for line in audit.read_text().splitlines()] if audit.exists() else []


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.003)


def tear(folder: Path, choice: random.Random) -> None:
    """Leaves in one of the files what a kill in the middle of a write leaves."""
    paths = [folder / "out.jsonl", folder / "out.jsonl.errors.jsonl", *folder.glob("out.jsonl.run/spool-*")]
    there = [path for path in paths if path.exists()]
    if not there:  # it was killed before it had started
        return
    with choice.choice(there).open("ab") as file:
        file.write(choice.choice([b"{", b'{"id":"batch_req_7","cust', b"O", b'E{"id":"batch', b"\0\0\0", b"\n"]))


@pytest.mark.parametrize(
    "options", [[], ["--ordered"], ["--ordered", "--lookahead", "7", "--no-reorder"]], ids=" ".join
)
def test_twenty_kills(forks: CommandForks, audit: Path, tmp_path: Path, options: list[str]) -> None:
    choice = random.Random(len(options))
    write_input(tmp_path / "in.jsonl")
    command = ["batch", "--model-path", "echo:0.001", "--input", str(tmp_path / "in.jsonl")]
    command += ["--output", str(tmp_path / "out.jsonl"), *options]
    audit.unlink(missing_ok=True)
    redone = kills = 0
    killed_at: list[int] = []
    while kills < 20:
        before, already = finished_on_disk(tmp_path), len(asked(audit))
        pid = forks.start(command, tmp_path / "log")
        if kills % 5 == 4:
            time.sleep(choice.uniform(0.0, 0.2))  # perhaps while it starts
        else:
            wanted = already + choice.randrange(50)
            wait_until(lambda: len(asked(audit)) >= wanted, tmp_path / "log")  # noqa: B023
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid) == -signal.SIGKILL
        kills += 1
        now = asked(audit)[already:]
        assert not before & set(now), "finished work was asked again"
        assert len(now) == len(set(now))
        redone += len(set(now) - finished_on_disk(tmp_path))
        killed_at.append(len(finished_on_disk(tmp_path)))
        if choice.random() < 0.5:
            tear(tmp_path, choice)
    assert killed_at[0] < killed_at[-1] < NUM_LINES

    before, already = finished_on_disk(tmp_path), len(asked(audit))
    assert forks.wait(forks.start(command, tmp_path / "log")) == 1  # some lines are bad
    assert not before & set(asked(audit)[already:])
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    errors = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    good = [number for number in range(NUM_LINES) if number not in BAD]
    order = [int(answer["custom_id"].split()[-1]) for answer in answers]
    assert (order if "--ordered" in options else sorted(order)) == good
    assert [answer["id"] for answer in answers] == [f"batch_req_{number + 1}" for number in order]
    texts = [answer["response"]["body"]["choices"][0]["text"] for answer in answers]
    assert texts == [prompt_of(number)[:19] for number in order]
    assert sorted(int(error["id"].removeprefix("batch_req_")) - 1 for error in errors) == sorted(BAD)
    # Each line ran once, and those in flight at a kill once more for each kill.
    counts = Counter(asked(audit))
    assert set(counts) == set(good)
    assert counts.total() == len(good) + redone
    assert list((tmp_path / "out.jsonl.run").glob("spool-*")) == []
    assert "Traceback" not in (tmp_path / "log").read_text()

    already = len(asked(audit))
    assert forks.wait(forks.start(command, tmp_path / "log")) == 1  # the same command once more does nothing
    assert len(asked(audit)) == already
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(good)


def test_an_interrupt_keeps_finished_lines_and_says_how_to_resume(
    forks: CommandForks, audit: Path, tmp_path: Path
) -> None:
    write_input(tmp_path / "in.jsonl")
    command = ["batch", "--model-path", "echo:0.005", "--input", str(tmp_path / "in.jsonl")]
    command += ["--output", str(tmp_path / "out.jsonl")]
    for kind, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        audit.unlink(missing_ok=True)
        before = finished_on_disk(tmp_path)
        pid = forks.start(command, tmp_path / "log")
        wait_until(lambda: len(finished_on_disk(tmp_path)) >= len(before) + 20, tmp_path / "log")  # noqa: B023
        os.kill(pid, kind)
        assert forks.wait(pid) == status
        assert not before & set(asked(audit))
        log = (tmp_path / "log").read_text()
        assert "Interrupted" in log
        assert "Run the same command to resume" in log
        assert "Traceback" not in log
        for path in (tmp_path / "out.jsonl", tmp_path / "out.jsonl.errors.jsonl"):
            assert all(number_of(line) is not None for _, line in lines_of(path)), "a torn line"
    assert len(finished_on_disk(tmp_path)) < NUM_LINES


def test_two_runs_at_once_are_refused(forks: CommandForks, tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl")
    command = ["batch", "--model-path", "echo:0.01", "--input", str(tmp_path / "in.jsonl")]
    command += ["--output", str(tmp_path / "out.jsonl")]
    first = forks.start(command, tmp_path / "log")
    wait_until(lambda: bool(finished_on_disk(tmp_path)), tmp_path / "log")
    second = forks.start(command, tmp_path / "log of the second")
    assert forks.wait(second) == 2
    assert f"another run (process {first}) writes" in (tmp_path / "log of the second").read_text()
    os.kill(first, signal.SIGKILL)
    forks.wait(first)
    assert len(finished_on_disk(tmp_path)) > 0
