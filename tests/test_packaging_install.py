"""`requirements/install.py`: uv installs with pip's settings, and pip where uv cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "requirements/install.py"


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_pips_index_settings(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in install.VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    listed = """:env:.find-links='/a /b'
:env:.default-timeout='180'
global.cert='/etc/cert.crt'
global.extra-index-url='https://one/simple\\nfile:///two/simple'
global.find-links='/c'
global.index-url='https://own/simple'
install.index-url='https://other/simple'
wheel.index-url='https://no/simple'
"""
    settings = install.settings_of_pip(listed + ":env:.index-url=''\n")
    given = install.environment_of_uv(settings, by_hash=False)
    assert {name: given[name] for name in install.VARIABLES.values() if name in given} == {
        "SSL_CERT_FILE": "/etc/cert.crt",
        "UV_FIND_LINKS": "/a,/b",
        "UV_INDEX": "https://one/simple file:///two/simple",
        "UV_DEFAULT_INDEX": "https://other/simple",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert install.settings_of_pip("") == {}


def test_exact_versions_need_no_constraint(install: ModuleType) -> None:
    """uv refuses constraints without hashes where hashes are required."""
    settings = install.settings_of_pip("global.constraint='/c.txt'")
    assert install.environment_of_uv(settings, by_hash=False)["UV_CONSTRAINT"] == "/c.txt"
    assert "UV_CONSTRAINT" not in install.environment_of_uv(settings, by_hash=True)


def stand_in(folder: Path, name: str, status: int) -> Path:
    """A command that writes its arguments to a file and ends with this status."""
    command = folder / name
    command.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/asked\nexit {status}\n')
    command.chmod(0o755)
    return command


@pytest.mark.parametrize("status", [0, 1])
def test_pip_installs_where_uv_fails(tmp_path: Path, status: int) -> None:
    uv = stand_in(tmp_path, "uv", status)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    missing = tmp_path / "missing"  # so that pip fails without a network
    command = [sys.executable, str(SCRIPT), "--no-deps", str(missing)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    asked = (tmp_path / "asked").read_text()
    assert asked == f"{uv} pip install --python {sys.executable} --no-deps {missing}\n"
    assert ("pip tries" in result.stderr) == (status == 1)
    assert (result.returncode == 0) == (status == 0)
    assert (str(missing) in result.stderr.partition("pip tries")[2]) == (status == 1)


def test_pip_is_used_where_a_setting_is_only_for_pip(tmp_path: Path) -> None:
    """Only wheels of a trusted source, say: uv would go to an index."""
    stand_in(tmp_path, "uv", 0)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    command = [sys.executable, str(SCRIPT), "--no-deps", str(tmp_path / "missing")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert not (tmp_path / "asked").exists()
