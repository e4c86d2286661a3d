"""Runs the command `batch --engine ray`, from its options to its exit status."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath

import click
import msgspec
import ray
from pyarrow.fs import FileSelector, FileSystem, FileType
from ray.data import DataContext, Dataset
from ray.data.checkpoint import CheckpointConfig
from ray.exceptions import RayError

from sglang_jax import logs
from sglang_jax.batch.options import BatchConfig, RayOptions
from sglang_jax.batch.ray.actors import Answering, SharedAttempts
from sglang_jax.batch.ray.engine import Asking, Launch
from sglang_jax.batch.ray.files import ERRORS_ENDING, AnswerFiles, RequestFiles, WriteTotals
from sglang_jax.batch.ray.pipeline import answer_files, node_resources, reporting_waits
from sglang_jax.batch.run import ALL_ANSWERED, INTERRUPTED, SOME_FAILED, body_defaults, server_config, shaping_options
from sglang_jax.batch.run_folder import VERSION, InputIdentity, OptionValue, RunManifest, check_same, read_manifest
from sglang_jax.batch.source import FileFormat
from sglang_jax.config import EngineConfig
from sglang_jax.engine.launch import launch_engine
from sglang_jax.errors import BatchError

logger = logging.getLogger(__name__)

PROTOCOL = "://"

SECONDS_TO_CONNECT = 10.0

CHECKPOINT_ACTOR_BYTES = 256 * 2**20
"""Minimum memory that Ray reserves for the set of finished lines, which takes 8 bytes per line."""


def run_ray_batch(batch: BatchConfig, options: RayOptions, engine: EngineConfig, launch: Launch = launch_engine) -> int:
    """Answers the remaining lines of the input on a Ray cluster. Returns the exit status. Uses the cluster that this
    process is connected to, or else connects to one until it returns. `launch`: starts an engine; for tests and other
    cores. Raises `BatchError` if the run cannot start or continue, `ConfigError` for incompatible options."""
    logs.configure(batch.log_level.upper())
    config = server_config(batch, engine)
    _check_supported(batch, engine)
    body_defaults(batch)  # checks them before anything is started
    answering = Answering(
        config=config,
        asking=Asking(max_retries=batch.max_retries, lookahead=batch.lookahead, reorder=not batch.no_reorder),
        defaults=batch.defaults,
        launch=launch,
    )
    connected = ray.is_initialized()
    if not connected:
        _connect(options)
    try:
        return _answer(batch, options, answering)
    except KeyboardInterrupt:
        click.echo("\nInterrupted. Files that were written are kept; run the same command to resume.", err=True)
        return INTERRUPTED
    except RayError as error:
        raise BatchError(f"{_reason(error)}; finished lines are kept; run the same command to resume") from error
    finally:
        if not connected:
            ray.shutdown()


def _check_supported(batch: BatchConfig, engine: EngineConfig) -> None:
    if batch.ordered:
        raise BatchError(
            "--ordered is not supported with --engine ray, which writes many files: sort the responses by id"
        )
    if batch.error_file is not None:
        raise BatchError(
            f"--error-file is not supported with --engine ray: failed lines are in files named *{ERRORS_ENDING} in "
            "--output"
        )
    if engine.replicas > 1:
        raise BatchError(f"--dp-size ({engine.dp_size}) is for one machine: with --engine ray, use --min-replicas")


def _connect(options: RayOptions) -> None:
    """Connects to Ray; a cluster started here sends no usage statistics by default. Raises `BatchError`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if options.address is not None:
            _check_listening(options.address)
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        raise BatchError(f"cannot connect to Ray at {options.address or 'RAY_ADDRESS'}: {error}") from error


def _check_listening(address: str) -> None:
    """Raises `OSError` if HOST:PORT accepts no connection; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and PROTOCOL not in address:
        socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()


def _answer(batch: BatchConfig, options: RayOptions, answering: Answering) -> int:
    requests = _open_requests(batch.input)
    output = _OutputFolder(batch.output, options)
    identity = _identify(requests.files)
    if output.claim(identity, shaping_options(batch, answering.config)):
        click.echo("All lines are already finished.", err=True)
    else:
        DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
        begin = time.monotonic()
        attempts = SharedAttempts()
        names = _short_names(list(requests.files))
        answers = answer_files(requests, answering, options, names, attempts)
        needs = node_resources(answering.config, options)
        with reporting_waits(attempts, needs, answering.config.nnodes, partial(click.echo, err=True)):
            written = output.write(answers)
        click.echo(_summary(written, time.monotonic() - begin), err=True)
    if output.has_errors():
        click.echo(f"Some lines failed: for the reasons see {batch.output}/*{ERRORS_ENDING}", err=True)
        return SOME_FAILED
    return ALL_ANSWERED


def _open_requests(location: str) -> RequestFiles:
    try:
        return RequestFiles([_absolute(location)])
    except (OSError, ValueError) as error:
        raise BatchError(f"--input {location} cannot be read: {error}") from error


def _absolute(location: str) -> str:
    """Makes a local path absolute, because Ray's processes have other working folders."""
    return location if PROTOCOL in location else os.path.abspath(location)


