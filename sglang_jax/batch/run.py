"""Runs the command `batch`, from its options to its exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click
from msgspec import Raw
from uvicorn.loops.auto import auto_loop_factory

from sglang_jax import logs
from sglang_jax.batch.driver import READ_LINES, Driver
from sglang_jax.batch.journal import Journal, LineSet, Sink
from sglang_jax.batch.lines import parse_defaults
from sglang_jax.batch.options import BatchConfig
from sglang_jax.batch.ordered import OrderedJournal, Spool
from sglang_jax.batch.progress import Figures, RunProgress, count_lines
from sglang_jax.batch.run_folder import OptionValue, RunFolder, identify
from sglang_jax.batch.source import FileFormat, Record, Source, open_source, require_pyarrow
from sglang_jax.batch.work_queue import WorkQueue
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.engine.replica import Replica, close_replicas, launch_replicas
from sglang_jax.errors import BatchError, ConfigError, EngineDeadError
from sglang_jax.runner.backends import load_follower
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.callers import Callers

ALL_ANSWERED, SOME_FAILED = 0, 1
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM

WINDOW_BYTES = 64 * 2**20
"""The window counts as full once its lines have this many bytes."""

AHEAD_PER_LOOKAHEAD = 4
"""With `--ordered`, maximum windows of lines read beyond the oldest unfinished line."""

SHAPING_OPTIONS = (
    "model_path",
    "tokenizer_path",
    "load_format",
    "dtype",
    "kv_cache_dtype",
    "context_length",
    "random_seed",
    "sampling_defaults",
    "served_model_name",
    "chat_template",
)
"""Options of the engine that change answers beyond rounding: a resumed run must have the same values."""

Launch = Callable[[ServerConfig, int], Awaitable[list[Replica[AsyncEngineClient]]]]


@dataclass(frozen=True, slots=True)
class _Work:
    """The remaining work. `records`: lines that are not written yet."""

    source: Source
    records: Iterator[Record]
    sink: Sink
    figures: Figures
    defaults: dict[str, Raw]


def run_batch(batch: BatchConfig, engine: EngineConfig, launch: Launch = launch_replicas) -> int:
    """Answers the remaining lines of the input. Returns the exit status. `launch`: starts the replicas; for tests and
    other cores. Raises `BatchError` if the run cannot start or continue, and what `launch` raises."""
    logs.configure(batch.log_level.upper())
    config = server_config(batch, engine)
    if config.node_rank > 0:
        load_follower(config)(config)
        return ALL_ANSWERED
    _check_files(batch)
    defaults = body_defaults(batch)
    with RunFolder(batch.output_path) as folder, ExitStack() as stack:
        folder.claim([batch.output_path, batch.errors], identify(batch.input_path), shaping_options(batch, config))
        files = _OutputFiles(batch.output_path, folder.path)
        journal = stack.enter_context(closing(Journal(files.journal, batch.errors, files.written())))
        sink: Sink = journal
        figures = Figures(before=journal.num_written, failed_before=journal.num_errors)
        if batch.ordered:
            spool = stack.enter_context(closing(Spool(folder.path, journal)))
            figures.before += len(spool)
            figures.failed_before += spool.num_errors
            sink = OrderedJournal(journal, spool)
        source = open_source(batch.input_path)
        work = _Work(source, source.records(sink.is_written), sink, figures, defaults)
        status = _answer(batch, config, work, launch)
        if status is not None:
            click.echo(f"\nInterrupted. {figures.summary()}. Run the same command to resume.", err=True)
            return status
        files.finish()
    click.echo(figures.summary(), err=True)
    if figures.lines_failed:
        click.echo(f"{count_lines(figures.lines_failed)} failed: for the reasons see {batch.errors}", err=True)
        return SOME_FAILED
    return ALL_ANSWERED


def _answer(batch: BatchConfig, config: ServerConfig, work: _Work, launch: Launch) -> int | None:
    """Answers the remaining lines, if any. Returns an exit status if a signal ended it early."""
    first = next(work.records, None)
    if first is None:
        return None
    try:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(_answer_with_engines(batch, config, work, chain([first], work.records), launch))
    except KeyboardInterrupt:
        return INTERRUPTED
    except asyncio.CancelledError:
        return TERMINATED
    return None


async def _answer_with_engines(
    batch: BatchConfig, config: ServerConfig, work: _Work, records: Iterator[Record], launch: Launch
) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    replicas = await launch(config, config.replicas)
    progress = RunProgress(work.figures, work.source, terminal=sys.stderr.isatty())
    driver = Driver(
        records,
        work.sink,
        WorkQueue(Lookahead(batch.lookahead, WINDOW_BYTES, reorder=not batch.no_reorder), batch.max_retries),
        progress,
        defaults=work.defaults,
        random_seed=config.random_seed,
        read_lines=min(READ_LINES, batch.lookahead),
        max_ahead=AHEAD_PER_LOOKAHEAD * batch.lookahead,
        make_app=lambda client: create_app(create_context(client, config, Callers.in_process())),
    )
    try:
        await driver.run(replicas)
    except EngineDeadError as error:
        raise BatchError(f"{error}; finished lines are kept; run the same command to resume") from error
    finally:
        progress.close()
        await close_replicas(replicas)


def server_config(batch: BatchConfig, engine: EngineConfig) -> ServerConfig:
    if engine.max_queued_requests is not None:
        raise ConfigError(
            f"--max-queued-requests ({engine.max_queued_requests}) is not supported by batch, which never "
            "queues lines in an engine: remove it"
        )
    names: dict[str, Any] = {"served_model_name": batch.served_model_name, "chat_template": batch.chat_template}
    return ServerConfig(**engine.model_dump(), **names, log_level=batch.log_level)


def _check_files(batch: BatchConfig) -> None:
    if not batch.input_path.exists():
        raise BatchError(f"--input: file not found: {batch.input_path}")
    if not batch.input_path.is_file():
        raise BatchError(f"--input {batch.input_path} is not a regular file; a resumed run has to read it again")
    if not batch.output_path.parent.is_dir():
        raise BatchError(f"--output {batch.output_path} is in a folder that does not exist")
    for flag, path in (("--output", batch.output_path), ("--error-file", batch.errors)):
        if path.exists() and not path.is_file():
            raise BatchError(f"{flag} {path} is not a regular file; a resumed run has to read it again")
    if len({batch.input_path.resolve(), batch.output_path.resolve(), batch.errors.resolve()}) < 3:
        raise BatchError("--input, --output and --error-file must be three different files")
    if FileFormat.of(batch.errors) is FileFormat.PARQUET:
        raise BatchError(
            f"--error-file {batch.errors} is always written as JSON lines: choose a name that does not end in "
            ".parquet or .pq"
        )


def body_defaults(batch: BatchConfig) -> dict[str, Raw]:
    if batch.defaults is None:
        return {}
    try:
        return parse_defaults(batch.defaults)
    except ValueError as error:
        raise BatchError(f"--defaults {batch.defaults!r}: {error}") from error


def shaping_options(batch: BatchConfig, config: ServerConfig) -> dict[str, OptionValue]:
    values = config.model_dump(mode="json", include=set(SHAPING_OPTIONS))
    values["served_model_name"] = batch.served_model_name
    errors = str(batch.errors.resolve())
    return {**values, "defaults": batch.defaults, "ordered": batch.ordered, "error_file": errors}


class _OutputFiles:
    """Where answers are written: the output itself, or a separate journal for Parquet, which cannot grow by lines."""

    def __init__(self, output: Path, folder: Path) -> None:
        self._output = output
        self._folder = folder
        self._parquet = FileFormat.of(output) is FileFormat.PARQUET
        if self._parquet:
            require_pyarrow(output)
        self.journal = folder / "answers.jsonl" if self._parquet else output

    def written(self) -> LineSet:
        """Returns the lines that are in the output but not in the journal."""
        if not self._parquet:
            return LineSet()
        from sglang_jax.batch.parquet import drop_merged, written_numbers

        numbers = written_numbers(self._output)
        drop_merged(self.journal, numbers)
        return numbers

    def finish(self) -> None:
        """Completes the output after all lines are answered. Raises `BatchError`."""
        if self._parquet:
            from sglang_jax.batch.parquet import write_output

            write_output(self.journal, self._output, self._folder / "draft.parquet")
