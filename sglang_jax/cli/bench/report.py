"""Figures as text for people, and as lines of JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_jax.cli.bench.metrics import PERCENTILES

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "chunk_gap": "gap between chunks",
    "e2e_latency": "end-to-end latency",
}


def format_serving(figures: Mapping[str, float | int]) -> str:
    """The summary of `bench serving`: counts and rates, then a table of latencies in milliseconds."""
    statistics = ["mean", "median", *(f"p{percentile}" for percentile in PERCENTILES)]
    lines = [
        _counts(figures, requests="completed", seconds="duration"),
        f"failed {figures['failed']}, shorter than asked {figures['short_outputs']}, "
        f"mean concurrency {figures['concurrency']:.2f}",
        _rates(figures),
        "",
        f"{'milliseconds':<24}" + "".join(f"{statistic:>11}" for statistic in statistics),
    ]
    for name, title in _LATENCIES.items():
        values = [figures.get(f"{statistic}_{name}_ms") for statistic in statistics]
        cells = "".join("          -" if value is None else f"{value:>11.2f}" for value in values)
        lines.append(f"{title:<24}{cells}")
    if figures["requests_with_itl"] < figures["completed"]:
        lines.append(
            f"Inter-token latency is of {figures['requests_with_itl']} of {figures['completed']} requests: "
            "for the others the server did not say how many tokens each chunk held."
        )
    return "\n".join(lines)


def format_offline(figures: Mapping[str, float | int]) -> str:
    """The summary of `bench offline`."""
    return "\n".join([_counts(figures, requests="successful_requests", seconds="total_latency"), _rates(figures)])


def _counts(figures: Mapping[str, float | int], *, requests: str, seconds: str) -> str:
    return (
        f"{figures[requests]} requests in {figures[seconds]:.2f} s: {figures['total_input_tokens']} input tokens "
        f"({figures['total_cached_tokens']} from the cache), {figures['total_output_tokens']} output tokens"
    )


def _rates(figures: Mapping[str, float | int]) -> str:
    return (
        f"per second: {figures['request_throughput']:.2f} requests, {figures['input_throughput']:.1f} input tokens, "
        f"{figures['output_throughput']:.1f} output tokens, {figures['total_throughput']:.1f} tokens in all"
    )


def append_json_line(path: Path, line: Mapping[str, Any]) -> None:
    """Adds one object to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
