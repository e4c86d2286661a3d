"""The table of formats: how families of models write tool calls and reasoning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sglang_jax.config import ReasoningParser, ToolCallParser
from sglang_jax.replies.forms import (
    Arguments,
    CallFamily,
    CallForm,
    Calls,
    Literal,
    Name,
    Parameters,
    ReasoningForm,
    Space,
    UpTo,
    Written,
)

HARMONY = ReasoningForm(
    begin="<|channel|>analysis<|message|>",
    end="<|end|>",
    anywhere=True,
    then="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    headers=(CallForm("<|channel|>final", (UpTo("<|message|>"),)),),
    stops=("<|channel|>", "<|start|>assistant"),
    hidden=(
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
)

REASONING: Mapping[ReasoningParser, ReasoningForm] = {
    ReasoningParser.DEEPSEEK_R1: ReasoningForm("<think>", "</think>", first=True),
    ReasoningParser.QWEN3: ReasoningForm("<think>", "</think>"),
    ReasoningParser.GPT_OSS: HARMONY,
}

_HERMES = CallFamily(
    forms=(
        CallForm(
            opening="<tool_call>",
            parts=(Space(), Calls(), Space(), Literal("</tool_call>", ends=True)),
            written=Written('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n"),
        ),
    )
)

_QWEN3_CODER = CallFamily(
    forms=(
        CallForm(
            opening="<tool_call>",
            parts=(
                Space(),
                Literal("<function="),
                Name(),
                Literal(">"),
                Parameters("<parameter=", ">", "</parameter>"),
                Space(),
                Literal("</function>"),
                Space(),
                Literal("</tool_call>", ends=True),
            ),
            written=Written("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", separator="\n"),
        ),
        CallForm(  # models of the family often omit the outer tag
            opening="<function=",
            parts=(
                Name(),
                Literal(">"),
                Parameters("<parameter=", ">", "</parameter>"),
                Space(),
                Literal("</function>"),
                Literal("</tool_call>", optional=True, spaced=True),
            ),
        ),
    )
)

_LLAMA3 = CallFamily(
    forms=(
        CallForm(
            opening="",
            parts=(Calls(),),
            written=Written('{"name": "{name}", "parameters": ', "}", separator="; "),
        ),
        CallForm(opening="<|python_tag|>", parts=(Space(), Calls())),
    ),
    separator=";",
    starts_reply=True,
)

_MISTRAL = CallFamily(
    forms=(
        CallForm(
            opening="[TOOL_CALLS]",
            parts=(Space(), Calls()),
            written=Written('{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
        ),
        CallForm(
            opening="[TOOL_CALLS]",
            parts=(Space(), Name(), UpTo("[ARGS]"), Space(), Arguments()),
            written=Written("[TOOL_CALLS]{name}[ARGS]", ""),
            sign="[ARGS]",
        ),
        CallForm(opening="[TOOL_CALLS]", parts=(Space(), Name(), Space(), Arguments())),
    ),
    short_ids=True,
)

_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

_DEEPSEEK = CallFamily(
    forms=(
        CallForm(  # V3.1
            opening=_CALL,
            parts=(Name(), Literal(_SEP), Space(), Arguments(), Space(), Literal(_CALL_END)),
            written=Written(_CALL + "{name}" + _SEP, _CALL_END, "", _CALLS, _CALLS_END),
        ),
        CallForm(  # V3, R1
            opening=_CALL,
            parts=(
                Literal("function" + _SEP),
                Name(),
                Space(),
                Literal("```json"),
                Space(),
                Arguments(),
                Space(),
                Literal("```"),
                Space(),
                Literal(_CALL_END),
            ),
            written=Written(
                _CALL + "function" + _SEP + "{name}\n```json\n", "\n```" + _CALL_END, "\n", _CALLS, _CALLS_END
            ),
            sign="```json",
        ),
    ),
    hidden=(_CALLS, _CALLS_END),
)

_TO_TOOL = (
    Literal("functions.", optional=True),
    Name(),
    UpTo("<|message|>"),
    Space(),
    Arguments(),
    Literal("<|call|>", optional=True),
)

_GPT_OSS = CallFamily(
    forms=(
        CallForm(
            opening="<|channel|>commentary to=",
            parts=_TO_TOOL,
            written=Written("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "", single=True),
        ),
        CallForm(opening="<|channel|>analysis to=", parts=_TO_TOOL),
        CallForm(opening="<|start|>assistant to=", parts=_TO_TOOL),
        CallForm(opening="", parts=(Literal("to="), *_TO_TOOL), begins=("to=",)),  # the prompt ends with the role
    ),
    hidden=HARMONY.hidden,
    starts_reply=True,
    reasoning=HARMONY,
)

CALLS: Mapping[ToolCallParser, CallFamily] = {
    ToolCallParser.HERMES: _HERMES,
    ToolCallParser.QWEN3_CODER: _QWEN3_CODER,
    ToolCallParser.LLAMA3: _LLAMA3,
    ToolCallParser.MISTRAL: _MISTRAL,
    ToolCallParser.DEEPSEEK: _DEEPSEEK,
    ToolCallParser.GPT_OSS: _GPT_OSS,
}

_SIGNS: tuple[tuple[ToolCallParser, tuple[str, ...]], ...] = (
    (ToolCallParser.GPT_OSS, ("<|channel|>", "<|message|>")),
    (ToolCallParser.DEEPSEEK, (_CALL,)),
    (ToolCallParser.MISTRAL, ("[TOOL_CALLS]",)),
    (ToolCallParser.QWEN3_CODER, ("<function=", "<parameter=")),
    (ToolCallParser.HERMES, ("<tool_call>",)),
    (ToolCallParser.LLAMA3, ("<|python_tag|>",)),
    (ToolCallParser.LLAMA3, ("<|start_header_id|>", '"parameters": ')),
)
"""Texts that identify a family by its chat templates, the most specific first."""

_ARG_KEY_MARKER = "<arg_key>"
"""A marker of other models' calls that start like those of Hermes."""

