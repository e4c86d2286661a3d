"""OpenAI's `/v1/batches`."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import Field, field_validator

from sglang_jax.batch.lines import PROMPT_FIELDS
from sglang_jax.batch.served.record import NewBatch, shown
from sglang_jax.batch.served.service import Batch, BatchService
from sglang_jax.errors import ParameterError, quote
from sglang_jax.server.app import Service
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ServerContext
from sglang_jax.server.fields import Body, ShortText
from sglang_jax.server.file_store import FileStore
from sglang_jax.server.files import BATCH_FILE_LIFETIME, ExpiresAfter, page, page_of
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.streaming import json_response

BATCHES_LISTED = 100
"""Maximum batches of one answer, as at OpenAI."""

MAX_WINDOW_HOURS = 720

MAX_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: ShortText
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in PROMPT_FIELDS:
            raise ParameterError(
                f"endpoint must be one of {', '.join(PROMPT_FIELDS)}, got {quote(value)}", param="endpoint"
            )
        return value

    @field_validator("completion_window")
    @classmethod
    def _is_in_hours(cls, value: str) -> str:
        hours = re.fullmatch(r"([0-9]{1,3})h", value, re.ASCII)
        if hours is None or not 1 <= int(hours[1]) <= MAX_WINDOW_HOURS:
            raise ParameterError(
                f"completion_window must be hours from 1h to {MAX_WINDOW_HOURS}h, such as 24h, got {quote(value)}",
                param="completion_window",
            )
        return value

    def new(self) -> NewBatch:
        return NewBatch(
            input_id=self.input_file_id,
            endpoint=self.endpoint,
            window=self.completion_window,
            seconds=3600 * int(self.completion_window[:-1]),
            output_lifetime=self.output_expires_after.seconds if self.output_expires_after else BATCH_FILE_LIFETIME,
            metadata=self.metadata,
        )


def serve_batches(context: ServerContext, files: FileStore) -> Service:
    """Returns the service that runs the batches of a server with files. Raises `ConfigError`."""
    batches = BatchService(context, files)
    return Service(batches_router(batches, context.config.model_name), batches.start, batches.stop, batches.close)


def batches_router(batches: BatchService, model: str) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    def answer(batch: Batch) -> Response:
        return json_response(shown(batch.record, batch.counts, model))

    @router.post("/v1/batches")
    async def create(body: BatchBody) -> Response:
        """Starts a batch: the requests of an uploaded file, below all others."""
        return answer(await batches.create(body.new(), current_caller()))

    @router.get("/v1/batches")
    async def listed(after: str | None = None, limit: Annotated[int, Query(ge=1, le=BATCHES_LISTED)] = 20) -> Response:
        """Lists the caller's batches, the newest first; for operators, all."""
        found = page_of(batches.seen_by(current_caller()), lambda one: one.record.id, after, limit)
        objects = [shown(one.record, one.counts, model) for one in found]
        return json_response(page(objects, limit, [one.id for one in objects]))

    @router.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        """A batch, with the number of its finished lines."""
        return answer(batches.find(batch_id, current_caller()))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        """Ends a batch early. Lines in flight are aborted; finished ones stay."""
        await batches.cancel(found := batches.find(batch_id, current_caller()))
        return answer(found)

    return router
