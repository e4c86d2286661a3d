"""Tests that are marked `alone` run while no other worker of `make test` runs one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

# What each test leaves behind: its file, when it began and when it ended.
TESTS = """
import json, time
from pathlib import Path
import pytest

{marks}

@pytest.mark.parametrize("number", range({count}))
def test_takes_its_time(number):
    begin = time.monotonic()
    time.sleep({seconds})
    found = [Path(__file__).stem, begin, time.monotonic()]
    Path(__file__).with_suffix(f".{{number}}.json").write_text(json.dumps(found))
"""


def test_nothing_runs_beside_what_is_alone(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: as in this project\n")
    for name, count, seconds, marks in (
        ("short", 1, 0.05, ""),
        ("long", 12, 0.05, ""),
        ("quiet", 2, 0.3, "pytestmark = pytest.mark.alone"),
    ):
        (tmp_path / f"test_{name}.py").write_text(TESTS.format(marks=marks, count=count, seconds=seconds))
    flags = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *flags, "--basetemp", str(tmp_path / "base"), str(tmp_path)]
    # This may be a worker's own process, whose variables are not for others.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT / "tests")
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, **run, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    spans = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(spans) == 15
    quiet = [span for span in spans if span[0] == "test_quiet"]
    for name, begin, end in quiet:
        beside = [other for other in spans if other != [name, begin, end] and other[1] < end and begin < other[2]]
        assert not beside
