"""OpenAI's `/v1/files`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from io import BufferedReader
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sglang_jax.errors import ParameterError, RequestError, quote
from sglang_jax.server.callers import current_caller
from sglang_jax.server.errors import (
    FileNotFoundHereError,
    ShuttingDownError,
    UnsupportedParameterError,
    validation_error,
)
from sglang_jax.server.fields import MAX_NAME_CHARACTERS
from sglang_jax.server.file_store import FileStore, StoredFile
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.streaming import json_response, until_disconnect
from sglang_jax.server.upload import MAX_OVERHEAD_BYTES, Form, RefusedUpload, Uploads

UPLOAD_PATH = "/v1/files"
"""The route that reads its body itself, as it arrives."""

FILES_LISTED = 10_000
"""Maximum files of one answer, as at OpenAI."""

READ_BYTES = 256 * 2**10

BATCH_FILE_LIFETIME = 30 * 86_400
"""Seconds until files of batches expire if the client does not say, as at OpenAI."""

_FORM = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch", "user_data"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer"},
                },
            }
        }
    },
}

Item = TypeVar("Item")


class Purpose(StrEnum):
    """What a file is for. Clients may upload the first two; batches write the third."""

    BATCH = "batch"
    USER_DATA = "user_data"
    BATCH_OUTPUT = "batch_output"


UPLOADED = (Purpose.BATCH, Purpose.USER_DATA)


class ExpiresAfter(BaseModel):
    """When a file expires: `seconds` after it was created, an hour to 30 days."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


class FileObject(msgspec.Struct, frozen=True):
    """OpenAI's file object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    deleted: bool = True
    object: str = "file"


class Page(msgspec.Struct, frozen=True):
    """Part of a list; the next part starts `after` its `last_id`."""

    data: Sequence[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def page_of(items: Iterable[Item], id_of: Callable[[Item], str], after: str | None, limit: int) -> list[Item]:
    """Returns the first `limit` of `items` after the one with the id `after`, and one more if there is one. Raises
    `ParameterError` if there is none with this id."""
    left = iter(items)
    if after is not None and not any(id_of(item) == after for item in left):
        raise ParameterError(f"after must be an id of this list, got {quote(after)}", param="after")
    return list(islice(left, limit + 1))


def page(shown: Sequence[Item], limit: int, ids: Sequence[str]) -> Page:
    """Returns the answer for up to `limit` items of `page_of`, as shown to clients."""
    data, ids = shown[:limit], ids[:limit]
    return Page(data, ids[0] if ids else None, ids[-1] if ids else None, len(shown) > limit)


def files_router(store: FileStore, client_timeout: float) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    uploads = Uploads(client_timeout)

    async def upload(request: Request) -> Response:
        """Stores a file (`multipart/form-data` with `file` and `purpose`)."""
        try:
            return json_response(_shown(await _upload(request, store, uploads)))
        except RequestError as error:
            return RefusedUpload(error)

    # Not a `JsonRoute`, which would read the body into memory.
    router.add_api_route(
        UPLOAD_PATH, upload, methods=["POST"], route_class_override=APIRoute, openapi_extra={"requestBody": _FORM}
    )

    @router.get("/v1/files")
    async def files(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=FILES_LISTED)] = FILES_LISTED,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """Lists the caller's files; for operators, all."""
        seen = (one for one in store.seen_by(current_caller()) if purpose in (None, one.purpose))
        ordered = seen if order == "desc" else reversed(list(seen))
        found = page_of(ordered, lambda one: one.id, after, limit)
        return json_response(page([_shown(one) for one in found], limit, [one.id for one in found]))

    @router.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        """A file's description."""
        return json_response(_shown(store.find(file_id, current_caller())))

    @router.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        """A file's content, from the disk."""
        found = store.find(file_id, current_caller())
        try:
            opened = await asyncio.to_thread(store.content(found).open, "rb")
        except FileNotFoundError as error:  # it was deleted just now
            raise FileNotFoundHereError(f"there is no file {quote(file_id)}", param="file_id") from error
        return FileContent(opened, found.bytes)

    @router.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        """Deletes a file."""
        await store.delete(found := store.find(file_id, current_caller()))
        return json_response(DeletedFile(found.id))

    return router


class FileContent(Response):
    """The content of an open file, read as its client reads. It has no type that a browser would show, since clients
    choose what is in it."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        super().__init__(headers={"Content-Length": str(size), "Content-Disposition": "attachment"})
        self.headers["Content-Type"] = "application/octet-stream"
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file, suppress(ClientDisconnect, ShuttingDownError):  # the client gets less than was announced
            await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while block := await asyncio.to_thread(self._file.read, READ_BYTES):
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _upload(request: Request, store: FileStore, uploads: Uploads) -> StoredFile:
    caller = current_caller()
    form = Form(request.headers.get("content-type", ""))
    with uploads.enter(caller.name):
        draft = store.draft(caller)
        try:
            await uploads.receive(request, form, draft, store.max_file_bytes + MAX_OVERHEAD_BYTES)
            if form.filename is None:
                raise ParameterError("file is required", param="file", code="missing_field")
            if len(form.filename) > MAX_NAME_CHARACTERS:
                raise ParameterError(
                    f"the filename may have {MAX_NAME_CHARACTERS} characters, got {len(form.filename)}", param="file"
                )
            purpose, lifetime = _purpose(form.fields), _lifetime(form.fields)
            return await draft.finish(form.filename, purpose, lifetime)
        finally:
            draft.drop()


def _purpose(fields: dict[str, str]) -> Purpose:
    if "purpose" not in fields:
        raise ParameterError("purpose is required", param="purpose", code="missing_field")
    known = [purpose for purpose in UPLOADED if purpose == fields["purpose"]]
    if not known:
        raise UnsupportedParameterError(
            f"purpose must be one of {', '.join(UPLOADED)}, got {quote(fields['purpose'])}", param="purpose"
        )
    return known[0]


def _lifetime(fields: dict[str, str]) -> int | None:
    """Returns the seconds of `expires_after`, which a form has as `expires_after[seconds]` and `[anchor]`."""
    given: dict[str, str] = {}
    for name, value in fields.items():
        if name.startswith("expires_after[") and name.endswith("]"):
            given[name.removeprefix("expires_after[")[:-1]] = value
        elif name != "purpose":
            raise UnsupportedParameterError(f"{quote(name)} is not a field of an upload; remove it", param=name)
    if not given:
        return BATCH_FILE_LIFETIME if fields["purpose"] == Purpose.BATCH else None
    try:
        return ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        errors = [{**one, "loc": ("form", "expires_after", *one["loc"])} for one in error.errors()]
        raise validation_error(errors, None) from None


def _shown(file: StoredFile) -> FileObject:
    return FileObject(file.id, file.bytes, file.created_at, file.filename, file.purpose, file.expires_at)
