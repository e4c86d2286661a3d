"""Runs tests in parallel in a random order, and then the failed ones again one at a time: `make test`.

A test that fails in parallel and passes on its own depends on the machine's load, or on the tests before it. Up to
three are listed as raced, and the run is green; with more, or if one fails again, the run fails. Arguments other
than the options of this script are passed to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_RACED = 3
MAX_RERUN = 20
"""With more failures than this, the code is at fault and not the machine's load: they are not run again."""

TESTS_FAILED = 1
"""Pytest's exit status when it ran all tests and some failed."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--workers", type=int, default=2, help="processes that run tests side by side")
    found.add_argument("--seed", type=int, help="seed of the order; default: a new one, which is printed")
    return found


def pytest(cache: str, arguments: Sequence[str]) -> int:
    """Pytest's exit status. `cache`: the folder where it records failed tests."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    # Tests start hundreds of processes, which would compile all modules again each.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def failed_tests(cache: str) -> list[str]:
    """The tests, or unreadable files, that failed in the last run with this cache."""
    path = Path(cache) / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def run(workers: int, seed: int, arguments: Sequence[str]) -> int:
    """The exit status: 0 if every test passed, in the first or the second run."""
    side_by_side = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    # each worker would seed `random` the same, and draw the same ports as the others
    in_random_order = ["-p", "randomly", "--randomly-dont-reset-seed", f"--randomly-seed={seed}"]
    with tempfile.TemporaryDirectory() as cache:
        status = pytest(cache, [*side_by_side, *in_random_order, *arguments])
        if status != TESTS_FAILED:
            return status
        failed = failed_tests(cache)
        if not 0 < len(failed) <= MAX_RERUN:
            return status
        print(f"\n{len(failed)} failed in parallel, and run once more, one at a time:", *failed, sep="\n  ", flush=True)
        # the failures of the first run
        selection = [argument for argument in arguments if not argument.startswith("--costs")]
        status = pytest(cache, ["--last-failed", "--last-failed-no-failures=none", *selection])
        again = set(failed_tests(cache))
    raced = [test for test in failed if test not in again]
    if raced:
        print(f"\nraced: failed in parallel (order {seed}), passed on their own:", *raced, sep="\n  ", flush=True)
    if not status and len(raced) > MAX_RACED:
        print(f"\nAt most {MAX_RACED} tests may race, got {len(raced)}: mend them.", flush=True)
        return TESTS_FAILED
    return status


def main() -> int:
    options, arguments = parser().parse_known_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"The order of tests is drawn from seed {seed}; the same again: make test SEED={seed}", flush=True)
    return run(options.workers, seed, arguments)


if __name__ == "__main__":
    sys.exit(main())
