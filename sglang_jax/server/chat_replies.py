"""The formats of the served model's replies, and the plan for one request: the enforced grammar and the parser."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from dataclasses import dataclass
from functools import cached_property

from sglang_jax.config import ReasoningParser, ServerConfig, ToolCallParser
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import ParameterError
from sglang_jax.replies import response_template
from sglang_jax.replies.enforce import (
    Format,
    ReasoningStart,
    after_reasoning,
    calls_format,
    grammar_format,
    grammar_of_format,
)
from sglang_jax.replies.families import CALLS, REASONING, family_of_template, markers, reasoning_of_template
from sglang_jax.replies.forms import CallFamily, CallForm, ReasoningForm, ReplyLayout
from sglang_jax.replies.parser import Piece, Reasoning, ReplyParser
from sglang_jax.sampling import SamplingParams
from sglang_jax.sampling.grammar import Grammar
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.tools import ToolRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How the replies of one request are sampled and parsed.

    - `layout`: what they may contain; None if a reply is returned as plain text; `live`: see `ReplyParser`.
    - `markers`: special tokens that the parser needs to see; `grammar`: what the sampler enforces.
    - `whole_reasoning`: the reasoning is returned in one piece; `shows_reasoning`: it is part of the answer.
    """

    layout: ReplyLayout | None = None
    in_reasoning: bool = False
    live: bool = False
    markers: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    short_ids: bool = False
    whole_reasoning: bool = False
    shows_reasoning: bool = True

    def reader(self) -> ReplyReader | None:
        """Returns a new parser for one reply; None for plain text."""
        return None if self.layout is None else ReplyReader(self, self.layout)

    def call_id(self) -> str:
        return uuid.uuid4().hex[:9] if self.short_ids else f"call_{uuid.uuid4().hex[:24]}"


