"""`tests/run.py`: failures of the parallel run are run again one at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

RUN = Path(__file__).parent / "run.py"

# what each test leaves behind: its file, and when it started and ended
TESTS = """
import json, os, time
from pathlib import Path
import pytest

{marks}

@pytest.mark.parametrize("number", range({count}))
def test_takes_its_time(number):
    begin = time.monotonic()
    time.sleep({seconds})
    found = [Path(__file__).stem, begin, time.monotonic()]
    Path(__file__).with_suffix(f".{{number}}.json").write_text(json.dumps(found))
    assert {passes}
"""
IN_THE_MAIN_PROCESS = "'PYTEST_XDIST_WORKER' not in os.environ"


def test_tests_that_race_and_exclusive_tests(tmp_path: Path) -> None:
    """Nothing runs next to tests marked `alone`. A test that fails in parallel and passes on its own is listed, and
    the run is green."""
    shutil.copy(RUN.with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone: as in this project\n")
    for name, count, seconds, marks, passes in (
        ("races", 3, 0.05, "", IN_THE_MAIN_PROCESS),
        ("long", 12, 0.05, "", True),
        ("quiet", 2, 0.3, "pytestmark = pytest.mark.alone", True),
    ):
        text = TESTS.format(marks=marks, count=count, seconds=seconds, passes=passes)
        (tmp_path / f"test_{name}.py").write_text(text)
    program = f"import sys; sys.path.insert(0, {str(RUN.parent)!r}); import run; from pathlib import Path; "
    program += f"run.ROOT = Path({str(tmp_path)!r}); sys.exit(run.main())"
    command = [sys.executable, "-B", "-c", program, "--seed", "7", f"--basetemp={tmp_path / 'base'}"]
    # the process may be a worker, whose variables must not be inherited
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = f"{RUN.parent}:{RUN.parent.parent}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make test SEED=7" in done.stdout
    raced = done.stdout.partition("raced: failed in parallel (order 7), passed on their own:")[2]
    expected = [f"test_races.py::test_takes_its_time[{number}]" for number in range(3)]
    assert [line.strip() for line in raced.strip().splitlines()] == expected
    spans = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(spans) == 17
    for name, begin, end in (span for span in spans if span[0] == "test_quiet"):
        others = [other for other in spans if other != [name, begin, end]]
        assert not [other for other in others if other[1] < end and begin < other[2]]


Runs = Callable[..., tuple[int, int]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """The script's exit status and its number of pytest runs, which fail with the given sets in turn."""
    spec = spec_from_file_location("run", RUN)
    assert spec is not None
    assert spec.loader is not None
    script: ModuleType = module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*failed: Sequence[str], status: int = 1) -> tuple[int, int]:
        count = 0

        def pytest(cache: str, arguments: Sequence[str]) -> int:
            nonlocal count
            assert ("--costs=file" in arguments) == (count == 0), "the costs of the whole run are kept"
            path = Path(cache) / "v/cache/lastfailed"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(dict.fromkeys(failed[count], True)))
            count += 1
            return status if failed[count - 1] else 0

        monkeypatch.setattr(script, "pytest", pytest)
        return script.run(2, 7, ["--costs=file"]), count

    return run


def test_failures_in_the_first_and_second_run(runs: Runs) -> None:
    many = [f"test_{number}" for number in range(21)]
    assert runs([]) == (0, 1)
    assert runs(many[:3], []) == (0, 2)
    assert runs(many[:4], []) == (1, 2), "more than three raced"
    assert runs(many[:2], many[:1]) == (1, 2), "one failed again"
    assert runs(many) == (1, 1), "so many are not run again"
    assert runs(many[:1], status=2) == (2, 1), "an interrupted run is not repeated"
    assert runs(["test_file.py"], ["test_file.py"]) == (1, 2), "a file that cannot be read"
