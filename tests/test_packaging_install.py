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


def test_uv_gets_what_pip_knows_of_indexes(install: ModuleType) -> None:
    listed = """:env:.find-links='/a /b'
:env:.default-timeout='180'
global.cert='/etc/cert.crt'
global.extra-index-url='https://one/simple\\nfile:///two/simple'
global.find-links='/c'
global.index-url='https://own/simple'
install.index-url='https://other/simple'
wheel.index-url='https://no/simple'
"""
    assert install.settings_of_pip(listed) == {
        "SSL_CERT_FILE": "/etc/cert.crt",
        "UV_FIND_LINKS": "/a,/b",
        "UV_INDEX": "https://one/simple file:///two/simple",
        "UV_DEFAULT_INDEX": "https://other/simple",
    }
    assert install.settings_of_pip("") == {}


def test_exact_versions_need_no_constraint(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv refuses one without hashes where hashes are required."""
    monkeypatch.setattr(install, "PIP", [sys.executable, "-c", "print(\"global.constraint='/c.txt'\")"])
    monkeypatch.delenv("UV_CONSTRAINT", raising=False)
    assert install.environment_of_uv(["--editable", "."])["UV_CONSTRAINT"] == "/c.txt"
    assert "UV_CONSTRAINT" not in install.environment_of_uv(["--require-hashes", "-r", "dev.lock"])


def stand_in(folder: Path, name: str, status: int) -> Path:
    """A command that writes what it is given and ends with this status."""
    command = folder / name
    command.write_text(f'#!/bin/sh\necho "$0 $*" >> {folder}/asked\nexit {status}\n')
    command.chmod(0o755)
    return command


@pytest.mark.parametrize("status", [0, 1])
def test_pip_installs_what_uv_cannot(tmp_path: Path, status: int) -> None:
    uv = stand_in(tmp_path, "uv", status)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    missing = tmp_path / "missing"  # so that pip, once asked, ends without a network
    command = [sys.executable, str(SCRIPT), "--no-deps", str(missing)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    asked = (tmp_path / "asked").read_text()
    assert asked == f"{uv} pip install --python {sys.executable} --no-deps {missing}\n"
    assert ("pip tries" in result.stderr) == (status == 1)
    assert (result.returncode == 0) == (status == 0)
    assert (str(missing) in result.stderr.partition("pip tries")[2]) == (status == 1)
