"""Latency and throughput from a client's records, as text, JSON lines and a plot.

The four latencies of a streamed request, all in seconds:

- TTFT: from sending the request to its first output; E2E: to its end.
- TPOT: mean time per output token after the first output.
- ITL: the time of each later token. A chunk of k tokens that arrives `gap` after the previous one counts as k tokens of
  `gap / k`, so that neither the length nor the number of chunks distorts the result. TTFT includes the wait for the
  tokens of the first output, so they have no interval, and TPOT does not count them.

Chunk gaps, the times between outputs of a stream, are reported too. A request has no ITL if its server does not send
the tokens per chunk, and chunks are not one per token; the number of requests with ITL is reported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from sglang_jax.errors import how_to_install

PERCENTILES = (90, 95, 99)

_STATISTICS = ("mean", "median", *(f"p{percentile}" for percentile in PERCENTILES), "max")

_LATENCIES = {
    "e2e_latency": ("End-to-End Latency", "E2E Latency"),
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-Token Latency", "ITL"),
    "chunk_gap": ("Gap between Chunks", "Chunk Gap"),
}
"""The title of each latency, and its name in rows."""

_SERVING_COUNTS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Outputs shorter than asked:", "short_outputs"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total cached tokens:", "total_cached_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Total generated tokens (retokenized):", "total_output_tokens_retokenized"),
)
_OFFLINE_COUNTS = (
    ("Successful requests:", "successful_requests"),
    ("Benchmark duration (s):", "total_latency"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total cached tokens:", "total_cached_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Last generation throughput (tok/s):", "last_gen_throughput"),
)
_RATES = (
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
)
"""The labels of rows, which published scripts search for, and their figures."""

_WIDTH = 50

BINS = 60
"""Time intervals in the plot of throughput."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Output that arrived at once. `tokens`: output tokens so far, None if the server does not send them."""

    time: float
    tokens: int | None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A client's record of one request. Times are of `time.perf_counter()`, in seconds. `end`: when the last output or
    the finish reason arrived; `chunks`: empty without streaming; `text`: the output."""

    start: float = 0.0
    end: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requested_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunks[0].time - self.start if self.chunks else None

    @property
    def end_to_end(self) -> float:
        return self.end - self.start

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds; None if no token arrived after the first output."""
        if not self.chunks:
            return None
        later_tokens = self.output_tokens - (self.chunks[0].tokens or 1)
        return (self.end - self.chunks[0].time) / later_tokens if later_tokens > 0 else None

    def chunk_gaps(self) -> list[float]:
        times = [chunk.time for chunk in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]

    def inter_token_latencies(self) -> list[float] | None:
        """Returns the seconds of each token after the first output; None if the tokens of each chunk are unknown."""
        counts = self._token_counts()
        if counts is None:
            return None
        latencies: list[float] = []
        for gap, (earlier, later) in zip(self.chunk_gaps(), pairwise(counts), strict=True):
            tokens = later - earlier
            if tokens > 0:
                latencies.extend([gap / tokens] * tokens)
        return latencies

    def _token_counts(self) -> list[int] | None:
        """Returns the output tokens up to each chunk; None if they are unknown."""
        counts = [chunk.tokens for chunk in self.chunks if chunk.tokens is not None]
        if len(counts) == len(self.chunks):
            return counts
        if len(self.chunks) == self.output_tokens:
            return list(range(1, self.output_tokens + 1))
        return None


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Returns `mean_<name>_ms`, `median_<name>_ms`, `std_<name>_ms`, `max_<name>_ms` and percentiles, interpolated
    linearly; empty without samples."""
    if not seconds:
        return {}
    milliseconds = np.asarray(seconds) * 1e3
    values = {
        f"mean_{name}_ms": float(np.mean(milliseconds)),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(np.std(milliseconds)),
        f"max_{name}_ms": float(np.max(milliseconds)),
    }
    for percentile in PERCENTILES:
        values[f"p{percentile}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return values


@dataclass(frozen=True, slots=True)
class Samples:
    """The latencies of all successful requests, in seconds."""

    ttft: list[float]
    tpot: list[float]
    itl: list[float]
    chunk_gap: list[float]
    e2e: list[float]
    requests_with_itl: int


def samples(records: Sequence[RequestRecord]) -> Samples:
    done = [record for record in records if record.ok]
    intervals = [record.inter_token_latencies() for record in done]
    return Samples(
        ttft=[value for record in done if (value := record.time_to_first_token) is not None],
        tpot=[value for record in done if (value := record.time_per_output_token) is not None],
        itl=[value for values in intervals if values is not None for value in values],
        chunk_gap=[gap for record in done for gap in record.chunk_gaps()],
        e2e=[record.end_to_end for record in done],
        requests_with_itl=sum(values is not None for values in intervals),
    )


def serving_summary(
    records: Sequence[RequestRecord], duration: float, retokenized: int | None = None
) -> dict[str, float | int]:
    """Returns counts, rates per second over `duration` seconds, and latencies in milliseconds. `concurrency`: mean
    number of requests in flight (Little's law). Failed requests only count as failed. `retokenized`: tokens of all
    outputs' texts, None if they are unknown."""
    done = [record for record in records if record.ok]
    measured = samples(records)
    input_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    cached_tokens = sum(record.cached_tokens for record in done)
    figures: dict[str, float | int] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "short_outputs": sum(record.output_tokens < record.requested_tokens for record in done),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": cached_tokens,
        "total_output_tokens": output_tokens,
        "cache_hit_rate": cached_tokens / input_tokens if input_tokens else 0.0,
        "request_throughput": len(done) / duration,
        "input_throughput": input_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (input_tokens + output_tokens) / duration,
        "concurrency": sum(measured.e2e) / duration,
        "requests_with_itl": measured.requests_with_itl,
    }
    if retokenized is not None:
        figures["total_output_tokens_retokenized"] = retokenized
    for name, seconds in (
        ("ttft", measured.ttft),
        ("tpot", measured.tpot),
        ("itl", measured.itl),
        ("chunk_gap", measured.chunk_gap),
        ("e2e_latency", measured.e2e),
    ):
        figures |= distribution(name, seconds)
    return figures


