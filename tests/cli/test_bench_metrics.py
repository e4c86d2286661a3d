"""The arithmetic of latencies, against hand-computed cases."""

from __future__ import annotations

import pytest

from sglang_jax.cli.bench.metrics import (
    Chunk,
    RequestRecord,
    distribution,
    offline_summary,
    samples,
    serving_summary,
    tokens_per_chunk,
)


def record(start: float, *chunks: tuple[float, int | None], output_tokens: int, **fields: object) -> RequestRecord:
    made = RequestRecord(
        start=start,
        end=chunks[-1][0] if chunks else start,
        chunks=[Chunk(time, tokens) for time, tokens in chunks],
        output_tokens=output_tokens,
        requested_tokens=output_tokens,
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_one_token_at_a_time() -> None:
    request = record(10.0, (10.5, 1), (10.7, 2), (11.0, 3), output_tokens=3)
    assert request.time_to_first_token == pytest.approx(0.5)
    assert request.end_to_end == pytest.approx(1.0)
    assert request.time_per_output_token == pytest.approx(0.25)  # 0.5 s for the two later tokens
    assert request.inter_token_latencies() == pytest.approx([0.2, 0.3])
    assert request.chunk_gaps() == pytest.approx([0.2, 0.3])


def test_a_chunk_of_several_tokens_counts_as_several() -> None:
    request = record(0.0, (1.0, 1), (1.3, 4), (1.4, 5), output_tokens=5)
    assert request.inter_token_latencies() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert request.chunk_gaps() == pytest.approx([0.3, 0.1])
    assert request.time_per_output_token == pytest.approx(0.1)


def test_tokens_of_the_first_output_have_no_interval() -> None:
    request = record(0.0, (1.0, 3), (1.5, 4), (2.0, 5), output_tokens=5)
    assert request.inter_token_latencies() == pytest.approx([0.5, 0.5])
    assert request.time_per_output_token == pytest.approx(0.5)


def test_intervals_add_up_to_the_time_after_the_first_output() -> None:
    request = record(0.0, (0.4, 2), (0.9, 5), (1.0, 6), (3.0, 13), output_tokens=13)
    intervals = request.inter_token_latencies()
    assert intervals is not None
    assert len(intervals) == 11
    assert sum(intervals) == pytest.approx(2.6)


def test_missing_counts_are_known_when_chunks_are_tokens() -> None:
    request = record(0.0, (1.0, None), (1.2, None), (1.6, None), output_tokens=3)
    assert request.inter_token_latencies() == pytest.approx([0.2, 0.4])


def test_missing_counts_are_not_guessed() -> None:
    request = record(0.0, (1.0, None), (2.0, None), output_tokens=5)
    assert request.inter_token_latencies() is None
    assert request.chunk_gaps() == pytest.approx([1.0])
    assert request.time_per_output_token == pytest.approx(0.25)  # the first output counts as one token


def test_a_finish_after_the_last_text_counts_end_to_end() -> None:
    request = record(0.0, (1.0, 1), (2.0, 2), output_tokens=3, end=3.0)
    assert request.end_to_end == 3.0
    assert request.time_per_output_token == pytest.approx(1.0)


def test_a_single_token_has_no_inter_token_latency() -> None:
    request = record(0.0, (1.0, 1), output_tokens=1)
    assert request.time_per_output_token is None
    assert request.inter_token_latencies() == []
    assert samples([request]).tpot == []


def test_percentiles_interpolate() -> None:
    figures = distribution("ttft", [0.001 * value for value in range(1, 102)])
    assert figures == pytest.approx(
        {
            "mean_ttft_ms": 51.0,
            "median_ttft_ms": 51.0,
            "std_ttft_ms": 29.154759,
            "max_ttft_ms": 101.0,
            "p90_ttft_ms": 91.0,
            "p95_ttft_ms": 96.0,
            "p99_ttft_ms": 100.0,
        }
    )
    assert distribution("ttft", []) == {}


def test_a_summary_counts_what_succeeded() -> None:
    records = [
        record(0.0, (1.0, 1), (2.0, 2), output_tokens=2, prompt_tokens=10, cached_tokens=4),
        record(0.0, (1.0, 1), (4.0, 2), output_tokens=2, prompt_tokens=30, requested_tokens=3),
        record(0.0, output_tokens=50, prompt_tokens=70, error="refused"),
    ]
    figures = serving_summary(records, duration=4.0)
    assert figures["completed"] == 2
    assert figures["failed"] == 1
    assert figures["short_outputs"] == 1
    assert figures["total_input_tokens"] == 40
    assert figures["total_output_tokens"] == 4
    assert figures["cache_hit_rate"] == pytest.approx(0.1)
    assert figures["request_throughput"] == pytest.approx(0.5)
    assert figures["input_throughput"] == pytest.approx(10.0)
    assert figures["output_throughput"] == pytest.approx(1.0)
    assert figures["total_throughput"] == pytest.approx(11.0)
    assert figures["concurrency"] == pytest.approx(1.5)  # 2 s + 4 s of requests in 4 s
    assert figures["mean_itl_ms"] == pytest.approx(2000.0)
    assert figures["mean_ttft_ms"] == pytest.approx(1000.0)
    assert figures["mean_e2e_latency_ms"] == pytest.approx(3000.0)


def test_offline_rates() -> None:
    figures = offline_summary(
        duration=2.0, requests=4, input_tokens=100, cached_tokens=10, output_tokens=60, last_throughput=33.0
    )
    assert figures["last_gen_throughput"] == 33.0
    assert figures["request_throughput"] == 2.0
    assert figures["input_throughput"] == 50.0
    assert figures["output_throughput"] == 30.0
    assert figures["total_throughput"] == 80.0


def test_tokens_are_spread_over_chunks_only_without_counts() -> None:
    assert tokens_per_chunk(record(0.0, (1.0, 2), (2.0, 5), output_tokens=5)) == [2.0, 3.0]
    assert tokens_per_chunk(record(0.0, (1.0, None), (2.0, None), output_tokens=5)) == [2.5, 2.5]
