"""Debian's Chromium, and servers for its page: the embedded model, and an echo of prompts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.web_page import Page, open_browser

from sglang_jax.engine.launch import launch_engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="folder for pictures of the page")


@pytest.fixture(scope="session")
def demo() -> Iterator[EchoServer]:
    """The embedded model on a CPU."""
    with serve_echo(
        launch=launch_engine, model_path="demo", backend="torch", context_length=2048, max_running_requests=8
    ) as server:
        yield server


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    """Answers `user: ` and the message, a character every 5 ms, with DeepSeek-R1's reasoning."""
    with serve_echo(model_path="echo:0.005", reasoning_parser="deepseek_r1") as server:
        yield server


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """A browser with a fresh profile. Whatever a test does, the page sends requests only to the servers that the test
    opened, and the browser reports no error except of requests that a server refused."""
    assert shutil.which("chromium"), "install Debian's packages chromium and chromium-driver"
    with open_browser(tmp_path / "profile") as page:
        yield page
        assert {request.origin for request in page.requests()} <= page.origins
        assert page.errors() == []


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where screenshots go."""
    folder = Path(request.config.getoption("--screenshots") or tmp_path)
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def seconds_shown(request: pytest.FixtureRequest) -> float:
    """How long charts should be before their picture is taken."""
    return 30.0 if request.config.getoption("--screenshots") else 0.0