def offline_summary(
    *,
    duration: float,
    requests: int,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    last_throughput: float,
) -> dict[str, float | int]:
    """Returns counts, and rates per second over `duration` seconds, of an offline batch. `last_throughput`: output
    tokens per second in the engine's last measurement."""
    return {
        "total_latency": duration,
        "successful_requests": requests,
        "total_input_tokens": input_tokens,
        "total_cached_tokens": cached_tokens,
        "total_output_tokens": output_tokens,
        "last_gen_throughput": last_throughput,
        "request_throughput": requests / duration,
        "input_throughput": input_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (input_tokens + output_tokens) / duration,
    }


def format_serving(
    figures: Mapping[str, float | int], *, backend: str, request_rate: float, max_concurrency: int | None
) -> str:
    """Returns the report of `bench serving` in rows of a label and a value, which scripts for other engines' reports
    read too: counts and rates, then each latency in milliseconds."""
    lines = [_title("Serving Benchmark Result", "=")]
    lines += [
        _row("Backend:", backend),
        _row("Traffic request rate:", str(request_rate)),
        _row("Max request concurrency:", "not set" if max_concurrency is None else str(max_concurrency)),
    ]
    lines += _rows(figures, _SERVING_COUNTS + _RATES)
    lines.append(_row("Concurrency:", f"{figures['concurrency']:.2f}"))
    for name, (title, short) in _LATENCIES.items():
        found = [(statistic, figures.get(f"{statistic}_{name}_ms")) for statistic in _STATISTICS]
        lines.append(_title(title, "-"))
        lines += [_row(f"{each.title()} {short} (ms):", f"{it:.2f}") for each, it in found if it is not None]
    lines.append("=" * _WIDTH)
    if figures["requests_with_itl"] < figures["completed"]:
        lines.append(
            f"Inter-token latency covers {figures['requests_with_itl']} of {figures['completed']} requests: "
            "for the others, the server did not send the number of tokens per chunk."
        )
    if "total_output_tokens_retokenized" not in figures:
        lines.append(
            "Outputs were not tokenized again: the server's /tokenize gave no count, and --tokenizer names none."
        )
    return "\n".join(lines)


