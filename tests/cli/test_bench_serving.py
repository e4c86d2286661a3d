"""The load generator against a server with known answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.streaming_server import VOCAB_SIZE, FakeServer, serve_in_thread

from sglang_jax.cli.bench import metrics
from sglang_jax.cli.bench.commands import LoadConfig, LoadProgress, bench_serving
from sglang_jax.cli.bench.load import arrival_times
from sglang_jax.cli.main import run
from sglang_jax.cli.options import flag_name

SMALL = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "8"]


PUBLISHED_ROWS = {
    "Successful requests:": "completed",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Total generated tokens (retokenized):": "total_output_tokens_retokenized",
    "Request throughput (req/s):": "request_throughput",
    "Input token throughput (tok/s):": "input_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total token throughput (tok/s):": "total_throughput",
    "Concurrency:": "concurrency",
    "Mean E2E Latency (ms):": "mean_e2e_latency_ms",
    "Median E2E Latency (ms):": "median_e2e_latency_ms",
    "Mean TTFT (ms):": "mean_ttft_ms",
    "Median TTFT (ms):": "median_ttft_ms",
    "P99 TTFT (ms):": "p99_ttft_ms",
    "Mean TPOT (ms):": "mean_tpot_ms",
    "Median TPOT (ms):": "median_tpot_ms",
    "P99 TPOT (ms):": "p99_tpot_ms",
    "Mean ITL (ms):": "mean_itl_ms",
    "Median ITL (ms):": "median_itl_ms",
    "P95 ITL (ms):": "p95_itl_ms",
    "P99 ITL (ms):": "p99_itl_ms",
    "Max ITL (ms):": "max_itl_ms",
}
"""Labels that published scripts search for, and their keys in the line of JSON."""


@contextmanager
def served(**settings: Any) -> Iterator[FakeServer]:
    with serve_in_thread(FakeServer(**settings)) as fake:
        yield fake


def measure(fake: FakeServer, output: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Runs the command against a server and returns its line of JSON."""
    command = ["--port", str(fake.port), "--disable-tqdm", "--output-file", str(output), *arguments]
    assert run(bench_serving, "bench_serving", command) == status
    lines = output.read_text().splitlines()
    line: dict[str, Any] = json.loads(lines[-1])
    return line


def test_every_option_is_a_flag() -> None:
    flags = {name for option in bench_serving.params for name in option.opts}
    assert {flag_name(field) for field in LoadConfig.model_fields} <= flags


def test_the_native_route_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(first_delay=0.1, step_delay=0.02, tokenizes=True) as fake:
        line = measure(fake, tmp_path / "out.jsonl", *SMALL, "--warmup-requests", "0")
    assert line["completed"] == 6
    assert line["total_input_tokens"] == 6 * 12
    assert line["total_output_tokens"] == 6 * 8
    assert line["total_cached_tokens"] == 6 * 2
    assert line["requests_with_itl"] == 6
    assert line["request_rate"] == "inf"
    assert line["model"] is None
    assert 95 <= line["median_ttft_ms"] < 1000
    assert line["median_ttft_ms"] < line["median_e2e_latency_ms"] - 90  # the tokens after the first
    assert 18 <= line["median_itl_ms"] < 100
    assert 18 <= line["mean_tpot_ms"] < 100
    assert 230 <= line["median_e2e_latency_ms"] < 2000
    for body in fake.bodies:
        assert len(body["input_ids"]) == 12
        assert max(body["input_ids"]) < VOCAB_SIZE
        assert body["sampling_params"] == {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    assert line["total_output_tokens_retokenized"] == 6 * 8 * 2
    printed = capsys.readouterr().out
    for label, figure in PUBLISHED_ROWS.items():
        (value,) = re.findall(rf"^{re.escape(label)} +([\d.]+)$", printed, re.MULTILINE)
        assert float(value) == pytest.approx(line[figure], abs=0.005), label
    assert "Outputs were not" not in printed


def test_progress_is_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = iter([0.0, 4.0, 11.0, 11.0, 12.0, 22.0, 22.0])
    with LoadProgress(4, bar=False, clock=lambda: next(seconds)) as progress:
        for _ in range(4):
            progress.update()
    assert capsys.readouterr().err == "2 of 4 requests finished\n4 of 4 requests finished\n"


def test_no_bar_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as fake:
        assert run(bench_serving, "bench_serving", ["--port", str(fake.port), *SMALL]) == 0
    assert capsys.readouterr().err == ""


def test_tokens_that_arrive_together_are_counted_separately(tmp_path: Path) -> None:
    # Many chunks: only a few may arrive together while this process is delayed.
    long = ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "40"]
    with served(step_delay=0.08, tokens_per_chunk=4) as fake:
        line = measure(fake, tmp_path / "out.jsonl", *long)
    assert 75 <= line["median_chunk_gap_ms"] < 400
    assert line["mean_itl_ms"] == pytest.approx(line["mean_chunk_gap_ms"] / 4)


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_openai_routes_are_measured(tmp_path: Path, backend: str, path: str) -> None:
    with served() as fake:
        line = measure(fake, tmp_path / "out.jsonl", *SMALL, "--backend", backend, "--warmup-requests", "0")
    assert [called for called, _ in fake.calls] == [path] * 6
    assert line["completed"] == 6
    assert line["total_input_tokens"] == 6 * 11
    assert line["total_output_tokens"] == 6 * 8
    assert line["total_cached_tokens"] == 6 * 3
    assert line["requests_with_itl"] == 6
    body = fake.bodies[0]
    assert body["model"] == "fake-model"
    assert body["max_tokens"] == 8
    assert body["stream_options"] == {"include_usage": True}
    if backend == "openai":
        assert len(body["prompt"]) == 12
    else:
        assert len(body["messages"][0]["content"].split()) == 12


