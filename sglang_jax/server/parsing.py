"""Routes that parse a finished reply: `/parse_function_call` and `/separate_reasoning`, in SGLang's native format."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from sglang_jax.config import ReasoningParser, ToolCallParser
from sglang_jax.errors import ParameterError
from sglang_jax.replies.families import CALLS, REASONING
from sglang_jax.replies.forms import CallFamily, ReasoningForm, ReplyLayout, Tool
from sglang_jax.replies.parser import CallArguments, CallBegin, Piece, Reasoning, ReplyParser, Text
from sglang_jax.server.context import ServerContext, new_id
from sglang_jax.server.conversation import Conversations
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import Body, Many
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openai_tools import ToolBody, read_choice
from sglang_jax.server.openapi import answers
from sglang_jax.server.streaming import json_response, until_disconnect
from sglang_jax.server.tools import ToolRequest, tool_request

MAX_PARSED_CHARACTERS = 2**18
"""Maximum characters of a reply that is parsed: at most a second or so, in a thread."""

ParsedText = Annotated[str, Field(max_length=MAX_PARSED_CHARACTERS)]


class ParseCallsBody(Body):
    """`POST /parse_function_call`. `tool_call_parser`: None for the served model's."""

    text: ParsedText
    tools: Many[ToolBody]
    tool_call_parser: Annotated[ToolCallParser, Field(strict=False)] | None = None


class SeparateReasoningBody(Body):
    """`POST /separate_reasoning`. `reasoning_parser`: None for the served model's."""

    text: ParsedText
    reasoning_parser: Annotated[ReasoningParser, Field(strict=False)] | None = None


class ParsedCall(msgspec.Struct):
    """A call. `tool_index`: the place of its tool in the request; `parameters`: the text of a JSON object."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(msgspec.Struct):
    """A reply's calls, and its text without them."""

    normal_text: str
    calls: list[ParsedCall]


class SeparatedReasoning(msgspec.Struct):
    """A reply's reasoning, and its text without it."""

    reasoning_text: str
    text: str


def parsing_router(context: ServerContext, conversations: Conversations) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/parse_function_call")
    @answers(ParsedCalls)
    async def parse_function_call(body: ParseCallsBody, request: Request) -> Response:
        """Finds the tool calls in a finished reply."""
        offered = [tool.offered(f"tools[{number}]") for number, tool in enumerate(body.tools)]
        tools = tool_request(offered, read_choice(None), parallel=True, most=context.config.max_tools_per_request)
        if tools is None:
            raise ParameterError("tools is empty; a call is only found if its tool is listed", param="tools")
        family = _call_family(body.tool_call_parser or ToolCallParser.AUTO, conversations, tools)
        work = context.render(
            partial(parsed_calls, body.text, family, tools.callable), size=len(body.text), request_id=new_id("parse")
        )
        return json_response(await until_disconnect(request.receive, work))

    @router.post("/separate_reasoning")
    @answers(SeparatedReasoning)
    async def separate_reasoning(body: SeparateReasoningBody, request: Request) -> Response:
        """Separates the reasoning from the rest of a finished reply."""
        form = _reasoning_form(body.reasoning_parser or ReasoningParser.AUTO, conversations)
        work = context.render(
            partial(separated_reasoning, body.text, form), size=len(body.text), request_id=new_id("parse")
        )
        return json_response(await until_disconnect(request.receive, work))

    return router


def _call_family(parser: ToolCallParser, conversations: Conversations, tools: ToolRequest) -> CallFamily:
    if parser is ToolCallParser.NONE:
        raise ParameterError("tool_call_parser must name a format, or be left out, got none", param="tool_call_parser")
    if parser is not ToolCallParser.AUTO:
        return CALLS[parser]
    conversations.formats.check(tools)
    family = conversations.formats.family
    assert family is not None
    return family


def _reasoning_form(parser: ReasoningParser, conversations: Conversations) -> ReasoningForm:
    if parser is ReasoningParser.NONE:
        raise ParameterError("reasoning_parser must name a format, or be left out, got none", param="reasoning_parser")
    form = conversations.formats.reasoning if parser is ReasoningParser.AUTO else REASONING[parser]
    if form is None:
        raise UnsupportedParameterError(
            "the format of the served model's reasoning is unknown, or turned off (--reasoning-parser); set "
            f"reasoning_parser to one of {', '.join(known.value for known in REASONING)}",
            param="reasoning_parser",
        )
    return form


def parsed_calls(text: str, family: CallFamily, tools: tuple[Tool, ...]) -> ParsedCalls:
    """Returns the calls of `tools` in a whole reply. A call of another tool is text; reasoning that the family always
    has is left out."""
    reasoning = family.reasoning
    layout = ReplyLayout(
        reasoning=reasoning,
        forms=(*family.forms, *(() if reasoning is None else reasoning.headers)),
        separator=family.separator,
        tools={tool.name: tool for tool in tools},
        hidden=(*family.hidden, *(() if reasoning is None else reasoning.hidden)),
    )
    places = {tool.name: number for number, tool in enumerate(tools)}
    found = ParsedCalls("", [])
    for piece in _pieces(text, layout, in_reasoning=False):
        match piece:
            case Text():
                found.normal_text += piece.text
            case CallBegin():
                found.calls.append(ParsedCall(places[piece.name], piece.name, ""))
            case CallArguments():
                found.calls[piece.index].parameters += piece.text
    return found


def separated_reasoning(text: str, form: ReasoningForm) -> SeparatedReasoning:
    """Returns the reasoning of a whole reply, and the rest."""
    layout = ReplyLayout(reasoning=form, forms=form.headers, hidden=form.hidden)
    pieces = _pieces(text, layout, in_reasoning=form.first)
    return SeparatedReasoning(
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece.text for piece in pieces if isinstance(piece, Text)),
    )


def _pieces(text: str, layout: ReplyLayout, *, in_reasoning: bool) -> list[Piece]:
    parser = ReplyParser(layout, in_reasoning=in_reasoning)
    return parser.push(text) + parser.finish()
