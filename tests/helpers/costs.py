"""A pytest plugin that measures the processor time of tests: `make test ARGS="--costs=costs.json"`.

Each test's setup, call and teardown is measured with the processes that it started and waited for; the seconds that JAX
spent compiling are counted separately. `python tests/helpers/costs.py costs.json` prints the table of the docs, and
with `--slow tests/PACKAGE ...` the lines of tests/slow_tests.txt: functions of these packages with a case that takes
`SLOW_SECONDS`. They are marked `slow`, so that `make test-fast` leaves them out.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COST = "cost"
COMPILING = "/jax/core/compile/"
SLOW_SECONDS = 0.5
"""Seconds of a processor; a test that only waits counts by half of its time."""

SLOW_TESTS = Path(__file__).parents[1] / "slow_tests.txt"


def processor_seconds() -> float:
    """User and system time of this process and of those it started and waited for."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


@dataclass(slots=True)
class Compiling:
    """Seconds that JAX in this process has spent on tracing, lowering and compiling."""

    seconds: float = 0.0
    _listens: bool = False

    def listen(self) -> None:
        """Counts from now on, once JAX has been imported."""
        if self._listens or "jax" not in sys.modules:
            return
        from jax import monitoring

        monitoring.register_event_duration_secs_listener(self._took)
        self._listens = True

    def _took(self, event: str, seconds: float, **_: str | int) -> None:
        if event.startswith(COMPILING):
            self.seconds += seconds


@dataclass(slots=True, eq=False)
class Costs:
    """The plugin: workers attach costs to their reports, the main process adds them up."""

    config: pytest.Config
    compiling: Compiling = field(default_factory=Compiling)
    tests: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    fixtures: Counter[str] = field(default_factory=Counter)
    _began: float = field(default_factory=time.monotonic)
    _before: tuple[float, float] = (0.0, 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self._start()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self._start()
        return (yield)

    def _start(self) -> None:
        self.compiling.listen()
        self._before = processor_seconds(), self.compiling.seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        before = processor_seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                name = f"{request.node.nodeid or 'session'}::{fixturedef.argname}"
                self.fixtures[name] += round(processor_seconds() - before, 3)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        seconds, compiling = self._before
        report = yield
        cost = [round(processor_seconds() - seconds, 4), round(self.compiling.seconds - compiling, 4)]
        report.user_properties.append((COST, cost))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = next((value for name, value in reversed(report.user_properties) if name == COST), None)
        if isinstance(cost, list):
            self.tests.setdefault(report.nodeid, {})[report.when or ""] = [*cost, round(report.duration, 4)]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        output = getattr(self.config, "workeroutput", None)  # how xdist sends data from a worker to the main process
        if output is not None:
            output["processor seconds"] = processor_seconds()
            output["fixtures"] = dict(self.fixtures)
        yield
        path = self.config.getoption("costs")
        if output is None and path:
            found = {"processor": processor_seconds(), "wall": time.monotonic() - self._began}
            Path(path).write_text(json.dumps(found | {"tests": self.tests, "fixtures": self.fixtures}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.fixtures.update(output.get("fixtures", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        wall = time.monotonic() - self._began
        terminalreporter.write_line(
            f"processor time: {processor_seconds() / 60:.1f} minutes in {wall / 60:.1f} minutes, {os.cpu_count()} cores"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each test costs, in seconds, into this JSON file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the known slow tests, before tests are selected by their marks."""
    slow = frozenset(SLOW_TESTS.read_text().split())
    for item in items:
        if _function(item.nodeid) in slow:
            item.add_marker(pytest.mark.slow)


def _function(test: str) -> str:
    return test.partition("[")[0]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "costs of tests")


def table(path: Path, rows: int = 40) -> str:
    """Markdown: the seconds of processor time of each file, the most expensive first."""
    found = json.loads(path.read_text())
    files: dict[str, list[float]] = {}
    for test, phases in found["tests"].items():
        row = files.setdefault(test.partition("::")[0], [0.0, 0.0, 0.0, 0])
        for seconds, compiling, _ in phases.values():
            row[0] += seconds
            row[1] += compiling
        row[2] += phases.get("setup", [0.0])[0]
        row[3] += 1
    ordered = sorted(files.items(), key=lambda each: -each[1][0])
    counted = sum(row[0] for _, row in ordered)
    lines = ["| File | Tests | Processor s | of it fixtures | of it compiling for XLA |", "|---|---|---|---|---|"]
    for name, (seconds, compiling, setup, count) in ordered[:rows]:
        lines.append(f"| {name} | {count} | {seconds:.0f} | {setup:.0f} | {compiling:.0f} |")
    rest = counted - sum(row[0] for _, row in ordered[:rows])
    lines.append(f"| {len(ordered) - rows} others | | {rest:.0f} | | |")
    lines.append(f"| collection and the rest | | {found['processor'] - counted:.0f} | | |")
    return "\n".join(lines)


def slow_functions(path: Path, packages: Sequence[str]) -> list[str]:
    """The test functions of these packages with a case that takes `SLOW_SECONDS`."""
    tests = json.loads(path.read_text())["tests"]
    within = tuple(f"{package.rstrip('/')}/" for package in packages)
    return sorted({_function(test) for test, phases in tests.items() if test.startswith(within) and _is_slow(phases)})


def _is_slow(phases: Mapping[str, Sequence[float]]) -> bool:
    processor, _, wall = map(sum, zip(*phases.values(), strict=True))
    return max(processor, wall / 2) >= SLOW_SECONDS


if __name__ == "__main__":
    if "--slow" in sys.argv:
        print("\n".join(slow_functions(Path(sys.argv[1]), sys.argv[3:])))
    else:
        print(table(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40))
