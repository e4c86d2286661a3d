"""A client cannot flood the log."""

from __future__ import annotations

import logging
import socket
import time
from types import SimpleNamespace

import pytest
from helpers.echo_server import EchoServer

from sglang_jax.logs import OnceASecond
from sglang_jax.server import request_body
from sglang_jax.server.request_body import PartialRequests


def test_each_warning_is_logged_once_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    # Instead of patching the module: event loops of other servers in this process use its time too.
    monkeypatch.setattr("sglang_jax.logs.time", SimpleNamespace(monotonic=lambda: now))
    logger = logging.getLogger("test of floods")
    logger.addFilter(OnceASecond())
    for number in range(1000):
        logger.warning("%d bytes", number)
    logger.warning("another")
    for _ in range(3):
        logger.error("a fault")
    now += 1.5
    logger.warning("%d bytes", 5)
    logger.warning("another")
    lines = ["0 bytes", "another", *["a fault"] * 3, "5 bytes (999 more since the last such line)", "another"]
    assert [record.getMessage() for record in caplog.records] == lines


class Client:
    def refuse(self, error: Exception) -> None: ...


def test_a_thousand_refusals_are_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(request_body.logger, "filters", [OnceASecond()])
    monkeypatch.setattr("sglang_jax.logs.time", SimpleNamespace(monotonic=lambda: 100.0))
    held = PartialRequests(10, "heads")
    for _ in range(1000):
        held.hold(Client(), 11)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("Refused a request of which 11 bytes had come: 11 bytes of unfinished heads are held")


def test_bytes_that_are_not_http_are_logged_once(server: EchoServer, caplog: pytest.LogCaptureFixture) -> None:
    time.sleep(1.1)  # another test may have used up this second's line
    begin = time.monotonic()
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(b"no HTTP\r\n\r\n")
            while connection.recv(65536):
                pass
    lines = [record for record in caplog.records if "Invalid HTTP" in record.getMessage()]
    assert 1 <= len(lines) <= time.monotonic() - begin + 1
