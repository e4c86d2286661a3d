"""`bench serving`: latency and throughput of a running server. `bench offline`: throughput of an engine in this process
that gets all prompts at once."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click
import httpx2
from pydantic import BaseModel, ConfigDict, Field, field_validator
from tqdm import tqdm

from sglang_jax.cli.bench.load import Api, Target, run_load
from sglang_jax.cli.bench.metrics import (
    RequestRecord,
    check_plotting,
    format_offline,
    format_serving,
    offline_summary,
    plot_serving,
    serving_summary,
)
from sglang_jax.cli.bench.sharegpt import Pair, read_pairs, sample_pairs
from sglang_jax.cli.bench.workloads import WORDS, Conversation, WorkloadConfig, longest_context, make_workload
from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import options_of, refused_options, with_model
from sglang_jax.cli.result_file import append_json_line, check_result_file, writing
from sglang_jax.cli.server_client import (
    ProtocolError,
    TokenCount,
    call,
    first_model,
    model_info,
    open_client,
    read_answer,
)
from sglang_jax.cli.starting import start_engine
from sglang_jax.config import EngineConfig, Environment, PositiveInt
from sglang_jax.engine.types import GenerateOutput, TextTokenizer
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.sampling import SamplingParams
from sglang_jax.spellings import BENCHMARK_REFUSED

if TYPE_CHECKING:
    from sglang_jax.checkpoint.tokenizer import Tokenizer

WARMUP_SEED_OFFSET = 1_000_003
"""Warm-up prompts have another seed, so that the cache does not contain the measured ones."""

SECONDS_BETWEEN_LINES = 10.0
"""Seconds between lines of progress without a terminal."""

WARMUP_TOKENS = 32
"""Prompt and output tokens of a warm-up request if the measured prompts are from a file."""


class LoadConfig(BaseModel):
    """A server and the load on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Api = Field(Api.SGLANG, description="route: /generate, /v1/completions or /v1/chat/completions")
    base_url: str | None = Field(None, description="URL of the server; default: http://HOST:PORT")
    host: str = Field("127.0.0.1", description="address of the server")
    port: int = Field(30000, ge=1, le=65535, description="port of the server")
    api_key: str | None = Field(
        None, description="API key, if the server requires one; also read from SGLANG_JAX_API_KEY"
    )
    model: str | None = Field(None, description="model name in requests; default: the server's first")
    vocab_size: PositiveInt | None = Field(
        None, description="upper limit of random token IDs; default: from the server's /model_info"
    )
    tokenizer: str | None = Field(
        None,
        description="tokenizer of prompts from a file, and of outputs for their count: folder, .gguf file or hub ID; "
        "default: the one that the server's /model_info names, and for the count the server's /tokenize",
    )
    request_rate: float = Field(
        math.inf, gt=0, description="conversations started per second, as a Poisson process; inf: all at once"
    )
    max_concurrency: PositiveInt | None = Field(None, description="maximum concurrent requests; default: no limit")
    warmup_requests: int = Field(1, ge=0, description="requests sent before the measured ones")
    flush_cache: bool = Field(
        False,
        description="flush the server's prefix cache after warm-up; without --api-key, SGLANG_JAX_ADMIN_API_KEY is "
        "the key for it",
    )
    extra_request_body: dict[str, Any] = Field({}, description="JSON object merged into every request's body")
    output_file: Path | None = Field(None, description="file to append the results to, as a line of JSON")
    output_details: bool = Field(False, description="include per-request times in that line")
    plot: Path | None = Field(None, description="PNG file to plot to (needs the extra `bench`)")
    disable_tqdm: bool = Field(False, description="hide the progress bar")

    @field_validator("extra_request_body", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port}"


@click.command()
@refused_options(BENCHMARK_REFUSED)
@options_of(load=LoadConfig, workload=WorkloadConfig)
def bench_serving(load: LoadConfig, workload: WorkloadConfig) -> int:
    """Measure latency and throughput of a running server under load."""
    if load.plot is not None:
        check_plotting()
    check_result_file(load.plot, "--plot")
    check_result_file(load.output_file, "--output-file")
    pairs = None if workload.dataset_path is None else read_pairs(workload.dataset_path)
    records, duration, retokenized = asyncio.run(_measure(load, workload, pairs))
    figures = serving_summary(records, duration, retokenized)
    report = format_serving(
        figures, backend=load.backend, request_rate=load.request_rate, max_concurrency=load.max_concurrency
    )
    click.echo(report)
    for error in sorted({record.error for record in records if record.error is not None}):
        click.echo(f"failed: {error}", err=True)
    if load.output_file is not None:
        append_json_line(load.output_file, "--output-file", _line(load, workload, figures, records))
    if load.plot is not None:
        title = f"{load.backend}, {workload.dataset_name}, {load.request_rate:g} req/s"
        with writing(load.plot, "--plot"):
            plot_serving(load.plot, records, title=title)
    return 0 if all(record.ok for record in records) else 1


