"""Installs packages into the environment whose Python runs this, with arguments as `pip install` has them.

    .venv/bin/python requirements/install.py --editable ".[jax]"

It uses uv, which is quicker than pip: the one on the PATH, or one that it fetches into the environment. uv does not
read pip's settings, so it is given those that say where packages come from. Where uv cannot be had, or fails, or a
setting has no counterpart in uv, pip installs.
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
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip, and the environment variables that tell uv the same."""

PIP_ALONE = {
    *("no-index", "require-hashes", "only-binary", "no-binary", "build-constraint"),
    *("proxy", "client-cert", "keyring-provider", "pre"),
}
"""Settings that say what may be installed, or how it is reached, which have no counterpart here."""

COMMA_SEPARATED = {"UV_FIND_LINKS"}


def find_uv(*, fetch: bool) -> str | None:
    """The command; None if it cannot be had, or `fetch` is false and it is not there."""
    own = Path(sys.executable).with_name("uv")
    found = shutil.which("uv") or (str(own) if own.exists() else None)
    if found is None and fetch and subprocess.run([*PIP, "install", "--quiet", "uv"], check=False).returncode == 0:
        found = str(own) if own.exists() else None
    return found


def settings_of_pip(listed: str) -> dict[str, str]:
    """What `pip config list` prints, by the names of the settings; those of several values have spaces between."""
    values: dict[str, str] = {}
    # In the order of precedence: files first, with what is for `install` alone behind, then the environment.
    for line in sorted(listed.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install."))):
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in ("global", "install", ":env:"):
            values[key] = " ".join(str(ast.literal_eval(value)).split()) or values.get(key, "")
    return {key: value for key, value in values.items() if value}


def environment_of_uv(settings: dict[str, str], *, by_hash: bool) -> dict[str, str]:
    """pip looks at all indexes for the newest version, and compiles what it installs. Where hashes are required
    (`by_hash`), each version is given, and uv takes no constraint besides."""
    own = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_COMPILE_BYTECODE": "1"}
    for key, value in settings.items():
        if key in VARIABLES:
            own[VARIABLES[key]] = value.replace(" ", ",") if VARIABLES[key] in COMMA_SEPARATED else value
    environment = own | os.environ
    if by_hash:
        environment.pop("UV_CONSTRAINT", None)
    return environment


def main() -> int:
    arguments = sys.argv[1:]
    listed = subprocess.run([*PIP, "config", "list"], check=False, capture_output=True, text=True).stdout
    settings, by_hash = settings_of_pip(listed), "--require-hashes" in arguments
    # What is to be checked by its hash is not installed by a uv that nothing checked.
    uv = None if PIP_ALONE & settings.keys() else find_uv(fetch=not by_hash)
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, *arguments]
        if subprocess.run(command, env=environment_of_uv(settings, by_hash=by_hash), check=False).returncode == 0:
            return 0
        print("uv could not install this; pip tries", file=sys.stderr)
    return subprocess.run([*PIP, "install", *arguments], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