def _identify(files: Mapping[str, int]) -> InputIdentity:
    """Identifies the input by names and sizes. Reading files of an object store would take long."""
    listed = "\n".join(f"{size} {path}" for path, size in files.items())
    return InputIdentity(sum(files.values()), hashlib.sha256(listed.encode()).hexdigest())


def _short_names(paths: list[str]) -> list[str]:
    """Returns paths relative to their common folder."""
    folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return [posixpath.relpath(path, folder) for path in paths]


class _OutputFolder:
    """The folder of answers, and OUTPUT.run next to it for later runs: Ray's record of finished lines, and the
    manifest."""

    def __init__(self, location: str, options: RayOptions) -> None:
        self._location = location
        file_format = FileFormat.of(PurePosixPath(location))
        try:
            self._sink = AnswerFiles(_absolute(location), file_format, rows_per_file=options.rows_per_file)
        except (OSError, ValueError) as error:
            raise BatchError(f"--output {location} cannot be written: {error}") from error
        self._files: FileSystem = self._sink.filesystem
        self._run = self._sink.path.rstrip("/") + ".run"
        self._complete_marker = f"{self._run}/whole"

    def claim(self, identity: InputIdentity, options: Mapping[str, OptionValue]) -> bool:
        """Writes a new run's manifest, or checks a resumed run's. Returns True if nothing is left to do. Raises
        `BatchError` if the input or an option has changed, or the folder has files that no run wrote."""
        manifest = RunManifest(VERSION, identity, dict(options))
        path = f"{self._run}/manifest.json"
        if self._exists(path):
            with self._files.open_input_stream(path) as file:
                check_same(read_manifest(file.readall(), path), manifest, self._location, self._run)
            return self._exists(self._complete_marker)
        if self._list_files():
            raise BatchError(
                f"{self._location} has files that no run recorded in {self._run} wrote: choose another --output"
            )
        self._write(path, msgspec.json.format(msgspec.json.encode(manifest)))
        return False

    def write(self, answers: Dataset) -> WriteTotals:
        """Answers the remaining lines and writes the answers. Returns the totals of this run."""
        checkpoint = CheckpointConfig(
            "number", f"{self._run}/finished", delete_checkpoint_on_success=False, override_filesystem=self._files
        )
        checkpoint.checkpoint_actor_memory_bytes = CHECKPOINT_ACTOR_BYTES
        answers.context.checkpoint_config = checkpoint
        answers.write_datasink(self._sink)
        self._write(self._complete_marker, b"")
        return self._sink.written

    def has_errors(self) -> bool:
        """Whether lines failed, in this run or earlier ones."""
        return any(path.endswith(ERRORS_ENDING) for path in self._list_files())

    def _list_files(self) -> list[str]:
        found = self._files.get_file_info(FileSelector(self._sink.path, allow_not_found=True))
        return [file.path for file in found if file.type is FileType.File]

    def _exists(self, path: str) -> bool:
        return bool(self._files.get_file_info(path).type is FileType.File)

    def _write(self, path: str, content: bytes) -> None:
        self._files.create_dir(self._run, recursive=True)
        with self._files.open_output_stream(path) as file:
            file.write(content)


def _summary(written: WriteTotals, seconds: float) -> str:
    rate = written.output_tokens / seconds
    return (
        f"{written.num_answered} lines answered, {written.num_failed} failed, in {seconds:.1f} s: "
        f"{written.output_tokens} output tokens ({rate:.1f} tok/s), {written.prompt_tokens} prompt tokens"
    )


def _reason(error: RayError) -> str:
    """Returns the last line of an error, without the traces of all processes that it passed through."""
    return str(error).strip().splitlines()[-1]
