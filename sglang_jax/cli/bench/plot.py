"""The picture of a load test: who waited how long, and when tokens came."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np

from sglang_jax.cli.bench.metrics import RequestRecord, samples

BINS = 60
"""Intervals of time in the plot of throughput."""


def check_plotting() -> None:
    """**Raises** `click.UsageError` naming the remedy where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'sglang-jax[bench]'")


def plot_serving(path: Path, records: Sequence[RequestRecord], *, title: str) -> None:
    """Draws the distributions of TTFT, ITL and E2E, and output tokens per second over time, into a PNG file."""
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
    """The share of samples that took at most so long."""
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
    # A request's tokens are spread evenly over its chunks where the server does not say which held how many.
    weights = np.concatenate([tokens_per_chunk(record) for record in done])
    counts, edges = np.histogram(times, bins=BINS, weights=weights, range=(0.0, float(times.max())))
    axes.stairs(counts / np.diff(edges), edges, fill=True, alpha=0.6)


def tokens_per_chunk(record: RequestRecord) -> list[float]:
    """Tokens of each chunk; the request's mean for all of them where the server told only the sum."""
    told = [chunk.tokens for chunk in record.chunks if chunk.tokens is not None]
    if len(told) == len(record.chunks):
        return [float(later - earlier) for earlier, later in pairwise([0, *told])]
    return [record.output_tokens / len(record.chunks)] * len(record.chunks)
