"""OpenAI's Responses API: `/v1/responses`."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.datastructures import Headers

from sglang_jax.engine.types import SessionTurnInput
from sglang_jax.errors import ParameterError, PromptTooLongError, RequestError, SessionNotFoundError, quote
from sglang_jax.scheduler.commands import CloseSession
from sglang_jax.server.callers import current_caller
from sglang_jax.server.context import ServerContext
from sglang_jax.server.conversation import (
    CallOptions,
    Conversation,
    Conversations,
    Message,
    PlannedReply,
    ReplyOptions,
)
from sglang_jax.server.errors import ResponseNotFoundError
from sglang_jax.server.fields import claim_of, routing_key
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openapi import answers
from sglang_jax.server.responses_format import (
    RESPONSE_ID,
    ResponseEvent,
    ResponseObject,
    ResponseWriter,
    new_response,
)
from sglang_jax.server.responses_items import Item, messages_of, num_characters, without_unknown_fields
from sglang_jax.server.responses_schema import FIELD_NAMES, ResponsesBody
from sglang_jax.server.responses_store import StoredResponse, StoredTurn
from sglang_jax.server.streaming import (
    StreamStyle,
    json_response,
    named_event,
    open_event_stream,
    until_disconnect,
)
from sglang_jax.server.tracing import note_response_id

MAX_PAGE = 100
"""Maximum items of one page of a list."""

EVENTS = StreamStyle("text/event-stream", lambda error: named_event("error", {"type": "error", **_described(error)}))

_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_(i?)([0-9]{1,6})")
"""Ids of items: the response's, and the place in its output or, after `i`, in its input."""


def _described(error: RequestError) -> dict[str, str | None]:
    return {"code": error.code, "message": error.message, "param": error.param}


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct):
    """The answer to a deletion."""

    id: str
    object: str = "response"
    deleted: bool = True