_TOKENS = re.compile(r"<[|｜][^<>]*?[|｜]>|\[[A-Z_]+\]|</?\w+>")
"""Texts of the table that may be special tokens."""


def family_of_template(template: str) -> ToolCallParser | None:
    """Returns the family whose markers a chat template uses for calls; None if they are unknown."""
    known = next((family for family, signs in _SIGNS if all(sign in template for sign in signs)), None)
    return None if known is ToolCallParser.HERMES and _ARG_KEY_MARKER in template else known


def reasoning_of_template(template: str) -> ReasoningParser | None:
    if all(sign in template for sign in ("<|channel|>", "<|message|>")):
        return ReasoningParser.GPT_OSS
    if "</think>" not in template:
        return None
    return ReasoningParser.DEEPSEEK_R1 if "<｜Assistant｜>" in template else ReasoningParser.QWEN3


def markers(forms: Iterable[CallForm], reasoning: ReasoningForm | None, hidden: Iterable[str]) -> frozenset[str]:
    """Returns possible special tokens in these rows of the table, which the parser of a reply needs to see."""
    texts = [*hidden]
    if reasoning is not None:
        texts += [reasoning.begin, reasoning.end, reasoning.then, reasoning.answer, *reasoning.hidden]
    for form in forms:
        texts.append(form.opening)
        for part in form.parts:
            match part:
                case Literal() | UpTo():
                    texts.append(part.text)
                case Parameters():
                    texts += [part.begin, part.end]
                case _:
                    pass
        if form.written is not None:
            written = form.written
            texts += [written.begin, written.end, written.before, written.after, "[CALL_ID]"]
    return frozenset(token for text in texts for token in _TOKENS.findall(text))
