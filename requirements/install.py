"""Installs packages into the environment whose Python runs this, with arguments as `pip install` has them.

    .venv/bin/python requirements/install.py --editable ".[jax]"

It uses uv, which takes about half as long as pip: the one on the PATH, or one that it fetches into the environment. uv
does not read pip's settings, so it is given those that say where packages come from. Where uv cannot be had, or fails,
pip installs.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the environment variables that tell uv the same."""

COMMA_SEPARATED = {"UV_FIND_LINKS"}


def find_uv() -> str | None:
    """The command; None if it cannot be had."""
    own = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(own) if own.exists() else None)
    if found is None and subprocess.run([*PIP, "install", "--quiet", "uv"], check=False).returncode == 0:
        found = str(own) if own.exists() else None
    return found


def settings_of_pip(listed: str) -> dict[str, str]:
    """From what `pip config list` prints to variables for uv."""
    values: dict[str, str] = {}
    # In the order of precedence: files first, with what is for `install` alone behind, then the environment.
    for line in sorted(listed.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install."))):
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in ("global", "install", ":env:") and key in VARIABLES:
            variable = VARIABLES[key]
            several = str(ast.literal_eval(value)).split()
            values[variable] = ("," if variable in COMMA_SEPARATED else " ").join(several)
    return values


def environment_of_uv(arguments: list[str]) -> dict[str, str]:
    """pip looks at all indexes for the newest version, and compiles what it installs. Where hashes are required, each
    version is given, and uv takes no constraint besides."""
    listed = subprocess.run([*PIP, "config", "list"], check=False, capture_output=True, text=True).stdout
    own = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1", **settings_of_pip(listed)}
    if "--require-hashes" in arguments:
        own.pop("UV_CONSTRAINT", None)
    return own | os.environ


def main() -> int:
    arguments = sys.argv[1:]
    uv = find_uv()
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=environment_of_uv(arguments), check=False).returncode == 0:
            return 0
        print("uv could not install this; pip tries", file=sys.stderr)
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
