"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.echo_server import EchoServer, serve_echo


@pytest.fixture(scope="package")
def server() -> Iterator[EchoServer]:
    """Echoes the prompt, without delay."""
    with serve_echo(served_model_name="echo-model") as server:
        yield server


@pytest.fixture(scope="package")
def slow_server() -> Iterator[EchoServer]:
    """Echoes one token every 20 ms."""
    with serve_echo(model_path="echo:0.02") as server:
        yield server
