"""The batches of a server: their order, their life cycle, and what is left of them after a restart."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from sglang_jax.batch.journal import Kind
from sglang_jax.batch.served.checking import check_input
from sglang_jax.batch.served.record import (
    BatchNotFoundError,
    BatchRecord,
    Counts,
    Fault,
    NewBatch,
    Status,
    TooManyBatchesError,
    new_batch_id,
    read_record,
    write_record,
)
from sglang_jax.batch.served.room import CallerRoom, LineApp
from sglang_jax.batch.served.running import BatchFiles, answer_lines, fail_rest, places
from sglang_jax.errors import BatchError, ConfigError, EngineDeadError, ParameterError, quote
from sglang_jax.server.callers import Caller
from sglang_jax.server.context import ServerContext
from sglang_jax.server.errors import StorageError, StorageFullError
from sglang_jax.server.file_store import FileStore, StoredFile
from sglang_jax.server.files import Purpose

logger = logging.getLogger(__name__)

BATCHES = "batches"

LINES_PER_ROW = 2
"""Lines of all batches in flight per row of the engines: enough that a row never waits for a line."""

BATCHES_AT_ONCE = 16
BATCHES_EACH = 4
"""Batches that run at once, of all callers and of each; others wait for their turn."""

MAX_UNFINISHED = 64
"""Maximum batches of a caller that have not ended."""

MAX_ENDED = 10_000
KEPT_SECONDS = 30 * 86_400
"""How many ended batches are remembered, and for how long."""

SWEEP_SECONDS = 30.0
"""Seconds between two looks for expired files and old batches."""


class Batch:
    """A batch of this server.

    - `files`: its finished lines, while it runs; `opening`: the task that opens them.
    - `cancel`: set to end it early; `all_answered`: whether all its lines ended by themselves.
    """

    def __init__(self, record: BatchRecord, folder: Path) -> None:
        self.record = record
        self.folder = folder
        self.files: BatchFiles | None = None
        self.opening: asyncio.Task[BatchFiles] | None = None
        self.cancel = asyncio.Event()
        self.all_answered = False
        self._saving = asyncio.Lock()

    @property
    def counts(self) -> Counts:
        """As of now."""
        return self.record.counts if self.files is None else self.files.counts()

    async def change(self, **fields: Any) -> None:
        """Changes the record, at once for clients and then on disk. Raises `StorageError`."""
        self.record = msgspec.structs.replace(self.record, **fields)
        async with self._saving:
            await asyncio.to_thread(write_record, self.record, self.folder)

    async def end(self, **fields: Any) -> None:
        """Changes the record on disk and then for clients: those who see the end may delete the input at once. Raises
        `StorageError`."""
        ended = msgspec.structs.replace(self.record, **fields)
        async with self._saving:
            await asyncio.to_thread(write_record, ended, self.folder)
        self.record = ended


class BatchService:
    """Runs the batches of a context's clients; see `sglang_jax.server.app.Service`. Raises `ConfigError` if those on
    disk cannot be read."""

    def __init__(self, context: ServerContext, files: FileStore) -> None:
        self._context = context
        self._files = files
        self._folder = files.folder / BATCHES
        self._batches: dict[str, Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rooms: dict[str, CallerRoom] = {}
        self._each: dict[str, asyncio.Semaphore] = {}
        self._turns = asyncio.Semaphore(BATCHES_AT_ONCE)
        self._checking = asyncio.Semaphore(1)
        self._lines: asyncio.Semaphore | None = None
        self._routes: ASGIApp | None = None
        try:
            self._load()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--files-dir: the batches in {self._folder} cannot be read: {error}") from error

    def start(self, app: ASGIApp) -> None:
        self._routes = app
        for batch in self._batches.values():
            if not batch.record.status.ended:
                self._spawn(self._live(batch))
        self._spawn(self._sweep())

    def stop(self) -> None:
        """Stops at once: lines in flight end, and run again after the next start."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def find(self, batch_id: str, caller: Caller) -> Batch:
        """Raises `BatchNotFoundError`, also for a batch of another caller, except for operators."""
        batch = self._batches.get(batch_id)
        if batch is None or not (caller.admin or batch.record.owner == caller.name):
            raise BatchNotFoundError(f"there is no batch {quote(batch_id)}", param="batch_id")
        return batch

    def seen_by(self, caller: Caller) -> Iterator[Batch]:
        """Batches that a caller may see, the newest first."""
        for batch in reversed(self._batches.values()):
            if caller.admin or batch.record.owner == caller.name:
                yield batch

    async def create(self, new: NewBatch, caller: Caller) -> Batch:
        """Creates a batch, which then runs. Raises `RequestError`."""
        file = self._files.find(new.input_id, caller)
        if file.purpose != "batch":
            raise ParameterError(
                f"the file {file.id} must have the purpose batch, got {quote(file.purpose)}", param="input_file_id"
            )
        unfinished = sum(
            one.record.owner == caller.name and not one.record.status.ended for one in self._batches.values()
        )
        if unfinished >= MAX_UNFINISHED:
            raise TooManyBatchesError(f"{unfinished} batches have not ended, the limit of a key is {MAX_UNFINISHED}")
        now = self._files.now()
        record = BatchRecord(
            id=new_batch_id(),
            owner=caller.name,
            endpoint=new.endpoint,
            input_id=file.id,
            window=new.window,
            output_id=self._files.new_id(),
            error_id=self._files.new_id(),
            created_at=now,
            expires_at=now + new.seconds,
            output_lifetime=new.output_lifetime,
            metadata=new.metadata,
        )
        batch = Batch(record, self._folder / record.id)
        self._batches[record.id] = batch
        self._files.use(file.id)
        try:
            await asyncio.to_thread(batch.folder.mkdir, 0o700)
            await batch.change()
        except (OSError, StorageError) as error:
            del self._batches[record.id]
            self._files.unuse(file.id)
            raise StorageError(f"the batch cannot be stored ({error}); try again later") from error
        self._spawn(self._live(batch))
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Ends a batch early. Does nothing if it is being cancelled already. Raises `ParameterError` once its lines are
        finished."""
        status = batch.record.status
        if status is Status.CANCELLING:
            return
        if status not in (Status.VALIDATING, Status.IN_PROGRESS):
            raise ParameterError(
                f"{batch.record.id} is {status}; only a batch that is validating or in progress can be cancelled",
                param="batch_id",
            )
        batch.cancel.set()
        await batch.change(status=Status.CANCELLING, cancelling_at=self._files.now())

    def _load(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found: list[Batch] = []
        for folder in self._folder.glob("batch_*"):
            record = read_record(folder)
            if record is None:
                shutil.rmtree(folder)
                continue
            found.append(Batch(record, folder))
        for batch in sorted(found, key=lambda one: (one.record.created_at, one.record.id)):
            self._batches[batch.record.id] = batch
            if batch.record.status is Status.CANCELLING:
                batch.cancel.set()
            if not batch.record.status.ended:
                self._files.use(batch.record.input_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work as no client's request."""
        task = asyncio.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, batch: Batch) -> None:
        """Takes a batch from its state to its end."""
        try:
            try:
                await self._work(batch)
            except (BatchError, StorageFullError) as error:
                code = "storage_full" if isinstance(error, StorageFullError) else "storage_failed"
                await self._end_lines(batch, Fault(code, str(error)))
                await self._finalize(batch)
        except (EngineDeadError, StorageError, BatchError) as error:
            logger.error("%s resumes at the next start of the server: %s", batch.record.id, error)
        if batch.record.status.ended:
            self._files.unuse(batch.record.input_id)

    async def _work(self, batch: Batch) -> None:
        """Raises `BatchError`, `StorageFullError`; `EngineDeadError`."""
        if not batch.record.counts.total:
            async with self._checking:
                await self._check(batch)
        if batch.record.status in (Status.IN_PROGRESS, Status.CANCELLING):
            caller = self._context.callers.named(batch.record.owner)
            if caller is None:
                raise BatchError(f"the key {batch.record.owner} does not exist any more")
            await self._until_end(batch, self._answer(batch, caller))
            await self._end_lines(batch)
        if batch.record.status is Status.FINALIZING:
            await self._finalize(batch)

    async def _check(self, batch: Batch) -> None:
        record, config = batch.record, self._context.config
        checked = await asyncio.to_thread(
            check_input,
            self._input_of(batch),
            record.endpoint,
            max_lines=config.max_batch_lines,
            max_line_bytes=config.max_body_bytes,
        )
        now = self._files.now()
        if checked.faults:
            await batch.change(status=Status.FAILED, failed_at=now, faults=checked.faults)
        elif batch.record.status is Status.VALIDATING:
            await batch.change(status=Status.IN_PROGRESS, in_progress_at=now, counts=Counts(checked.total))
        else:
            await batch.change(counts=Counts(checked.total))

    async def _until_end(self, batch: Batch, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, or until the batch is cancelled or expires."""
        left = batch.record.expires_at - self._files.now()
        working = asyncio.create_task(work)
        cancelled = asyncio.create_task(batch.cancel.wait())
        try:
            if left > 0 and not batch.cancel.is_set():
                await asyncio.wait({working, cancelled}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                batch.all_answered = True
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.wait({working, cancelled})

    async def _answer(self, batch: Batch, caller: Caller) -> None:
        owner, rows = batch.record.owner, max(1, self._context.client.max_running_requests)
        async with self._each.setdefault(owner, asyncio.Semaphore(BATCHES_EACH)), self._turns:
            if self._lines is None:
                self._lines = asyncio.Semaphore(LINES_PER_ROW * rows)
            if owner not in self._rooms:
                self._rooms[owner] = CallerRoom(caller.in_background())
            room = self._rooms[owner]
            assert self._routes is not None, "not started"
            app = LineApp(self._routes, room, self._lines)
            files = await self._opened(batch)
            await answer_lines(files, self._context, self._files.space, app, room, LINES_PER_ROW * rows)

    async def _opened(self, batch: Batch) -> BatchFiles:
        """Opens the files of a batch's lines, once, whatever is cancelled meanwhile. Raises `BatchError`."""
        if batch.opening is None:
            batch.opening = asyncio.create_task(self._open(batch))
        return await asyncio.shield(batch.opening)

    async def _open(self, batch: Batch) -> BatchFiles:
        record = batch.record
        caller = self._context.callers.named(record.owner)
        most = None if caller is None else caller.max_files_bytes
        files = await asyncio.to_thread(BatchFiles, record, batch.folder, self._input_of(batch), most)
        self._files.space.hold(record.owner, sum(files.counted.values()))
        batch.files = files
        return files

    def _input_of(self, batch: Batch) -> Path:
        path = self._files.path_of(batch.record.input_id)
        if path is None:
            raise BatchError(f"the input file {batch.record.input_id} is lost")
        return path

    async def _end_lines(self, batch: Batch, *faults: Fault) -> None:
        """Completes the files of lines. From then on they do not change, so that a kill repeats no line. `faults`: why
        the batch cannot continue; then the lines left have no answer. Raises `BatchError`."""
        now = self._files.now()
        fields: dict[str, Any] = {}
        if not faults:
            files = await self._opened(batch)
            reason = None
            if batch.record.status is Status.CANCELLING:
                reason = ("batch_cancelled", "the batch was cancelled before this line was finished")
            elif not batch.all_answered:
                reason = ("batch_expired", "the batch's completion window ended before this line was finished")
                fields["expired_at"] = now
            if reason is not None:
                await fail_rest(files, self._context.config.max_body_bytes, self._files.space, *reason)
            await asyncio.to_thread(files.journal.sync)
        if batch.files is not None:
            fields |= {"counts": batch.files.counts(), "tokens": await asyncio.to_thread(batch.files.tokens)}
            batch.files.journal.close()
        await batch.change(status=Status.FINALIZING, finalizing_at=now, faults=faults, **fields)

    async def _finalize(self, batch: Batch) -> None:
        """Makes the files those of the client, and ends the batch. May be repeated from any point."""
        record, now = batch.record, self._files.now()
        has: dict[Kind, bool] = {}
        for kind, file_id in ((Kind.OUTPUT, record.output_id), (Kind.ERROR, record.error_id)):
            path = places(batch.folder)[kind]
            size = path.stat().st_size if path.exists() else 0
            name = f"{record.id}_{kind}.jsonl"
            file = StoredFile(
                file_id, record.owner, name, Purpose.BATCH_OUTPUT, size, now, now + record.output_lifetime
            )
            counted = 0 if batch.files is None else batch.files.counted[kind]
            has[kind] = await self._files.adopt_once(path, file, counted=counted)
        fields: dict[str, Any] = {"has_output": has[Kind.OUTPUT], "has_errors": has[Kind.ERROR]}
        batch.files = None
        if record.faults:
            fields |= {"status": Status.FAILED, "failed_at": now}
        elif record.cancelling_at is not None:
            fields |= {"status": Status.CANCELLED, "cancelled_at": now}
        elif record.expired_at is not None:
            fields |= {"status": Status.EXPIRED}
        else:
            fields |= {"status": Status.COMPLETED, "completed_at": now}
        await batch.end(**fields)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._files.delete_expired()
                await self._forget_old()
            except StorageError as error:
                logger.error("Expired files stay for now: %s", error.message)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _forget_old(self) -> None:
        ended = [batch for batch in self._batches.values() if batch.record.status.ended]
        oldest = self._files.now() - KEPT_SECONDS
        for place, batch in enumerate(ended):
            if batch.record.created_at >= oldest and len(ended) - place <= MAX_ENDED:
                return
            del self._batches[batch.record.id]
            await asyncio.to_thread(shutil.rmtree, batch.folder)
