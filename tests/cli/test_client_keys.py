"""Commands that call a server with API keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.echo_server import EchoServer, serve_echo

from sglang_jax.cli.bench.commands import bench_serving
from sglang_jax.cli.cache_report import cache_report
from sglang_jax.cli.main import run

SMALL = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "4", "--vocab-size", "256"]


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with serve_echo(api_key="clients'-ключ", admin_api_key="operator's") as server:
        yield server


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGLANG_JAX_API_KEY", "SGLANG_JAX_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(server: EchoServer, *arguments: str) -> int:
    return run(bench_serving, "bench serving", ["--port", str(server.port), *SMALL, *arguments])


def test_bench_serving_sends_the_key_of_the_environment(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_JAX_API_KEY", "clients'-ключ")
    assert bench(server) == 0


def test_the_option_wins_over_the_environment(server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_JAX_API_KEY", "wrong")
    assert bench(server, "--api-key", "clients'-ключ") == 0
    monkeypatch.setenv("SGLANG_JAX_API_KEY", "clients'-ключ")
    assert bench(server, "--api-key", "wrong") != 0


def test_the_cache_is_flushed_with_the_operators_key(
    server: EchoServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_JAX_API_KEY", "clients'-ключ")
    assert bench(server, "--flush-cache") != 0
    assert "SGLANG_JAX_ADMIN_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("SGLANG_JAX_ADMIN_API_KEY", "operator's")
    assert bench(server, "--flush-cache") == 0


def test_a_refusal_names_the_option_and_the_variable(server: EchoServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(server) != 0
    told = capsys.readouterr().err
    assert "gave 401" in told
    assert "--api-key, or in SGLANG_JAX_API_KEY" in told
    assert run(cache_report, "cache-report", ["--url", server.url]) != 0
    told = capsys.readouterr().err
    assert "status 401" in told
    assert "--api-key, or in SGLANG_JAX_ADMIN_API_KEY" in told


def test_the_help_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bench_serving, "bench serving", ["--help"]) == 0
    assert "SGLANG_JAX_API_KEY" in capsys.readouterr().out