class Responses:
    """The responses of one server: those stored, and those that run in the background."""

    def __init__(self, context: ServerContext, conversations: Conversations) -> None:
        self._context = context
        self._conversations = conversations
        self.store, self.runs = context.responses, context.background

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """Returns a response, its stream, or its start if it runs in the background. Raises `RequestError`."""
        self._context.check_model(body.model)
        body.check()
        owner = current_caller().tenant(claim_of(request.headers).tenant)
        response_id = RESPONSE_ID + uuid.uuid4().hex
        note_response_id(response_id)
        earlier = await self._earlier(body, owner)
        items = await self._with_references(body.input_items(), owner)
        before = await asyncio.to_thread(_items_of, earlier)
        session = (earlier[-1].session if earlier else None) or response_id
        conversation = self._conversation(body, request.headers, before, items, session)
        planned = await until_disconnect(request.receive, self._plan(conversation, body))
        response = new_response(response_id, body, planned, body.model or self._context.config.model_name)
        writer = ResponseWriter(planned, body.wanted(), self._context.client.tokenizer, response)
        stored = msgspec.json.encode(_named(items, response_id))
        save = partial(self._save, writer, owner, session, stored)
        if body.background:
            size = sum(turn.num_bytes for turn in earlier) + len(stored) + len(msgspec.json.encode(response))
            return await self._start(request, writer, save, owner, size)
        if not body.stores:
            return await self._conversations.answer(request, planned, writer)
        return await self._conversations.answer(request, planned, writer, save)

    async def _earlier(self, body: ResponsesBody, owner: str) -> list[StoredTurn]:
        if not body.previous_response_id:
            return []
        earlier = await self.store.conversation(body.previous_response_id, owner)
        if not earlier[-1].finished:
            raise ParameterError(
                f"previous_response_id is {quote(body.previous_response_id)}, which is {earlier[-1].status}: wait for "
                "it, or cancel it",
                param="previous_response_id",
            )
        size, most = sum(turn.num_bytes for turn in earlier), self._context.config.max_body_bytes
        if size > most:
            raise ParameterError(
                f"the conversation that ends with previous_response_id has items of {size} bytes; the limit is {most} "
                "(--max-body-bytes). Send the part of it that matters as input",
                param="previous_response_id",
            )
        return earlier

    async def _with_references(self, items: Sequence[Item], owner: str) -> list[Item]:
        """Returns the items with those that references name in their places. Raises `ResponseNotFoundError`;
        `ParameterError` for more bytes than a body may have."""
        places: dict[str, list[_Reference]] = {}
        for number, item in enumerate(items):
            if item["type"] == "item_reference":
                reference = _reference(item.get("id"), f"input[{number}].id", number)
                places.setdefault(reference.response_id, []).append(reference)
        found, size, most = list(items), 0, self._context.config.max_body_bytes
        for response_id, references in places.items():
            turn = await self.store.turn(response_id, owner, references[0].param)
            for reference, item in zip(references, await asyncio.to_thread(_referred, turn, references), strict=True):
                size += len(msgspec.json.encode(item))
                if size > most:
                    raise ParameterError(
                        f"{reference.param}: the items that input refers to have more than {most} bytes together, the "
                        "limit (--max-body-bytes)",
                        param=reference.param,
                    )
                found[reference.number] = item
        return found

    def _conversation(
        self, body: ResponsesBody, headers: Headers, earlier: list[Item], items: list[Item], session: str
    ) -> Conversation:
        context = self._context
        characters = num_characters(earlier) + num_characters(items) + len(body.instructions or "")
        return Conversation(
            request_id=body.rid or f"resp-{uuid.uuid4().hex}",
            read=partial(messages_of, earlier, items, body.instructions),
            num_messages=len(earlier) + len(items),
            num_characters=characters,
            tools=body.tool_request(context.config.max_tools_per_request),
            variables=body.template_variables(context.client.tokenizer),
            sampling=body.sampling(context.generation_defaults),
            reply=ReplyOptions(
                stream=bool(body.stream) or bool(body.background),
                logprobs=body.wants_logprobs,
                top_logprobs=body.top_logprobs or 0,
            ),
            call=CallOptions(
                extra_key=body.cache_namespace,
                priority=body.priority or 0,
                routing_key=routing_key(body.routing_key or body.prompt_cache_key, headers),
                session=SessionTurnInput(session, whole=True) if body.stores else None,
            ),
            field_names=FIELD_NAMES,
        )

    async def _plan(self, conversation: Conversation, body: ResponsesBody) -> PlannedReply:
        """Plans the reply, after the conversation is made shorter if need be and the client wants that."""
        if body.truncation == "auto":
            conversation = await self._fitting(conversation)
        planned = await self._conversations.plan(conversation)
        if body.wants_logprobs and planned.plan.layout is not None:
            # Only as the tokens arrive is it known whether they are text, and of which item.
            planned = replace(planned, prompt=replace(planned.prompt, stream=True))
        return planned

    async def _fitting(self, conversation: Conversation) -> Conversation:
        """Returns a conversation that fits the context: without its first exchanges, if need be. Each begins with a
        message of the user. The rest leaves room for the reply: `max_output_tokens`, or else an eighth of the context,
        and at most half of it. How many go is rounded up, so that not every reply shifts the start and empties the
        cache."""
        messages = await asyncio.to_thread(conversation.read)
        starts = [number for number, message in enumerate(messages) if message["role"] == "user"]
        first = starts[0] if starts else 0
        dropped, limit = 0, len(starts) - 1
        while not await self._fits(cut := _without(conversation, messages, first, starts[dropped] if starts else 0)):
            if dropped >= limit:
                return cut  # refused for its length
            dropped += 1
            step = max(1, 2 ** (dropped.bit_length() - 2))
            dropped = min(-(-dropped // step) * step, limit)
        return cut

    async def _fits(self, conversation: Conversation) -> bool:
        try:
            _, token_ids = await self._conversations.encode(conversation)
        except PromptTooLongError:
            return False
        context_length, wanted = self._context.client.model_info.context_length, conversation.sampling.max_new_tokens
        room = min(context_length // 8 if wanted is None else wanted, context_length // 2)
        return len(token_ids) + max(room, 1) <= context_length

    async def _save(self, writer: ResponseWriter, owner: str, session: str, items: bytes) -> None:
        response = writer.response
        previous, text = response.previous_response_id, msgspec.json.encode(response)
        await self.store.save(StoredResponse(response.id, owner, previous, response.status, session, items, text))

    async def _start(
        self, request: Request, writer: ResponseWriter, save: partial[Any], owner: str, size: int
    ) -> Response:
        """Starts a response in the background. Returns it, or its stream, which the client may leave and take up
        again."""
        self.runs.check_room(owner, size)
        first = writer.queued()
        await save()
        events = self._conversations.events(writer.planned, writer, save)
        run_id, streams = writer.response.id, writer.wanted.stream
        self.runs.start(run_id, writer, events, save, first=first, keep_events=streams, owner=owner, size=size)
        if streams:
            return await open_event_stream(request, self.runs.events(run_id, -1), EVENTS)
        return json_response(writer.response)

    async def current(self, response_id: str, owner: str) -> msgspec.Raw:
        """Returns a response as it is now, or as it was stored. Raises `ResponseNotFoundError`."""
        stored = await self.store.find(response_id, owner)
        writer = self.runs.running(response_id)
        return msgspec.Raw(
            msgspec.json.encode(writer.response) if isinstance(writer, ResponseWriter) else stored.response
        )

    async def stream(self, request: Request, response_id: str, owner: str, after: int) -> Response:
        """Returns the events of a response that runs or ran in the background, from number `after` + 1 on. Raises
        `ResponseNotFoundError`, `ParameterError`."""
        await self.store.find(response_id, owner)
        if not self.runs.has_events(response_id):
            raise ParameterError(
                f"stream: there are no events of response {quote(response_id)}: it was created without background and "
                "stream, or they have made room for newer ones; retrieve it without stream",
                param="stream",
            )
        events: AsyncGenerator[bytes, None] = self.runs.events(response_id, after)
        return await open_event_stream(request, events, EVENTS)

    async def cancel(self, response_id: str, owner: str) -> msgspec.Raw:
        """Cancels a response that runs in the background, and returns it. Raises `ResponseNotFoundError`,
        `ParameterError` for one that does not run in the background."""
        stored = await self.store.find(response_id, owner)
        if not json.loads(stored.response)["background"]:
            raise ParameterError(
                f"response {quote(response_id)} does not run in the background; only such a response can be cancelled",
                param="response_id",
            )
        await self.runs.cancel(response_id)
        return await self.current(response_id, owner)

    async def delete(self, response_id: str, owner: str) -> DeletedResponse:
        """Deletes a response, which ends if it runs, and the KV of its conversation unless others have the same. Raises
        `ResponseNotFoundError`."""
        await self.store.find(response_id, owner)
        await self.runs.cancel(response_id)
        self.runs.forget(response_id)
        deleted = await self.store.delete(response_id, owner)
        if deleted.session is not None and not await self.store.has_session(deleted.session):
            with suppress(SessionNotFoundError):  # it has timed out, or made room
                await self._context.client.call(CloseSession(deleted.session, owner))
        return DeletedResponse(deleted.id)

    async def input_items(
        self, response_id: str, owner: str, after: str | None, limit: int, *, newest_first: bool
    ) -> ItemList:
        """Returns a page of the items that a response answers, those of earlier responses included."""
        *earlier, last = await self.store.conversation(response_id, owner)
        items = await asyncio.to_thread(lambda: _items_of(earlier) + last.input_items())
        ordered = items[::-1] if newest_first else items
        if after is not None:
            # The last one: an item that is referred to twice has the same id twice, and pages must come to an end.
            place = max((number for number, item in enumerate(ordered) if item.get("id") == after), default=None)
            if place is None:
                raise ParameterError(f"after is {quote(after)}, which is not an item of this response", param="after")
            ordered = ordered[place + 1 :]
        page = ordered[:limit]
        ids = [item["id"] for item in page] or [None]
        return ItemList(data=page, first_id=ids[0], last_id=ids[-1], has_more=len(ordered) > limit)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A reference to an item of a response: to its output, or `to_input`. `number`: its place in the request's input,
    `place`: that of the item; `param`: its field."""

    response_id: str
    to_input: bool
    place: int
    number: int
    param: str

    def not_found(self) -> ResponseNotFoundError:
        return ResponseNotFoundError(f"{self.param} is an item that no stored response has", param=self.param)


def _reference(item_id: object, param: str, number: int) -> _Reference:
    known = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    if known is None:
        raise ResponseNotFoundError(f"{param} is {quote(item_id)}, which no stored response has", param=param)
    return _Reference(RESPONSE_ID + known[1], bool(known[2]), int(known[3]), number, param)


def _referred(turn: StoredTurn, references: Sequence[_Reference]) -> list[Item]:
    """Returns the items of a response that references name. Raises `ResponseNotFoundError`."""
    of_input = turn.input_items() if any(reference.to_input for reference in references) else []
    of_output = turn.output_items() if not all(reference.to_input for reference in references) else []
    items = []
    for reference in references:
        among = of_input if reference.to_input else of_output
        if reference.place >= len(among):
            raise reference.not_found()
        items.append(without_unknown_fields(among[reference.place]))
    return items


def _items_of(turns: Sequence[StoredTurn]) -> list[Item]:
    return [item for turn in turns for item in turn.items()]


def _without(conversation: Conversation, messages: list[Message], first: int, start: int) -> Conversation:
    """Returns the conversation without the messages from `first` to `start`."""
    kept = [*messages[:first], *messages[start:]]
    characters = sum(len(str(message["content"])) for message in kept)
    return replace(conversation, read=lambda: kept, num_messages=len(kept), num_characters=characters)


def _named(items: Sequence[Item], response_id: str) -> list[Item]:
    """Returns input items as they are stored: with ids, and texts as lists of parts."""
    named = []
    for number, item in enumerate(items):
        prefix = {"reasoning": "rs", "function_call": "fc"}.get(item["type"], "msg")
        content = item.get("content")
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        parts = {"content": [{"type": kind, "text": content}]} if isinstance(content, str) else {}
        own_id = f"{prefix}_{response_id.removeprefix(RESPONSE_ID)}_i{number}"
        named.append({"id": own_id, "status": "completed", **item, **parts})
    return named


def responses_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    responses = Responses(context, conversations)

    def owner(request: Request) -> str:
        return current_caller().tenant(claim_of(request.headers).tenant)

    @router.post("/v1/responses")
    @answers(ResponseObject, ResponseEvent)
    async def create(body: ResponsesBody, request: Request) -> Response:
        """Answers a conversation in the format of OpenAI's Responses API."""
        return await responses.create(body, request)

    @router.get("/v1/responses/{response_id}")
    @answers(ResponseObject, ResponseEvent)
    async def retrieve(response_id: str, request: Request, stream: bool = False, starting_after: int = -1) -> Response:
        """A stored response; `stream`: the events of one that runs in the background, after number `starting_after`."""
        if stream:
            return await responses.stream(request, response_id, owner(request), starting_after)
        return json_response(await responses.current(response_id, owner(request)))

    @router.delete("/v1/responses/{response_id}")
    @answers(DeletedResponse)
    async def delete(response_id: str, request: Request) -> Response:
        """Deletes a stored response."""
        return json_response(await responses.delete(response_id, owner(request)))

    @router.post("/v1/responses/{response_id}/cancel")
    @answers(ResponseObject)
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancels a response that runs in the background."""
        return json_response(await responses.cancel(response_id, owner(request)))

    @router.get("/v1/responses/{response_id}/input_items")
    @answers(ItemList)
    async def input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The items that a stored response answers, by pages."""
        page = await responses.input_items(response_id, owner(request), after, limit, newest_first=order == "desc")
        return json_response(page)

    return router
