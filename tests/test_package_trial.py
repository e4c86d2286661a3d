"""Which Pythons `make package-test` finds, and its report on missing ones."""

from __future__ import annotations

from pathlib import Path

import package_trial
import pytest


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose only Pythons are those that a test puts into `bin` and `pyenv/versions`."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_a_python_behind_an_unselected_pyenv_shim_is_found(machine: Path) -> None:
    for release in ("3.12.9", "3.12.10"):
        program(machine / f"pyenv/versions/{release}/bin/python", f"echo {release}")
    program(machine / "bin/python3.12", "exit 127")
    assert package_trial.interpreter("3.12") == "3.12.10"
    program(machine / "bin/python3.12", "echo on the path")
    assert package_trial.interpreter("3.12") == "on the path"


def test_a_python_that_is_missing_is_a_failure(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "bin/python3.11", "echo python3.11")
    monkeypatch.setattr("sys.argv", ["package_trial.py"])
    with pytest.raises(SystemExit, match=r"no Python 3\.12, 3\.13: install it, or name those to try with ARGS"):
        package_trial.main()