async def _measure(
    load: LoadConfig, workload: WorkloadConfig, pairs: Sequence[Pair] | None
) -> tuple[list[RequestRecord], float, int | None]:
    """Runs the load. Returns records, duration in seconds, and tokens of the outputs' texts if they can be counted.
    `pairs`: of a file, None for generated prompts."""
    environment = Environment()
    async with open_client(load.url, load.api_key or environment.api_key) as client:
        model = load.model or await first_model(client)
        tokenizer = None if pairs is None and load.tokenizer is None else await _tokenizer(client, load)
        if pairs is None or tokenizer is None:
            vocab_size = await _vocab_size(client, load)
            conversations = make_workload(workload, vocab_size)
        else:
            vocab_size = load.vocab_size or tokenizer.vocab_size
            conversations = _sampled(workload, pairs, tokenizer)
        target = Target(base_url=load.url, api=load.backend, model=model, extra_body=load.extra_request_body)
        await _warm_up(client, target, load, workload, vocab_size)
        if load.flush_cache:
            await call(client, "POST", "/flush_cache", key=load.api_key or environment.admin_api_key)
        requests = sum(len(conversation.turns) for conversation in conversations)
        with LoadProgress(requests, bar=not load.disable_tqdm and sys.stderr.isatty()) as progress:
            records, duration = await run_load(
                client,
                target,
                conversations,
                request_rate=load.request_rate,
                max_concurrency=load.max_concurrency,
                seed=workload.seed,
                on_done=lambda record: progress.update(),
            )
        texts = [record.text for record in records if record.ok]
        return records, duration, await _retokenized(client, texts, tokenizer)


async def _retokenized(client: httpx2.AsyncClient, texts: Sequence[str], tokenizer: TextTokenizer | None) -> int | None:
    """Returns the tokens of outputs by a tokenizer, or without one by the server's; None if its `/tokenize` does not
    count them."""
    if tokenizer is not None:
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    total = 0
    for text in texts:
        try:
            response = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
            if response.status_code != HTTPStatus.OK:
                return None
            total += read_answer(TokenCount, response.content, "/tokenize").count
        except (httpx2.RequestError, ProtocolError):
            return None
    return total


class LoadProgress:
    """Shows the number of finished requests: with a bar (`bar`), or a line every few seconds."""

    def __init__(self, total: int, *, bar: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._total, self._done = total, 0
        self._bar = tqdm(total=total, unit="req") if bar else None
        self._clock = clock
        self._printed_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._clock() - self._printed_at >= SECONDS_BETWEEN_LINES:
            self._printed_at = self._clock()
            click.echo(f"{self._done} of {self._total} requests finished", err=True)


async def _vocab_size(client: httpx2.AsyncClient, load: LoadConfig) -> int:
    if load.vocab_size is not None:
        return load.vocab_size
    if load.backend is Api.OPENAI_CHAT:
        return len(WORDS)
    vocab_size = (await model_info(client)).vocab_size
    if vocab_size is None:
        raise click.UsageError(f"{load.url}/model_info does not contain the vocabulary size: give --vocab-size")
    return vocab_size


async def _tokenizer(client: httpx2.AsyncClient, load: LoadConfig) -> Tokenizer:
    """Returns the tokenizer of the options, or the server's if its files are on this machine or the hub."""
    from sglang_jax.checkpoint import resolve_tokenizer
    from sglang_jax.checkpoint.tokenizer import load_tokenizer

    name = load.tokenizer
    if name is None:
        name = (await model_info(client)).tokenizer_path
    if name is None:
        raise click.UsageError(f"{load.url}/model_info does not name a tokenizer: give --tokenizer")
    try:
        return load_tokenizer(resolve_tokenizer(name))
    except CheckpointError as error:
        hint = "" if load.tokenizer else "; --tokenizer names a copy on this machine"
        raise ConfigError(f"{error}{hint}") from error


def _sampled(workload: WorkloadConfig, pairs: Sequence[Pair], tokenizer: TextTokenizer) -> list[Conversation]:
    conversations, note = sample_pairs(workload, pairs, tokenizer)
    if note:
        click.echo(note, err=True)
    return conversations


async def _warm_up(
    client: httpx2.AsyncClient, target: Target, load: LoadConfig, workload: WorkloadConfig, vocab_size: int
) -> None:
    seed = workload.seed + WARMUP_SEED_OFFSET
    if workload.dataset_path is None:
        other = workload.model_copy(update={"seed": seed})
    else:
        other = WorkloadConfig(random_input_len=WARMUP_TOKENS, random_output_len=WARMUP_TOKENS, seed=seed)
    drawn = make_workload(other, vocab_size)
    conversations = [Conversation(drawn[i % len(drawn)].turns[:1]) for i in range(load.warmup_requests)]
    if not conversations:
        return
    records, _ = await run_load(
        client,
        target,
        conversations,
        request_rate=math.inf,
        max_concurrency=load.max_concurrency,
        seed=other.seed,
        on_done=lambda record: None,
    )
    for record in records:
        if record.error is not None:
            raise click.ClickException(f"a warm-up request to {load.url} failed: {record.error}")


def _line(
    load: LoadConfig, workload: WorkloadConfig, figures: Mapping[str, float | int], records: Sequence[RequestRecord]
) -> dict[str, Any]:
    line: dict[str, Any] = {
        **load.model_dump(mode="json", exclude={"api_key", "output_file", "output_details", "plot", "disable_tqdm"}),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        **workload.model_dump(mode="json"),
        **figures,
    }
    if load.output_details:
        line["requests"] = [
            {
                "start": record.start - records[0].start,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "error": record.error,
                "chunk_times": [chunk.time - record.start for chunk in record.chunks],
                "chunk_tokens": [chunk.tokens for chunk in record.chunks],
            }
            for record in records
        ]
    return line


Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[GenerateOutput]]
"""Returns one finished output for each prompt (token ids) with its `SamplingParams`, in the same order."""


class OfflineConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    result_filename: Path | None = Field(None, description="file to append the results to, as a line of JSON")


@dataclass(slots=True)
class Totals:
    """Totals of a run. `seconds`: only of generation."""

    seconds: float = 0.0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@options_of(engine=EngineConfig, workload=WorkloadConfig, offline=OfflineConfig)
def bench_offline(engine: EngineConfig, workload: WorkloadConfig, offline: OfflineConfig, model: str | None) -> int:
    """Measure the throughput of MODEL (as for --model-path) without a server."""
    engine = with_model(engine, model)
    check_result_file(offline.result_filename, "--result-filename")
    pairs = None if workload.dataset_path is None else read_pairs(workload.dataset_path)
    with start_engine(engine) as running:
        if pairs is None:
            conversations = make_workload(workload, running.model_info.vocab_size)
        else:
            conversations = _sampled(workload, pairs, running.tokenizer)
        longest, context_length = longest_context(conversations), running.model_info.context_length
        if longest > context_length:
            raise ConfigError(
                f"the workload's longest request has {longest} tokens, the context length is {context_length}"
            )

        def generate(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[GenerateOutput]:
            outputs = running.generate(prompts, sampling)
            return outputs if isinstance(outputs, list) else [outputs]

        totals = run_workload(generate, conversations)
        stats = running.stats
    figures = offline_summary(
        duration=totals.seconds,
        requests=totals.requests,
        input_tokens=totals.input_tokens,
        cached_tokens=totals.cached_tokens,
        output_tokens=totals.output_tokens,
        last_throughput=stats.gen_throughput,
    )
    click.echo(format_offline(figures))
    if offline.result_filename is not None:
        settings = {**engine.model_dump(mode="json"), **workload.model_dump(mode="json")}
        line = {**settings, **figures, "compiles_after_warm_up": stats.compiles_after_warm_up}
        append_json_line(offline.result_filename, "--result-filename", line)
    return 0


def run_workload(generate: Generate, conversations: Sequence[Conversation]) -> Totals:
    """Runs the first turn of every conversation as one batch, then every second turn, and so on. Outputs have exactly
    the requested length: sampling is greedy and ignores end-of-sequence tokens."""
    totals = Totals()
    contexts: list[list[int]] = [[] for _ in conversations]
    for number in range(max(len(conversation.turns) for conversation in conversations)):
        live = [i for i, conversation in enumerate(conversations) if number < len(conversation.turns)]
        turns = [conversations[i].turns[number] for i in live]
        for i, turn in zip(live, turns, strict=True):
            contexts[i] += turn.token_ids
        sampling = [SamplingParams(max_new_tokens=turn.output_len, temperature=0.0, ignore_eos=True) for turn in turns]
        start = time.perf_counter()
        outputs = generate([contexts[i] for i in live], sampling)
        totals.seconds += time.perf_counter() - start
        for i, output in zip(live, outputs, strict=True):
            totals.requests += 1
            totals.input_tokens += output.prompt_tokens
            totals.cached_tokens += output.cached_tokens
            totals.output_tokens += output.completion_tokens
            contexts[i] += output.output_ids
    return totals
