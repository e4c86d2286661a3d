"""`bench offline`: throughput of an engine in this process, with every prompt handed over at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from pydantic import BaseModel, ConfigDict, Field

from sglang_jax.cli.bench.metrics import offline_summary
from sglang_jax.cli.bench.report import append_json_line, format_offline
from sglang_jax.cli.bench.workloads import Conversation, WorkloadConfig, make_workload
from sglang_jax.cli.options import options_of
from sglang_jax.config import EngineConfig
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.errors import ConfigError
from sglang_jax.sampling import SamplingParams

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[GenerateOutput]]
"""Prompts as token ids and one `SamplingParams` for each, to one finished output for each, in their order."""


class OfflineConfig(BaseModel):
    """What `bench offline` has besides an engine and a workload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    result_filename: Path | None = Field(None, description="file to which a line of JSON is appended")


@dataclass(slots=True)
class Totals:
    """What a run added up to. `seconds` counts generation alone."""

    seconds: float = 0.0
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@click.command()
@options_of(engine=EngineConfig, workload=WorkloadConfig, offline=OfflineConfig)
def bench_offline(engine: EngineConfig, workload: WorkloadConfig, offline: OfflineConfig) -> int:
    """Measure the throughput of an engine without a server."""
    from sglang_jax.engine.engine import Engine

    with Engine(config=engine) as running:
        context_length = running.model_info.context_length
        if workload.longest_context > context_length:
            raise ConfigError(
                f"the workload's longest request has {workload.longest_context} tokens, "
                f"the context length is {context_length}"
            )

        def generate(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[GenerateOutput]:
            outputs = running.generate(prompts, sampling)
            return outputs if isinstance(outputs, list) else [outputs]

        totals = run_workload(generate, make_workload(workload, running.model_info.vocab_size))
        compiles = running.stats.compiles_after_warm_up
    figures = offline_summary(
        duration=totals.seconds,
        requests=totals.requests,
        input_tokens=totals.input_tokens,
        cached_tokens=totals.cached_tokens,
        output_tokens=totals.output_tokens,
    )
    click.echo(format_offline(figures))
    if offline.result_filename is not None:
        settings = {**engine.model_dump(mode="json"), **workload.model_dump(mode="json")}
        append_json_line(offline.result_filename, {**settings, **figures, "compiles_after_warm_up": compiles})
    return 0


def run_workload(generate: Generate, conversations: Sequence[Conversation]) -> Totals:
    """Runs the first turn of every conversation as one batch, then every second turn, and so on.

    Outputs have exactly the length asked for: greedy, end-of-sequence tokens ignored.
    """
    totals = Totals()
    said: list[list[int]] = [[] for _ in conversations]
    for number in range(max(len(conversation.turns) for conversation in conversations)):
        live = [i for i, conversation in enumerate(conversations) if number < len(conversation.turns)]
        turns = [conversations[i].turns[number] for i in live]
        for i, turn in zip(live, turns, strict=True):
            said[i] += turn.token_ids
        sampling = [SamplingParams(max_new_tokens=turn.output_len, temperature=0.0, ignore_eos=True) for turn in turns]
        start = time.perf_counter()
        outputs = generate([said[i] for i in live], sampling)
        totals.seconds += time.perf_counter() - start
        for i, output in zip(live, outputs, strict=True):
            totals.requests += 1
            totals.input_tokens += output.prompt_tokens
            totals.cached_tokens += output.cached_tokens
            totals.output_tokens += output.completion_tokens
            said[i] += output.output_ids
    return totals
