"""Latency and throughput, worked out from what a client saw.

The four latencies of a streamed request, all in seconds:

- TTFT: from sending the request to its first output.
- TPOT: mean time per output token after the first output.
- ITL: the time each later token took. A chunk of k tokens that came `gap` after the one before counts as k tokens of
  `gap / k`, so that neither long chunks nor their number flatter the figure. Tokens that came with the first output
  were waited for in TTFT: they have no interval of their own, and TPOT leaves them out.
- E2E: from sending the request to its end.

Chunk gaps, what a reader of the stream waits for, are reported beside them. Where a server doesn't say how many
tokens a chunk holds and the chunks are not one for each token, the request has no ITL; how many have is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

PERCENTILES = (90, 95, 99)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Output that arrived at once. `tokens`: output tokens so far, None where the server doesn't say."""

    time: float
    tokens: int | None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What a client saw of one request. Times are of `time.perf_counter()`, in seconds.

    `end` is when the last output or the reason for finishing came; `chunks` is empty without streaming.
    """

    start: float
    end: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requested_tokens: int = 0
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
        """None where no token came after the first output."""
        if not self.chunks:
            return None
        later_tokens = self.output_tokens - (self.chunks[0].tokens or 1)
        return (self.end - self.chunks[0].time) / later_tokens if later_tokens > 0 else None

    def chunk_gaps(self) -> list[float]:
        """Seconds between outputs."""
        times = [chunk.time for chunk in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]

    def inter_token_latencies(self) -> list[float] | None:
        """Seconds per token after the first output; None where the tokens of each chunk are not known."""
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
        """Output tokens so far, after each chunk."""
        told = [chunk.tokens for chunk in self.chunks if chunk.tokens is not None]
        if len(told) == len(self.chunks):
            return told
        if len(self.chunks) == self.output_tokens:
            return list(range(1, self.output_tokens + 1))
        return None


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """`mean_<name>_ms` and so on, with linear interpolation between samples; nothing without samples."""
    if not seconds:
        return {}
    milliseconds = np.asarray(seconds) * 1e3
    values = {f"mean_{name}_ms": float(np.mean(milliseconds)), f"median_{name}_ms": float(np.median(milliseconds))}
    for percentile in PERCENTILES:
        values[f"p{percentile}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return values


@dataclass(frozen=True, slots=True)
class Samples:
    """The latencies of all requests that succeeded, in seconds."""

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


def serving_summary(records: Sequence[RequestRecord], duration: float) -> dict[str, float | int]:
    """Counts, rates per second over `duration` seconds, and the latencies in milliseconds.

    `concurrency` is the mean number of requests in flight (Little's law). Failed requests count as failed and
    nowhere else.
    """
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
    *, duration: float, requests: int, input_tokens: int, cached_tokens: int, output_tokens: int
) -> dict[str, float | int]:
    """Counts, and rates per second over `duration` seconds, of a batch run in process."""
    return {
        "total_latency": duration,
        "successful_requests": requests,
        "total_input_tokens": input_tokens,
        "total_cached_tokens": cached_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": requests / duration,
        "input_throughput": input_tokens / duration,
        "output_throughput": output_tokens / duration,
        "total_throughput": (input_tokens + output_tokens) / duration,
    }
