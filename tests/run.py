"""Runs tests side by side in a random order, and once more, alone, those that failed: `make test`.

A test that fails beside others and passes alone depends on how busy the machine is, or on the tests before it. Up to
three are listed as raced, and the run is green; with more, or if one fails again, the run fails. Arguments that are no
options of this script are pytest's.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_RACED = 3
MAX_REPEATED_CHARACTERS = 20
"""With more failures than this, the code is wrong and not the machine busy: they are not run again."""

TESTS_FAILED = 1
"""Pytest's exit status when it has run all tests, and some failed."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--workers", type=int, default=2, help="processes that run tests side by side")
    found.add_argument("--seed", type=int, help="seed of the order; default: a new one, which is printed")
    return found


def pytest(cache: str, arguments: Sequence[str]) -> int:
    """Pytest's exit status. `cache`: the folder where it keeps which tests failed."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def failed_tests(cache: str) -> list[str]:
    """The tests, or files that could not be read, that failed in the last run with this cache."""
    path = Path(cache) / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def run(workers: int, seed: int, arguments: Sequence[str]) -> int:
    """The exit status: 0 if every test passed, beside others or alone."""
    side_by_side = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    # Each worker would restart `random` from the same seed, and draw the same ports as the others.
    in_random_order = ["-p", "randomly", "--randomly-dont-reset-seed", f"--randomly-seed={seed}"]
    with tempfile.TemporaryDirectory() as cache:
        status = pytest(cache, [*side_by_side, *in_random_order, *arguments])
        if status != TESTS_FAILED:
            return status
        failed = failed_tests(cache)
        if not 0 < len(failed) <= MAX_REPEATED_CHARACTERS:
            return status
        print(f"\n{len(failed)} failed beside others, and run once more, alone:", *failed, sep="\n  ", flush=True)
        selection = [argument for argument in arguments if not argument.startswith("--costs")]  # those of the first run
        status = pytest(cache, ["--last-failed", "--last-failed-no-failures=none", *selection])
        again = set(failed_tests(cache))
    raced = [test for test in failed if test not in again]
    if raced:
        print(f"\nraced: failed beside others (order {seed}), passed alone:", *raced, sep="\n  ", flush=True)
    if not status and len(raced) > MOST_RACED:
        print(f"\nAt most {MOST_RACED} tests may race, got {len(raced)}: mend them.", flush=True)
        return TESTS_FAILED
    return status


def main() -> int:
    options, arguments = parser().parse_known_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"The order of tests is drawn from seed {seed}; the same again: make test SEED={seed}", flush=True)
    return run(options.workers, seed, arguments)


if __name__ == "__main__":
    sys.exit(main())
