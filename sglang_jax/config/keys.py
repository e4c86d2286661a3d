"""Keys and secrets, from an option, a file or the environment."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.errors import ConfigError

MIN_GROUP_SECRET = 16
"""Minimum length of the secret of a group of nodes, in characters."""


def read_secret_file(path: Path) -> str:
    """The file's text, without surrounding whitespace. Raises `ConfigError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def check_key(what: str, key: str) -> None:
    """Raises `ConfigError` for an empty key, which every client would send, and for one that no client could send."""
    if not key:
        raise ConfigError(f"{what} is empty, so anyone could use the server; is the variable unset?")
    if any(character.isspace() or not character.isprintable() for character in key):
        raise ConfigError(f"{what} contains spaces or control characters, which are not allowed in a header")


def one_key(name: str, given: str | None, file: Path | None, from_environment: str | None) -> str | None:
    """The key from an option, a file or the environment, or None. Raises `ConfigError` if both an option and a file are
    given, for a file that cannot be read, and for a key that `check_key` refuses."""
    if given is not None and file is not None:
        raise ConfigError(f"{name} and {name}_file are both given: remove one")
    if given is not None:
        where, key = name, given
    elif file is not None:
        where = f"{name}_file {file}"
        try:
            key = read_secret_file(file)
        except ConfigError as error:
            raise ConfigError(f"{name}_file: {error}") from error
    elif from_environment is not None:
        where, key = f"SGLANG_JAX_{name.upper()}", from_environment
    else:
        return None
    check_key(where, key)
    return key