def format_offline(figures: Mapping[str, float | int]) -> str:
    """Returns the report of `bench offline`, in the same rows."""
    rows = _rows(figures, _OFFLINE_COUNTS + _RATES)
    return "\n".join(
        [_title("Offline Throughput Benchmark Result", "="), _row("Backend:", "engine"), *rows, "=" * _WIDTH]
    )


def _title(text: str, line: str) -> str:
    return f" {text} ".center(_WIDTH, line) if line == "=" else text.center(_WIDTH, line)


def _row(label: str, value: str) -> str:
    return f"{label:<40} {value}"


def _rows(figures: Mapping[str, float | int], labels: Sequence[tuple[str, str]]) -> list[str]:
    """One row for each figure that there is: whole numbers as they are, others with two places."""
    found = [(label, figures[name]) for label, name in labels if name in figures]
    return [_row(label, f"{value:.2f}" if isinstance(value, float) else str(value)) for label, value in found]


def check_plotting() -> None:
    """Raises `click.UsageError` with the remedy if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError(f"--plot needs matplotlib: {how_to_install('bench')}")


def plot_serving(path: Path, records: Sequence[RequestRecord], *, title: str) -> None:
    """Plots the distributions of TTFT, ITL and E2E, and output tokens per second over time, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = samples(records)
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    _plot_distribution(axes[0, 0], "time to first token", measured.ttft)
    _plot_distribution(axes[0, 1], "inter-token latency", measured.itl)
    _plot_distribution(axes[1, 0], "end-to-end latency", measured.e2e)
    _plot_throughput(axes[1, 1], records)
    figure.savefig(path, format="png", dpi=120)


def _plot_distribution(axes: Any, name: str, seconds: Sequence[float]) -> None:
    """Plots the fraction of samples that took at most a given time."""
    milliseconds = np.sort(np.asarray(seconds)) * 1e3
    axes.step(milliseconds, np.arange(1, milliseconds.size + 1) / max(milliseconds.size, 1), where="post")
    axes.set(xlabel=f"{name} [ms]", ylabel="share of samples", ylim=(0, 1))
    axes.grid(alpha=0.3)


def _plot_throughput(axes: Any, records: Sequence[RequestRecord]) -> None:
    done = [record for record in records if record.ok and record.chunks]
    axes.set(xlabel="time [s]", ylabel="output tokens per second")
    axes.grid(alpha=0.3)
    if not done:
        return
    start = min(record.start for record in done)
    times = np.concatenate([[chunk.time - start for chunk in record.chunks] for record in done])
    # A request's tokens are spread evenly over its chunks if the server does not send the tokens of each.
    weights = np.concatenate([tokens_per_chunk(record) for record in done])
    counts, edges = np.histogram(times, bins=BINS, weights=weights, range=(0.0, float(times.max())))
    axes.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)


def tokens_per_chunk(record: RequestRecord) -> list[float]:
    """Returns the tokens of each chunk; the request's mean for each if the server sent only the sum."""
    counts = [chunk.tokens for chunk in record.chunks if chunk.tokens is not None]
    if len(counts) == len(record.chunks):
        return [float(later - earlier) for earlier, later in pairwise([0, *counts])]
    return [record.output_tokens / len(record.chunks)] * len(record.chunks)
