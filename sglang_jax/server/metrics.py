"""Prometheus metrics, with SGLang's names so that existing dashboards work."""

from __future__ import annotations

import math
import re
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sglang_jax.engine.types import EngineClient, OutputDelta, ReplicaLoad, ReplicaState
from sglang_jax.scheduler.messages import SchedulerStats
from sglang_jax.server.callers import require_admin

ALIVE = (ReplicaState.SERVING, ReplicaState.DRAINING)

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6, 1, 2, 4, 6, 10, 20, 40, 60, 100, 200, 400)
TOKEN_LATENCY_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.4, 0.8, 2, 5)
"""Upper bounds of the histograms, in seconds."""


_ODD_VERSION = re.compile(r";\s*version=(?![0-9]{1,4}(\.[0-9]{1,4}){0,3}\s*(;|$))")
"""An odd version in a scraper's Accept header: prometheus_client fails on versions that are not numbers."""


class SchedulerCollector(Collector):
    """Reads the schedulers' newest statistics at each scrape. With replicas, the label `dp_rank` has their number."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self._client = client
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        loads = self._client.loads()
        names = ["model_name"] if len(loads) == 1 and not loads[0].address else ["model_name", "dp_rank"]
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for load in loads:
            labels = [self._model_name, str(load.index)][: len(names)]
            for name, (value, text) in self._gauges(load).items():
                gauge = families.setdefault(name, GaugeMetricFamily(f"sglang:{name}", text, labels=names))
                gauge.add_metric(labels, value)
            for name, (value, text) in self._counters(load.stats).items():
                counter = families.setdefault(name, CounterMetricFamily(f"sglang:{name}", text, labels=names))
                counter.add_metric(labels, value)
        yield from families.values()
        if any(load.stats.experts for load in loads):
            yield self._balancedness(loads, names)

    def _balancedness(self, loads: list[ReplicaLoad], names: list[str]) -> GaugeMetricFamily:
        """One value per layer: one per expert would be thousands."""
        text = "Mean over maximum of the tokens of a layer's experts in the last minute."
        family = GaugeMetricFamily("sglang:expert_balancedness", text, labels=[*names, "layer"])
        for load in loads:
            labels = [self._model_name, str(load.index)][: len(names)]
            for one in load.stats.experts:
                family.add_metric([*labels, str(one.layer)], one.balancedness)
        return family

    def _gauges(self, load: ReplicaLoad) -> dict[str, tuple[float, str]]:
        stats = load.stats
        groups = {
            group.usage_name.replace(" ", "_"): (
                group.usage,
                f"Used fraction of the {group.name} {'KV pool' if group.unit == 'token' else 'state slots'}.",
            )
            for group in stats.groups
        }
        groups |= {
            f"{group.name.replace(' ', '_')}_session_held_{group.unit}s": (
                group.session_tokens,
                f"{group.unit.capitalize()}s of the {group.name} pool that sessions pin.",
            )
            for group in stats.groups
        }
        return groups | {
            "num_running_reqs": (stats.num_running, "Requests that hold a row."),
            "num_queue_reqs": (stats.num_waiting, "Requests that wait for a row."),
            "num_used_tokens": (stats.num_used_tokens, "KV tokens in use, neither free nor evictable."),
            "max_total_num_tokens": (stats.max_total_tokens, "Tokens in the KV pool."),
            "token_usage": (stats.token_usage, "Used fraction of the KV pool; with several pools, of the fullest."),
            "gen_throughput": (stats.gen_throughput, "Output tokens per second."),
            "cache_hit_rate": (stats.cache_hit_rate, "Fraction of prompt tokens found in the prefix cache."),
            "num_streaming_sessions": (stats.num_sessions, "Open sessions."),
            "streaming_session_held_tokens": (stats.num_session_tokens, "KV tokens that sessions pin."),
            "spec_accept_rate": (stats.accept_rate, "Fraction of guessed tokens that were accepted."),
            "spec_accept_length": (stats.accept_length, "Mean tokens per request in a step with guesses."),
            "engine_silent_seconds": (
                load.silent_seconds,
                "Seconds without a step although there is work; see --watchdog-timeout.",
            ),
            "programs_left": (stats.programs_left, "Programs that are still compiled in the background."),
            "engine_alive": (float(load.state in ALIVE), "1 while the engine process runs."),
        }

    def _counters(self, stats: SchedulerStats) -> dict[str, tuple[int, str]]:
        return {
            "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of requests that got a row."),
            "generation_tokens": (stats.generation_tokens, "Output tokens."),
            "cached_tokens": (stats.cached_tokens, "Prompt tokens found in the prefix cache."),
            "num_aborted_requests": (stats.num_aborted, "Requests aborted by their clients or by /abort_request."),
            "num_retractions": (
                stats.num_retractions,
                "Times that a running request was retracted and lost its KV cache.",
            ),
            "num_evicted_pages": (stats.num_evicted_pages, "Pages of cached prefixes evicted for lack of room."),
            "num_session_pins_let_go": (
                stats.num_pins_let_go,
                "Times that a session lost its pin because others needed the memory.",
            ),
            "num_sessions_timed_out": (stats.num_sessions_timed_out, "Sessions closed by their timeout."),
            "spec_verify": (stats.num_draft_steps, "Steps of a request with guessed tokens."),
            "spec_draft_tokens": (stats.num_draft_tokens, "Guessed tokens."),
            "spec_accepted_tokens": (stats.num_accepted_tokens, "Accepted guesses."),
            **(
                {"expert_tokens": (sum(one.tokens for one in stats.experts), "Choices of an expert by a token.")}
                if stats.experts
                else {}
            ),
            "num_memory_faults": (stats.num_memory_faults, "Failed checks of the KV page accounting at idle."),
            "compiles_after_warm_up": (stats.compiles_after_warm_up, "Programs compiled while a step waited for them."),
        }


class LatencyHistogram(Collector):
    """A histogram of seconds that one thread fills and reads. prometheus_client's own takes two locks for each value
    and cannot count one several times: for each token, that would cost more than the rest of a stream's work here."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], model_name: str) -> None:
        self._name = name
        self._text = text
        self._bounds = (*buckets, math.inf)
        self._labels = [model_name]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets, in seconds, without the last, which is infinite."""
        return self._bounds[:-1]

    @property
    def counts(self) -> list[int]:
        """Values in each bucket since the start; one more bucket than bounds."""
        return list(self._counts)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric(self._labels, [(bound, float(count)) for bound, count in buckets], self._sum)
        yield family


class ServerMetrics:
    """The metrics of the server and of the schedulers, in one registry."""

    def __init__(self, client: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SchedulerCollector(client, model_name))
        ProcessCollector(registry=self.registry)
        self.http_requests = Counter(
            "sglang:http_requests",
            "HTTP responses by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self.num_requests = self._counter(
            "num_requests", "Completed prompts; all completions of a prompt count once.", model_name
        )
        self.queue_time = self._histogram(
            "queue_time_seconds",
            "Time from a completion's arrival at an engine until it gets a row.",
            LATENCY_BUCKETS,
            model_name,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from the request to a completion's first token.",
            LATENCY_BUCKETS,
            model_name,
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a completion.", TOKEN_LATENCY_BUCKETS, model_name
        )
        self.end_to_end = self._histogram(
            "e2e_request_latency_seconds",
            "Time from the request to the end of a completion.",
            LATENCY_BUCKETS,
            model_name,
        )

    def timing(self, *, stream: bool) -> RequestTiming:
        return RequestTiming(self, stream=stream)

    def _counter(self, name: str, text: str, model_name: str) -> Counter:
        return Counter(f"sglang:{name}", text, ["model_name"], registry=self.registry).labels(model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], model_name: str) -> LatencyHistogram:
        histogram = LatencyHistogram(f"sglang:{name}", text, buckets, model_name)
        self.registry.register(histogram)
        return histogram


class RequestTiming:
    """Times the completions of one prompt. Streamed tokens are timed as they arrive. For other completions the engine
    reports when it sampled the first and the last token, and the mean time between tokens counts once for each token
    after the first; a server behind this one (`--connect`) reports these times only to operators' keys."""

    def __init__(self, metrics: ServerMetrics, *, stream: bool) -> None:
        self._metrics = metrics
        self._stream = stream
        self._begin = time.monotonic()
        self._last: dict[int, float] = {}

    def output(self, delta: OutputDelta) -> None:
        now, metrics = time.monotonic(), self._metrics
        if delta.queue_seconds is not None:
            metrics.queue_time.observe(delta.queue_seconds)
        if not self._stream:
            if delta.sampled is not None:
                first, last = delta.sampled
                metrics.first_token.observe(max(first - self._begin, 0.0))
                if (others := delta.completion_tokens - 1) > 0:
                    metrics.inter_token.observe((last - first) / others, others)
        elif num_tokens := len(delta.token_ids):
            before = self._last.get(delta.index)
            if before is None:
                metrics.first_token.observe(now - self._begin)
            else:
                metrics.inter_token.observe((now - before) / num_tokens, num_tokens)
            self._last[delta.index] = now
        if delta.finish is not None:
            metrics.end_to_end.observe(now - self._begin)

    def answered(self) -> None:
        """Counts the prompt as answered. Not called if it fails or its client disconnects."""
        self._metrics.num_requests.inc()


def metrics_router(metrics: ServerMetrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", dependencies=[Depends(require_admin)])
    async def scrape(request: Request) -> Response:
        """All metrics, in the text format of Prometheus or OpenMetrics."""
        offers = request.headers.get("accept", "").split(",")
        encode, content_type = choose_encoder(",".join(one for one in offers if not _ODD_VERSION.search(one)))
        return Response(encode(metrics.registry), headers={"Content-Type": content_type})

    return router
