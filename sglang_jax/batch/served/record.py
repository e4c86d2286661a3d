"""What a server knows of a batch: on disk, and as clients see it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from sglang_jax.batch.answers import Tokens
from sglang_jax.errors import RequestError
from sglang_jax.server.durable import replace_file
from sglang_jax.server.file_store import storage_error

RECORD = "batch.json"


class BatchNotFoundError(RequestError):
    """There is no batch with this id that the caller may see."""

    status = 404
    code = "batch_not_found"


class TooManyBatchesError(RequestError):
    """The caller has as many unfinished batches as it may."""

    status = 429
    code = "too_many_batches"


class Status(StrEnum):
    """The states of a batch, with OpenAI's names, in their order.

    - VALIDATING: its lines are checked, before any runs; IN_PROGRESS: its lines run, or wait for their turn.
    - CANCELLING: a client has cancelled it; FINALIZING: its files are completed.
    - COMPLETED, CANCELLED: it has ended; EXPIRED: its window has passed; FAILED: its input or the server's disk is at
      fault.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (Status.COMPLETED, Status.EXPIRED, Status.CANCELLED, Status.FAILED)


class Fault(msgspec.Struct, frozen=True):
    """Why a batch failed. `line`: of the input, from 1, if it is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines of a batch: all, answered, and in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True):
    """A batch on disk. Times are Unix times in seconds. `output_id`, `error_id`: the ids that its files get at its end;
    `output_lifetime`: seconds until they expire; `has_output`, `has_errors`: whether they exist."""

    id: str
    owner: str
    endpoint: str
    input_id: str
    window: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    output_lifetime: int
    metadata: dict[str, str] | None = None
    status: Status = Status.VALIDATING
    has_output: bool = False
    has_errors: bool = False
    counts: Counts = Counts()
    tokens: Tokens = Tokens()
    faults: tuple[Fault, ...] = ()
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """What a client asks for. `window`: OpenAI's `completion_window`, which is `seconds` long."""

    input_id: str
    endpoint: str
    window: str
    seconds: int
    output_lifetime: int
    metadata: dict[str, str] | None


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(16)}"


def write_record(record: BatchRecord, folder: Path) -> None:
    """Raises `StorageError`."""
    try:
        replace_file(folder / RECORD, msgspec.json.format(msgspec.json.encode(record)))
    except OSError as error:
        raise storage_error(error) from error


def read_record(folder: Path) -> BatchRecord | None:
    """Returns the batch of a folder; None if a kill interrupted its creation. Raises `OSError`,
    `msgspec.DecodeError`."""
    path = folder / RECORD
    return msgspec.json.decode(path.read_bytes(), type=BatchRecord) if path.exists() else None


class _Faults(msgspec.Struct, frozen=True):
    data: Sequence[Fault]
    object: str = "list"


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class _ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: _CachedTokens
    output_tokens: int
    output_tokens_details: _ReasoningTokens
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True):
    """OpenAI's batch object. `usage`: null until its end."""

    id: str
    endpoint: str
    errors: _Faults | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None
    model: str
    usage: _Usage | None
    object: str = "batch"


def shown(record: BatchRecord, counts: Counts, model: str) -> BatchObject:
    """Returns what clients see of a batch, with these counts."""
    tokens = record.tokens
    usage = _Usage(
        tokens.prompt, _CachedTokens(tokens.cached), tokens.output, _ReasoningTokens(), tokens.prompt + tokens.output
    )
    cancelling = record.status is Status.FINALIZING and record.cancelling_at is not None
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=_Faults(record.faults) if record.faults else None,
        input_file_id=record.input_id,
        completion_window=record.window,
        status=Status.CANCELLING if cancelling else record.status,
        output_file_id=record.output_id if record.has_output else None,
        error_file_id=record.error_id if record.has_errors else None,
        created_at=record.created_at,
        in_progress_at=record.in_progress_at,
        expires_at=record.expires_at,
        finalizing_at=record.finalizing_at,
        completed_at=record.completed_at,
        failed_at=record.failed_at,
        expired_at=record.expired_at,
        cancelling_at=record.cancelling_at,
        cancelled_at=record.cancelled_at,
        request_counts=counts,
        metadata=record.metadata,
        model=model,
        usage=usage if record.status.ended else None,
    )