class ReplyReader:
    """Splits one reply into pieces as it arrives."""

    def __init__(self, plan: ReplyPlan, layout: ReplyLayout) -> None:
        self._parser = ReplyParser(layout, in_reasoning=plan.in_reasoning, live=plan.live)
        self._whole_reasoning = plan.whole_reasoning
        self._shows_reasoning = plan.shows_reasoning
        self._reasoning = ""

    @property
    def called(self) -> bool:
        """Whether the reply has called tools and does not end within a call."""
        return self._parser.num_calls > 0 and not self._parser.cut

    def read(self, text: str, *, finished: bool) -> list[Piece]:
        """Adds text, and returns the pieces that are now certain; with `finished`, all of the rest."""
        pieces = self._parser.push(text)
        if finished:
            pieces = pieces + self._parser.finish()
        if not self._shows_reasoning:
            return [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return self._gather_reasoning(pieces, finished=finished) if self._whole_reasoning else pieces

    def _gather_reasoning(self, pieces: list[Piece], *, finished: bool) -> list[Piece]:
        """Joins the reasoning into one piece, before the piece that follows it."""
        gathered: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._reasoning += piece.text
                continue
            gathered += self._take_reasoning()
            gathered.append(piece)
        return gathered + self._take_reasoning() if finished else gathered

    def _take_reasoning(self) -> list[Piece]:
        text, self._reasoning = self._reasoning, ""
        return [Reasoning(text)] if text else []


class ReplyFormats:
    """The formats of the served model's replies, from the options or else its templates; determined at first use."""

    def __init__(self, config: ServerConfig, tokenizer: TextTokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer

    @cached_property
    def family(self) -> CallFamily | None:
        """The format of its tool calls; None if it makes none, or the format is unknown."""
        chosen = self._config.tool_call_parser
        if chosen is ToolCallParser.NONE:
            return None
        if chosen is not ToolCallParser.AUTO:
            return CALLS[chosen]
        own = self._tokenizer.response_template
        found = response_template.call_family(own) if own is not None else None
        if found is not None:
            logger.info("Tool call format: the checkpoint's response template")
            return found
        template = self._tokenizer.chat_template
        known = (own is not None and family_of_template(response_template.signs(own))) or family_of_template(template)
        if not known and "tools" not in template:
            known = ToolCallParser.HERMES  # the prompt describes this format to the model
        logger.info("Tool call format, from the chat template: %s", known or "unknown")
        return CALLS[known] if known else None

    @cached_property
    def reasoning(self) -> ReasoningForm | None:
        """The format of its reasoning; None if it is not separated from the answer."""
        chosen = self._config.reasoning_parser
        if chosen is ReasoningParser.NONE:
            return None
        if chosen is not ReasoningParser.AUTO:
            return REASONING[chosen]
        own = self._tokenizer.response_template
        known = reasoning_of_template(self._tokenizer.chat_template)
        found = REASONING[known] if known else None
        if found is None and own is not None:
            found = response_template.reasoning_form(own)
        logger.info("Reasoning format, from the chat template: %s", known or "unknown")
        return found

    def check(self, tools: ToolRequest | None) -> None:
        """Raises `UnsupportedParameterError` for tools if the model's format of calls is unknown or turned off."""
        if tools is None or self.family is not None:
            return
        how = self._config.tool_call_parser
        reason = (
            "this server was started without them (--tool-call-parser none)"
            if how is ToolCallParser.NONE
            else "the chat template does not show the format of tool calls; start the server with --tool-call-parser"
        )
        raise UnsupportedParameterError(f"tools cannot be called: {reason}", param="tools")

    def plan(
        self,
        prompt: str,
        sampling: SamplingParams,
        tools: ToolRequest | None,
        *,
        continued: str | None,
        separate: bool,
        stream_reasoning: bool,
        shows_reasoning: bool = True,
    ) -> ReplyPlan:
        """Returns the plan for a request's replies. `prompt`: the rendered conversation; `continued`: the text of the
        assistant's message that the reply continues, if any; `separate`, `stream_reasoning`, `shows_reasoning`: see
        `ReplyLayout`, `ReplyPlan`. Raises `ParameterError`."""
        family = None if tools is None else self.family
        reasoning = self.reasoning or (None if family is None else family.reasoning)
        if family is None and reasoning is None:
            return ReplyPlan(grammar=sampling.grammar)
        reasoning_start = ReasoningStart.CLOSED if reasoning is None else _reasoning_start(reasoning, prompt, continued)
        forms: tuple[CallForm, ...] = () if family is None else family.forms
        grammar, live = sampling.grammar, False
        if family is not None and tools is not None and (tools.enforced or grammar is not None):
            enforced = family.enforced(self._signs)
            forms, live = (enforced,), True
            grammar = _with_calls(family, enforced, tools, grammar, reasoning, reasoning_start)
        elif grammar is not None and reasoning is not None and reasoning_start is not ReasoningStart.CLOSED:
            found = after_reasoning(grammar_format(grammar), reasoning, reasoning_start, text=True)
            grammar = grammar_of_format(found, grammar.field)
        if reasoning is not None:
            forms = (*forms, *reasoning.headers)
        hidden = (*(() if family is None else family.hidden), *(() if reasoning is None else reasoning.hidden))
        seen: frozenset[str] = frozenset()
        if sampling.skip_special_tokens:
            seen = markers(forms, reasoning, hidden) & self._tokenizer.special_tokens.keys()
        layout = ReplyLayout(
            reasoning=reasoning,
            forms=forms,
            separator="" if family is None else family.separator,
            tools={} if tools is None else {tool.name: tool for tool in tools.callable},
            hidden=(*hidden, *sorted(seen)),
            separate=separate,
            max_calls=None if tools is None or tools.parallel else 1,
            required=tools is not None and tools.required,
        )
        return ReplyPlan(
            layout=layout,
            in_reasoning=reasoning_start is ReasoningStart.OPEN,
            live=live,
            markers=frozenset(self._tokenizer.special_tokens[token] for token in seen),
            grammar=grammar,
            short_ids=family is not None and family.short_ids,
            whole_reasoning=not stream_reasoning,
            shows_reasoning=shows_reasoning,
        )

    @cached_property
    def _signs(self) -> str:
        return " ".join([self._tokenizer.chat_template, *self._tokenizer.special_tokens])


def _reasoning_start(reasoning: ReasoningForm, prompt: str, continued: str | None) -> ReasoningStart:
    if continued is not None:
        inside = continued.rfind(reasoning.begin) > continued.rfind(reasoning.end)
        return ReasoningStart.OPEN if inside else ReasoningStart.CLOSED
    end = prompt.rstrip()
    if end.endswith(reasoning.begin):
        return ReasoningStart.OPEN
    if end.endswith(reasoning.end) and not reasoning.anywhere:
        return ReasoningStart.CLOSED
    return ReasoningStart.OPEN if reasoning.first else ReasoningStart.UNKNOWN


def _with_calls(
    family: CallFamily,
    form: CallForm,
    tools: ToolRequest,
    grammar: Grammar | None,
    reasoning: ReasoningForm | None,
    reasoning_start: ReasoningStart,
) -> Grammar:
    """Returns the grammar of a reply that either calls tools or follows the request's own grammar."""
    if tools.required and grammar is not None:
        raise ParameterError(
            f"tool_choice requires a tool call, and {grammar.field} another format: remove one of them",
            param=grammar.field,
        )
    answer: Format | None = None if grammar is None else grammar_format(grammar)
    found = calls_format(
        family,
        form,
        tools.callable,
        required=tools.required,
        parallel=tools.parallel,
        answer=answer,
        text_begin="" if reasoning is None else reasoning.answer,
    )
    if reasoning is not None:
        found = after_reasoning(found, reasoning, reasoning_start, text=False)
    return grammar_of_format(found, "tools")


def with_grammar(sampling: SamplingParams, plan: ReplyPlan) -> SamplingParams:
    return sampling if plan.grammar is sampling.grammar else dataclasses.replace(sampling, grammar=plan.grammar)