def test_intervals_are_left_out_where_the_server_hides_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tokens_per_chunk=3) as fake:
        line = measure(fake, tmp_path / "out.jsonl", *SMALL, "--backend", "openai")
    assert line["requests_with_itl"] == 0
    assert "mean_itl_ms" not in line
    assert "mean_chunk_gap_ms" in line
    printed = capsys.readouterr().out
    assert "covers 0 of 6 requests" in printed
    assert "ITL (ms)" not in printed
    assert "Outputs were not tokenized again" in printed
    assert "retokenized" not in printed


TURNS = ["--dataset-name", "multi-turn", "--multi-turn-num-turns", "3", "--num-prompts", "2"]
TURNS += ["--random-input-len", "5", "--random-output-len", "4", "--warmup-requests", "0", "--max-concurrency", "1"]


def test_turns_carry_the_conversation(tmp_path: Path) -> None:
    with served() as fake:
        line = measure(fake, tmp_path / "out.jsonl", *TURNS)
    assert line["completed"] == 6
    prompts = [body["input_ids"] for body in fake.bodies]
    assert sorted(len(prompt) for prompt in prompts) == [5, 5, 14, 14, 23, 23]
    longest = next(prompt for prompt in prompts if len(prompt) == 23)
    assert longest[5:9] == longest[14:18] == [0, 1, 2, 3]
    assert any(prompt == longest[:14] for prompt in prompts)
    assert any(prompt == longest[:5] for prompt in prompts)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_turns_carry_text_on_openai_routes(tmp_path: Path, backend: str) -> None:
    with served() as fake:
        measure(fake, tmp_path / "out.jsonl", *TURNS, "--backend", backend)
    if backend == "openai-chat":
        longest = max((body["messages"] for body in fake.bodies), key=len)
        assert [message["role"] for message in longest] == ["user", "assistant"] * 2 + ["user"]
        assert longest[1]["content"] == "aaaa"
    else:
        prompts = sorted((body["prompt"] for body in fake.bodies), key=len)
        assert any(prompts[-1].startswith(prompt + "aaaa ") for prompt in prompts[:-1])


def test_concurrency_is_limited(tmp_path: Path) -> None:
    with served(first_delay=0.02) as fake:
        line = measure(fake, tmp_path / "out.jsonl", *SMALL, "--max-concurrency", "2")
    assert fake.most_at_once == 2
    assert line["concurrency"] <= 2.0
    with served(first_delay=0.1) as fake:
        measure(fake, tmp_path / "out.jsonl", *SMALL)
    assert fake.most_at_once == 6


def test_the_cache_is_emptied_between_warming_up_and_measuring(tmp_path: Path) -> None:
    with served() as fake:
        measure(fake, tmp_path / "out.jsonl", *SMALL, "--warmup-requests", "2", "--flush-cache")
    assert [path for path, _ in fake.calls] == ["/generate"] * 2 + ["/flush_cache"] + ["/generate"] * 6
    warm, measured = fake.bodies[:2], fake.bodies[2:]
    assert not {tuple(body["input_ids"]) for body in warm} & {tuple(body["input_ids"]) for body in measured}


def test_failures_are_counted_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(fail_after=4) as fake:
        line = measure(fake, tmp_path / "out.jsonl", *SMALL, "--warmup-requests", "0", status=1)
    assert (line["completed"], line["failed"]) == (4, 2)
    assert "503" in capsys.readouterr().err


def test_a_failed_warm_up_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with served(fail_after=0) as fake:
        assert run(bench_serving, "bench_serving", ["--port", str(fake.port), *SMALL]) == 1
    assert "warm-up" in capsys.readouterr().err


def test_a_missing_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as fake:
        port = fake.port
    assert run(bench_serving, "bench_serving", ["--port", str(port), *SMALL]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"127.0.0.1:{port}" in message


def test_details_are_written_and_the_extra_body_is_sent(tmp_path: Path) -> None:
    with served() as fake:
        line = measure(
            fake, tmp_path / "out.jsonl", *SMALL, "--output-details", "--extra-request-body", '{"priority": 3}'
        )
    assert all(body["priority"] == 3 for body in fake.bodies)
    assert [request["chunk_tokens"] for request in line["requests"]] == [list(range(1, 9))] * 6


def test_results_are_appended(tmp_path: Path) -> None:
    with served() as fake:
        measure(fake, tmp_path / "out.jsonl", *SMALL)
        measure(fake, tmp_path / "out.jsonl", *SMALL, "--request-rate", "200")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["request_rate"] for line in lines] == ["inf", 200.0]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    with served() as fake:
        measure(fake, tmp_path / "out.jsonl", *SMALL, "--plot", str(tmp_path / "plot.png"))
    content = (tmp_path / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    assert run(bench_serving, "bench_serving", ["--plot", "plot.png"]) == 2
    assert ".[bench]" in capsys.readouterr().err


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = arrival_times(20_000, 50.0, seed=3)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals == arrival_times(20_000, 50.0, seed=3)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.03)  # an exponential's deviation is its mean
    assert arrival_times(3, float("inf"), seed=3) == [0.0, 0.0, 0.0]
