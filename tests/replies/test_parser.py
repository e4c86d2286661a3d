"""Replies of each family, cut at every place: the joined stream equals the whole, and both equal the expected reply."""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.config import ReasoningParser, ToolCallParser
from sglang_jax.replies import argument_schemas, call_reader, parser
from sglang_jax.replies.argument_schemas import python_literal
from sglang_jax.replies.families import CALLS, REASONING
from sglang_jax.replies.forms import CallFamily, CallForm, Calls, Literal, ReasoningForm, ReplyLayout, Space, Tool
from sglang_jax.replies.parser import CallArguments, CallBegin, Piece, Reasoning, ReplyParser, Text

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
            "exact": {"type": ["boolean", "null"]},
            "any": {},
            "size": {"type": ["number", "string"]},
            "there": {"$ref": "#/$defs/place"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "each": {"allOf": [{"$ref": "#/$defs/loop"}, {"type": "array"}]},
        },
        "$defs": {"place": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    },
)
TOOLS = {tool.name: tool for tool in (WEATHER, Tool("now", {"type": "object"}), Tool("a.b-c_1"))}

HERMES, CODER, LLAMA, MISTRAL, DEEPSEEK, GPT_OSS = (
    CALLS[one]
    for one in (
        ToolCallParser.HERMES,
        ToolCallParser.QWEN3_CODER,
        ToolCallParser.LLAMA3,
        ToolCallParser.MISTRAL,
        ToolCallParser.DEEPSEEK,
        ToolCallParser.GPT_OSS,
    )
)
R1, QWEN3, HARMONY = (
    REASONING[one] for one in (ReasoningParser.DEEPSEEK_R1, ReasoningParser.QWEN3, ReasoningParser.GPT_OSS)
)


@dataclass(frozen=True)
class Reply:
    """A reply and its expected text, reasoning, and calls as (name, arguments)."""

    raw: str
    text: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""


@dataclass
class Found:
    """Pieces, joined by kind."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece:
                case Text():
                    self.text += piece.text
                case Reasoning():
                    self.reasoning += piece.text
                case CallBegin():
                    assert piece.index == len(self.calls)
                    self.calls.append([piece.name, ""])
                case CallArguments():
                    assert piece.index == len(self.calls) - 1
                    self.calls[-1][1] += piece.text


@dataclass(frozen=True)
class Way:
    """Options of the parser."""

    family: CallFamily | None = None
    reasoning: ReasoningForm | None = None
    in_reasoning: bool = False
    live: bool = False
    separate: bool = True
    hidden: tuple[str, ...] = ()

    def parser(self) -> ReplyParser:
        family = self.family
        layout = ReplyLayout(
            reasoning=self.reasoning,
            forms=(
                *(() if family is None else (family.enforced("```json"),) if self.live else family.forms),
                *(() if self.reasoning is None else self.reasoning.headers),
            ),
            separator="" if family is None else family.separator,
            tools=TOOLS,
            hidden=(
                *(() if family is None else family.hidden),
                *(() if self.reasoning is None else self.reasoning.hidden),
                *self.hidden,
            ),
            separate=self.separate,
        )
        return ReplyParser(layout, in_reasoning=self.in_reasoning, live=self.live)


def found_in(way: Way, parts: Sequence[str]) -> Found:
    reader, found = way.parser(), Found()
    for part in parts:
        found.add(reader.push(part))
    found.add(reader.finish())
    return found


def cuts(raw: str) -> Iterable[list[str]]:
    """A text as characters, in two at every place, and in pieces of three: this covers each boundary of a token or
    byte, since the detokenizer never emits a part of a character."""
    yield list(raw)
    for place in range(1, len(raw)):
        yield [raw[:place], raw[place:]]
    yield [raw[place : place + 3] for place in range(0, len(raw), 3)]


def check(way: Way, reply: Reply) -> None:
    whole = found_in(way, [reply.raw])
    assert whole.text == reply.text
    assert whole.reasoning == reply.reasoning
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == list(reply.calls)
    for _, arguments in whole.calls:
        arguments.encode()
    for parts in cuts(reply.raw):
        assert found_in(way, parts) == whole, parts


PARIS = ("get_weather", {"city": "Paris"})
NESTED = {
    "city": 'Zürich "北" \\ 😀\n',
    "days": -3,
    "where": {"a": [1, {"b": None}], "}": "]"},
    "tags": ["</tool_call>"],
}
NESTED_TEXT = json.dumps(NESTED, ensure_ascii=False)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = hermes("get_weather", '{"city": "Paris"}')

HERMES_REPLIES = {
    "text": Reply("Hello  there \n", "Hello  there \n"),
    "good": Reply(ONE, calls=(PARIS,)),
    "two": Reply(f"{ONE}\n{hermes('now', '{}')}", calls=(PARIS, ("now", {}))),
    "around": Reply(f"Let me look.\n\n{ONE}\nDone. ", "Let me look.\nDone.", (PARIS,)),
    "nested": Reply(hermes("get_weather", NESTED_TEXT), calls=(("get_weather", NESTED),)),
    "escapes": Reply(
        hermes("get_weather", '{"city": "\\u00fc\\ud83d\\ude00\\n\\"<tool_call>\\\\"}'),
        calls=(("get_weather", {"city": 'ü😀\n"<tool_call>\\'}),),
    ),
    "half a pair": Reply(hermes("now", '{"a": "\\ud800"}'), calls=(("now", {"a": "\ud800"}),)),
    "a line end in a string": Reply(hermes("now", '{"a": "b\nc"}'), calls=(("now", {"a": "b\nc"}),)),
    "other order": Reply(
        '<tool_call>{"arguments":{"city":"Paris"},"id":7,"name":"get_weather"}</tool_call>', calls=(PARIS,)
    ),
    "arguments in a text": Reply(hermes("now", '"{\\"a\\": 1}"'), calls=(("now", {"a": 1}),)),
    "no arguments": Reply('<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    "a list": Reply(
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "parameters": {"a": 2}}]</tool_call>',
        calls=(("now", {}), ("now", {"a": 2})),
    ),
    "of no tool": Reply(hermes("rm", "{}"), hermes("rm", "{}")),
    "a list with another": Reply(
        '<tool_call>[{"name": "now"}, {"name": "rm"}]</tool_call>',
        '<tool_call>[{"name": "now"}, {"name": "rm"}]</tool_call>',
    ),
    "not JSON": Reply("<tool_call>\nget_weather(Paris)\n</tool_call>", "<tool_call>\nget_weather(Paris)\n</tool_call>"),
    "a comma too many": Reply(hermes("now", '{"a": 1,}'), hermes("now", '{"a": 1,}')),
    "a brace too few": Reply(
        '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {}\n</tool_call>',
    ),
    "no number": Reply(hermes("now", '{"a": 01}'), hermes("now", '{"a": 01}')),
    "not a number": Reply(hermes("now", '{"a": NaN}'), hermes("now", '{"a": NaN}')),
    "arguments of a list": Reply(hermes("now", "[1]"), hermes("now", "[1]")),
    "null for arguments": Reply(hermes("now", "null"), calls=(("now", {}),)),
    "without its end": Reply('So. <tool_call>\n{"name": "now", "arguments": {}}\n', "So.", (("now", {}),)),
    "half a character": Reply(
        hermes("now", '"{\\"a\\": \\"\\ud800 \\ud83d\\ude00\\"}"'), calls=(("now", {"a": "\ud800 😀"}),)
    ),
    "a line end in a string in a string": Reply(
        hermes("now", '"{\\"a\\": \\"b\\nc\\"}"'), calls=(("now", {"a": "b\nc"}),)
    ),
    "an open string, then a good one": Reply(
        hermes("now", '{"a": "b}') + "\n" + ONE, hermes("now", '{"a": "b}'), (PARIS,)
    ),
    "an opening twice": Reply(f"<tool_call>\n{ONE}", "<tool_call>", (PARIS,)),
    "cut in its name": Reply(ONE[:22], ONE[:22]),
    "cut in its arguments": Reply("Hm. " + ONE[:-20], "Hm. " + ONE[:-20]),
    "cut before its end": Reply("Hm. " + ONE[:-4], "Hm.", (PARIS,)),
    "cut before its last brace": Reply(ONE[:-14], ONE[:-14]),
    "cut in the opening of another": Reply(f"{ONE}\n<tool", calls=(PARIS,)),
    "the beginning of its end, and text": Reply(f"{ONE[:-4]} and so", f"{ONE[:-4]} and so"),
    "cut in its opening": Reply("a < b <tool", "a < b <tool"),
    "white space alone": Reply(" \n", " \n"),
    "nothing": Reply(""),
    "a good one, then a cut one": Reply(f"{ONE}\n{ONE[:30]}", f"\n{ONE[:30]}", (PARIS,)),
}


def coder(name: str, *parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


CODER_REPLIES = {
    "good": Reply(coder("get_weather", ("city", "Paris")), calls=(PARIS,)),
    "two": Reply(
        "I look.\n" + coder("get_weather", ("city", "Paris")) + "\n" + coder("now"), "I look.", (PARIS, ("now", {}))
    ),
    "types": Reply(
        coder(
            "get_weather", ("city", "12"), ("days", "12"), ("where", '{"a": [1, "b"]}'), ("tags", '["x"]'),
            ("exact", "True"), ("any", "7"),
        ),
        calls=(
            (
                "get_weather",
                {"city": "12", "days": 12, "where": {"a": [1, "b"]}, "tags": ["x"], "exact": True, "any": "7"},
            ),
        ),
    ),
    "null": Reply(coder("get_weather", ("exact", "null")), calls=(("get_weather", {"exact": None}),)),
    "not what its schema says": Reply(
        coder("get_weather", ("days", "a few"), ("exact", "maybe")),
        calls=(("get_weather", {"days": "a few", "exact": "maybe"}),),
    ),
    "lines, quotes, tags": Reply(
        coder("get_weather", ("city", 'a\n  "b" <b>\\n</b>\n名😀\n')),
        calls=(("get_weather", {"city": 'a\n  "b" <b>\\n</b>\n名😀\n'}),),
    ),
    "without the outer tag": Reply(
        "<function=now>\n<parameter=a>\n1\n</parameter>\n</function>", calls=(("now", {"a": "1"}),)
    ),
    "without its opening": Reply("So.\n" + coder("now")[12:] + "\nYes", "So.\nYes", (("now", {}),)),
    "without its opening, another": Reply(coder("now")[12:] + "\n" + coder("now"), calls=(("now", {}), ("now", {}))),
    "without its end": Reply(coder("now", ("a", "b"))[:-13], calls=(("now", {"a": "b"}),)),
    "without the end of a value": Reply(
        coder("get_weather", ("city", "Oslo"), ("days", "3")).replace("\n</parameter>", "", 1),
        calls=(("get_weather", {"city": "Oslo", "days": 3}),),
    ),
    "what is referred to": Reply(
        coder("get_weather", ("there", '{"x": 1}'), ("maybe", "null"), ("each", "[5]")),
        calls=(("get_weather", {"there": {"x": 1}, "maybe": None, "each": [5]}),),
    ),
    "text where there may be others": Reply(
        coder("get_weather", ("maybe", "Oslo"), ("there", "x"), ("size", "5")),
        calls=(("get_weather", {"maybe": "Oslo", "there": "x", "size": 5}),),
    ),
    "of no tool": Reply(coder("rm", ("a", "b")), coder("rm", ("a", "b"))),
    "no name": Reply(
        "<tool_call>\n<function=>\n</function>\n</tool_call>", "<tool_call>\n<function=>\n</function>\n</tool_call>"
    ),
    "a key without its end": Reply(
        "<tool_call>\n<function=now>\n<parameter=a\n1</parameter></function></tool_call>",
        "<tool_call>\n<function=now>\n<parameter=a\n1</parameter></function></tool_call>",
    ),
    "cut in a value": Reply("Well. " + coder("now", ("a", "b"))[:50], "Well. " + coder("now", ("a", "b"))[:50]),
    "cut behind a value": Reply(coder("now", ("a", "b"))[:-25], coder("now", ("a", "b"))[:-25]),
    "as Python writes it": Reply(
        coder(
            "get_weather",
            ("tags", "['a', True, None, -1.5, ('x\\'\\n', \"it's\",)]"),
            ("where", "{'a': {'b': [False]}}"),
        ),
        calls=(
            (
                "get_weather",
                {"tags": ["a", True, None, -1.5, ["x'\n", "it's"]], "where": {"a": {"b": [False]}}},
            ),
        ),
    ),
    "JSON first": Reply(coder("get_weather", ("tags", '["\\u00e9\\/"]')), calls=(("get_weather", {"tags": ["é/"]}),)),
    "what Python writes and JSON has not": Reply(
        coder(
            "get_weather", ("where", "{1: 2}"), ("tags", "['', 1e999]"), ("there", "{'', 1}"), ("each", "[open('')]")
        ),
        calls=(("get_weather", {"where": "{1: 2}", "tags": "['', 1e999]", "there": "{'', 1}", "each": "[open('')]"}),),
    ),
    "not of the type that its schema says": Reply(
        coder("get_weather", ("where", "['a']"), ("tags", "{'a': 1}"), ("city", "['a']"), ("size", "['a']")),
        calls=(("get_weather", {"where": "['a']", "tags": "{'a': 1}", "city": "['a']", "size": "['a']"}),),
    ),
    "half a character as Python writes it": Reply(
        coder("get_weather", ("tags", "['\\ud800']")), calls=(("get_weather", {"tags": ["\ud800"]}),)
    ),
}  # fmt: skip

LLAMA_REPLIES = {
    "text": Reply("Hello {there}", "Hello {there}"),
    "good": Reply('{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)),
    "two": Reply(
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}}',
        calls=(("now", {}), PARIS),
    ),
    "with its tag": Reply('<|python_tag|>{"name": "now", "arguments": {"a": [1]}}', calls=(("now", {"a": [1]}),)),
    "JSON that is no call": Reply('\n{"city": "Paris", "name": "x"} is it', '\n{"city": "Paris", "name": "x"} is it'),
    "JSON behind text": Reply('See {"name": "now"}', 'See {"name": "now"}'),
    "text behind": Reply('{"name": "now"}\nSo it is.', "\nSo it is.", (("now", {}),)),
    "code": Reply("<|python_tag|>print(1)", "print(1)"),
    "a list that is none": Reply("[1] says so", "[1] says so"),
    "cut": Reply('{"name": "now", "parameters": {"a"', '{"name": "now", "parameters": {"a"'),
    "cut behind a separator": Reply('{"name": "now", "parameters": {}} ;', calls=(("now", {}),)),
    "nested": Reply(f'{{"name": "get_weather", "parameters": {NESTED_TEXT}}}', calls=(("get_weather", NESTED),)),
}

MISTRAL_REPLIES = {
    "good": Reply('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', calls=(PARIS,)),
    "two": Reply(
        'So.[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]',
        "So.",
        (("now", {}), PARIS),
    ),
    "newer": Reply('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', calls=(PARIS,)),
    "newer, two": Reply(
        'So.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}',
        "So.",
        (("now", {}), PARIS),
    ),
    "nested": Reply(f"[TOOL_CALLS]get_weather[ARGS]{NESTED_TEXT}", calls=(("get_weather", NESTED),)),
    "without ARGS": Reply('[TOOL_CALLS]now{"a": 1} so', " so", (("now", {"a": 1}),)),
    "of no tool": Reply("[TOOL_CALLS]rm[ARGS]{}", "rm{}"),
    "not JSON": Reply("[TOOL_CALLS]now[ARGS]{a}", "now{a}"),
    "cut": Reply('[TOOL_CALLS]now[ARGS]{"a": ', 'now{"a": '),
    "text": Reply("[1] and [TOOL", "[1] and [TOOL"),
    "cut before its end": Reply('[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}', calls=(("now", {"a": 1}),)),
    "cut behind a comma": Reply('[TOOL_CALLS][{"name": "now", "arguments": {}}, ', calls=(("now", {}),)),
    "cut in the second": Reply('[TOOL_CALLS][{"name": "now"}, {"name": "no', '{"name": "no', (("now", {}),)),
    "newer, cut in the opening of another": Reply("[TOOL_CALLS]now[ARGS]{}[TOOL", calls=(("now", {}),)),
}

BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek(name: str, arguments: str) -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


DEEPSEEK_REPLIES = {
    "good": Reply(CALLS_BEGIN + deepseek("get_weather", '{"city": "Paris"}') + CALLS_END, calls=(PARIS,)),
    "two": Reply(
        "I look.\n" + CALLS_BEGIN + deepseek("now", "{}") + "\n" + deepseek("get_weather", NESTED_TEXT) + CALLS_END,
        "I look.",
        (("now", {}), ("get_weather", NESTED)),
    ),
    "newer": Reply(
        f'{CALLS_BEGIN}{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}{BEGIN}now{SEP}{{}}{END}{CALLS_END}',
        calls=(PARIS, ("now", {})),
    ),
    "of no tool": Reply(f"{CALLS_BEGIN}{BEGIN}rm{SEP}{{}}{END}{CALLS_END}", f"{BEGIN}rm{SEP}{{}}{END}"),
    "malformed": Reply(CALLS_BEGIN + deepseek("now", "{a}") + CALLS_END, deepseek("now", "{a}")),
    "cut": Reply(CALLS_BEGIN + deepseek("now", '{"a": 1}')[:-24], deepseek("now", '{"a": 1}')[:-24]),
    "cut behind its arguments": Reply(CALLS_BEGIN + deepseek("now", '{"a": 1}')[:-21], calls=(("now", {"a": 1}),)),
    "cut in its end": Reply(CALLS_BEGIN + deepseek("now", '{"a": 1}')[:-20], calls=(("now", {"a": 1}),)),
    "newer, cut in its end": Reply(f"{CALLS_BEGIN}{BEGIN}now{SEP}{{}}{END[:-3]}", calls=(("now", {}),)),
    "cut in the end of all": Reply(CALLS_BEGIN + deepseek("now", "{}") + CALLS_END[:-2], calls=(("now", {}),)),
}

COMMENTARY = "<|channel|>commentary to=functions."
GPT_OSS_REPLIES = {
    "final": Reply(
        "<|channel|>analysis<|message|>Hm, well. <|end|><|start|>assistant<|channel|>final<|message|>Hi there.",
        "Hi there.",
        reasoning="Hm, well.",
    ),
    "good": Reply(
        f"<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant{COMMENTARY}get_weather "
        '<|constrain|>json<|message|>{"city":"Paris"}',
        calls=(PARIS,),
        reasoning="Look it up.",
    ),
    "with its end": Reply(f"{COMMENTARY}now <|constrain|>json<|message|>{{}}<|call|>", calls=(("now", {}),)),
    "two, and words before": Reply(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        f"<|message|>{{}}<|call|><|start|>assistant{COMMENTARY}get_weather<|message|>{NESTED_TEXT}<|call|>",
        "I look.",
        (("now", {}), ("get_weather", NESTED)),
    ),
    "of no tool": Reply(f"{COMMENTARY}rm<|message|>{{}}", "commentary to=functions.rm{}"),
    "malformed": Reply(f"{COMMENTARY}now <|constrain|>json<|message|>{{a}}", "commentary to=functions.nowjson{a}"),
    "an answer in JSON": Reply('<|channel|>final <|constrain|>json<|message|>{"a":1}', '{"a":1}'),
    "without functions": Reply("<|channel|>commentary to=now <|constrain|>json<|message|>{}", calls=(("now", {}),)),
    "to whom first": Reply(
        ' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a":1}', calls=(("now", {"a": 1}),)
    ),
    "cut in its end": Reply(f"{COMMENTARY}now<|message|>{{}}<|ca", calls=(("now", {}),)),
    "to nobody": Reply("to=be or", "to=be or"),
    "thoughts without an end": Reply(
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi", "Hi", reasoning="Hm."
    ),
    "thoughts without an end, then a call": Reply(
        f"<|channel|>analysis<|message|>Hm.<|start|>assistant{COMMENTARY}now<|message|>{{}}",
        calls=(("now", {}),),
        reasoning="Hm.",
    ),
    "cut in a header": Reply("<|channel|>ana", "ana"),
    "cut in a call": Reply(f'{COMMENTARY}now<|message|>{{"a"', 'commentary to=functions.now{"a"'),
    "cut in its thoughts": Reply("<|channel|>analysis<|message|>Well", reasoning="Well"),
}

THINK_REPLIES = {
    "good": Reply(f"<think>\nHm.\n\nYes.\n</think>\n\nIt is.\n{ONE}", "It is.", (PARIS,), "Hm.\n\nYes."),
    "a call in its thoughts": Reply(f"<think>{ONE}</think>No.", "No.", reasoning=ONE),
    "none": Reply("It is so </think> now", "It is so </think> now"),
    "empty": Reply("<think>\n\n</think>\n\nHi", "Hi"),
    "cut": Reply("<think>\nHm, a </th", reasoning="Hm, a </th"),
    "later": Reply("The tag <think> begins it", "The tag <think> begins it"),
    "white space before": Reply("\n <think>a</think>b", "b", reasoning="a"),
}
BEGUN_REPLIES = {
    "good": Reply(f"\nHm.\n</think>\n\n{ONE}", "", (PARIS,), "Hm."),
    "said again": Reply("<think>\nHm.</think> Yes <think>", "Yes <think>", reasoning="Hm."),
    "never over": Reply(f"Hm {ONE} ", reasoning=f"Hm {ONE}"),
}
SAID_REPLIES = {
    "good": Reply(f"<think>\nHm.\n</think>\n\nSo. {ONE}", "<think>\nHm.\n</think>\n\nSo.", (PARIS,)),
    "a call in its thoughts": Reply(f"<think>{ONE}</think>", f"<think>{ONE}</think>"),
}

MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
OSS_TOKENS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
CORPUS: dict[str, tuple[Way, dict[str, Reply]]] = {
    "hermes": (Way(HERMES), HERMES_REPLIES),
    "qwen3_coder": (Way(CODER), CODER_REPLIES),
    "llama3": (Way(LLAMA, hidden=("<|python_tag|>",)), LLAMA_REPLIES),
    "mistral": (Way(MISTRAL, hidden=MISTRAL_TOKENS), MISTRAL_REPLIES),
    "deepseek": (Way(DEEPSEEK), DEEPSEEK_REPLIES),
    "gpt_oss": (Way(GPT_OSS, HARMONY, hidden=OSS_TOKENS), GPT_OSS_REPLIES),
    "qwen3": (Way(HERMES, QWEN3), THINK_REPLIES),
    "deepseek_r1": (Way(HERMES, R1, in_reasoning=True), BEGUN_REPLIES),
    "reasoning in the text": (Way(HERMES, QWEN3, separate=False), SAID_REPLIES),
}
CASES = [
    pytest.param(way, reply, id=f"{family}: {name}")
    for family, (way, replies) in CORPUS.items()
    for name, reply in replies.items()
]


@pytest.mark.parametrize(("way", "reply"), CASES)
def test_replies_cut_at_every_place(way: Way, reply: Reply) -> None:
    check(way, reply)


GOOD = [
    pytest.param(way, reply, id=f"{family}: {name}")
    for family, (way, replies) in CORPUS.items()
    for name, reply in replies.items()
    if name in ("good", "two", "text") or (family, name) == ("hermes", "nested")
]


@pytest.mark.parametrize(("way", "reply"), GOOD)
def test_enforced_calls_are_streamed(way: Way, reply: Reply) -> None:
    check(replace(way, live=True), reply)


CLOSED = {
    "hermes": (HERMES, hermes("now", '{"a": 1}'), len("</tool_call>")),
    "qwen3_coder": (CODER, coder("get_weather", ("days", "1")), len("function>\n</tool_call>")),
    "qwen3_coder, without its opening": (
        CODER, coder("get_weather", ("days", "1"))[12:], len("function>\n</tool_call>"),
    ),
    "llama3": (LLAMA, '{"name": "now", "parameters": {"a": 1}}; ', len("; ")),
    "mistral": (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}]', len("]")),
    "deepseek": (DEEPSEEK, CALLS_BEGIN + deepseek("now", '{"a": 1}') + CALLS_END, len("\n```" + END + CALLS_END)),
    "deepseek, newer": (
        DEEPSEEK, f'{CALLS_BEGIN}{BEGIN}now{SEP}{{"a": 1}}{END}{CALLS_END}', len(END + CALLS_END),
    ),
    "gpt_oss": (GPT_OSS, f'{COMMENTARY}now<|message|>{{"a": 1}}<|call|>', len("<|call|>")),
}  # fmt: skip


@pytest.mark.parametrize(("family", "raw", "closing"), CLOSED.values(), ids=CLOSED)
def test_a_call_truncated_in_its_closing_tag_is_a_call(family: CallFamily, raw: str, closing: int) -> None:
    """With max_tokens it used to be text, or the call followed by its tag as text."""
    ways = [Way(family, HARMONY if family is GPT_OSS else None, hidden=OSS_TOKENS)]
    if not raw.startswith("<function="):  # not an enforced call
        form = family.enforced("```json" if "```json" in raw else "")
        ways.append(replace(ways[0], family=replace(family, forms=(form,)), live=True))
    call = ("get_weather", {"days": 1}) if "get_weather" in raw else ("now", {"a": 1})
    for way, left in itertools.product(ways, range(closing + 1)):
        check(way, Reply(raw[: len(raw) - left], calls=(call,)))
        reader = way.parser()
        reader.push(raw[: len(raw) - left])
        reader.finish()
        assert not reader.cut


def test_enforced_calls_are_streamed_and_a_truncated_one_stays() -> None:
    reader, found, seen = Way(HERMES, live=True).parser(), Found(), []
    for char in ONE[:-15]:
        found.add(reader.push(char))
        seen.append(found.calls[0][1] if found.calls else None)
    assert {None, "", "{", '{"', '{"city": "Pa'} <= set(seen)
    found.add(reader.finish())
    assert found == Found(calls=[["get_weather", '{"city": "Paris"']])


BROKEN = {
    "hermes": (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": 1]} so', [["now", '{"a": 1']], "]} so"),
    "hermes, its end": (
        HERMES,
        '<tool_call>\n{"name": "now", "arguments": {}}\n</toll> so',
        [["now", "{}"]],
        "</toll> so",
    ),
    "mistral": (MISTRAL, '[TOOL_CALLS]now[ARGS]{"a": 1] so', [["now", '{"a": 1']], "] so"),
    "deepseek": (DEEPSEEK, CALLS_BEGIN + BEGIN + f"function{SEP}now\n```json\n{{}}?", [["now", "{}"]], "?"),
    "qwen3_coder": (CODER, coder("now", ("a", "b"))[:-24] + "</fx>", [["now", '{"a": "b"}']], "</fx>"),
    "of no tool": (HERMES, hermes("rm", "{}"), [], hermes("rm", "{}")),
}


@pytest.mark.parametrize(("family", "raw", "calls", "text"), BROKEN.values(), ids=BROKEN)
def test_the_streamed_part_of_a_call_is_never_taken_back(
    family: CallFamily, raw: str, calls: list[list[str]], text: str
) -> None:
    """Even if the grammar accepts text that the parser does not."""
    way = Way(family, live=True)
    if family is MISTRAL:
        way = replace(way, family=replace(MISTRAL, forms=MISTRAL.forms[1:2]))
    for parts in ([raw], *cuts(raw)):
        found = found_in(way, parts)
        assert (found.calls, found.text) == (calls, text), parts


def test_the_number_of_calls_is_limited() -> None:
    layout = ReplyLayout(forms=HERMES.forms, tools=TOOLS, max_calls=1)
    reader, found = ReplyParser(layout), Found()
    found.add([*reader.push(f"{ONE}{hermes('now', '{}')} so"), *reader.finish()])
    assert (len(found.calls), found.text, reader.num_calls) == (1, " so", 2)


PIECES = [
    "<tool_call>", "</tool_call>", "<function=now>", "<parameter=a>", "</parameter>", "</function>", '{"name": "now"',
    ', "arguments": {', "}", "[", "]", '"', "\\", "{", ",", ": 1", " ", "\n", "x", "é", "😀", "<think>", "</think>",
    "[TOOL_CALLS]", "[ARGS]", "now", "<|python_tag|>", ";", BEGIN, SEP, END, CALLS_BEGIN, "function", "```json", "```",
    "<|channel|>", "commentary", " to=functions.", "<|message|>", "analysis", "final", "<|end|>", "<|start|>assistant",
    "<|call|>", "<", "<|",
]  # fmt: skip
WAYS = [way for way, _ in CORPUS.values()] + [Way(LLAMA, QWEN3), Way(MISTRAL, R1, in_reasoning=True)]
WAYS += [replace(way, live=True) for way in WAYS]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WAYS), st.lists(st.sampled_from(PIECES), max_size=14), st.data())
def test_any_text_parses_the_same_in_any_pieces(way: Way, words: list[str], data: st.DataObject) -> None:
    """Never an error for any text; the same for any cut; every call is of a listed tool, with an object as
    arguments, or the start of one where calls are streamed."""
    raw = "".join(words)
    whole = found_in(way, [raw])
    assert found_in(way, list(raw)) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    assert found_in(way, [raw[a:b] for a, b in itertools.pairwise([0, *places, len(raw)])]) == whole
    for name, arguments in whole.calls:
        assert name in TOOLS
        arguments.encode()
        assert way.live or isinstance(json.loads(arguments), dict)


def test_the_cost_of_a_long_reply_is_linear() -> None:
    """Thousands of characters, a few at a time, that look like calls throughout. With a step per pair of characters
    this would take minutes."""
    for raw in ("<tool_call>" * 2000, ONE[:40] + "x" * 20_000, " \n" * 10_000, "<function=now><parameter=a>" * 800):
        for way in (Way(HERMES), Way(CODER)):
            reader = way.parser()
            for place in range(0, len(raw), 8):
                reader.push(raw[place : place + 8])
            reader.finish()


def test_planted_faults_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these changes some reply of the corpus when it is cut."""

    def fails() -> bool:
        for way, replies in CORPUS.values():
            for reply in replies.values():
                try:
                    check(way, reply)
                except (AssertionError, IndexError, ValueError):
                    return True
        return False

    def planted(target: Any, name: str, value: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            return fails()

    def forget(reader: Any) -> None:
        reader._region, reader._held = parser._Region.TEXT, ""

    assert planted(parser._Markers, "_certain", lambda self, text: len(text))  # shows the start of a marker
    assert planted(parser.ReplyParser, "_without_hidden", lambda self, text: text)  # shows markers to the user
    assert planted(parser.ReplyParser, "_treat_as_text", forget)  # loses text that was not a call
    assert planted(call_reader, "json_object", lambda text: text)  # accepts text that is not JSON
    assert planted(call_reader, "_without_ends", lambda value: value)
    assert planted(call_reader.ArgumentSchemas, "as_json", lambda self, value, schema: json.dumps(value))


def test_python_literals_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser gets no more than it can read, and nothing that it would warn about."""
    parsed: list[str] = []
    literal_eval = ast.literal_eval
    monkeypatch.setattr(argument_schemas.ast, "literal_eval", lambda text: parsed.append(text) or literal_eval(text))
    long = "['" + "a" * (argument_schemas.MAX_LITERAL_CHARACTERS - 4) + "']"
    deep = "[" * 150 + "'a'" + "]" * 150
    too_deep = "[" * 8000 + "]" * 8000
    for value in (long, deep):
        found = python_literal(value)
        assert found is not None
        assert json.loads(found[1]) == literal_eval(value) == found[0]
    assert parsed == [long, deep]
    assert python_literal(too_deep) is None
    parsed.clear()
    refused = (
        f"{long} ",
        "['\\d']",
        "['\\400']",
        "[1if 1else 2]",
        "[b'']",
        "[f'{a}']",
        "[a]",
        "[1.a]",
        "['a'.b]",
        "'a'",
        "",
    )
    assert [value for value in refused if python_literal(value) is not None] == []
    assert parsed == []


def test_a_family_is_only_a_row_of_the_table() -> None:
    """A format without code of its own is read by its row in the table."""
    row = CallFamily((CallForm("«call»", (Space(), Calls(), Literal("«end»"))),))
    check(Way(row), Reply('Hm. «call» {"name": "now", "arguments": {"a": 1}}«end»', "Hm.", (("now", {"a": 1}),)))


def test_the_cost_of_thousands_of_calls_at_once_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffered text was scanned and copied for each call in it: 3 seconds for 16,000 calls at once."""
    family = CALLS[ToolCallParser.HERMES]
    tools = {"f": Tool("f", {"type": "object"})}
    layout = ReplyLayout(forms=family.forms, separator=family.separator, tools=tools, hidden=family.hidden)
    looked_at = 0
    find = parser._Markers.find

    def counting(self: parser._Markers, text: str, *, final: bool) -> tuple[int, str]:
        nonlocal looked_at
        looked_at += len(text)
        return find(self, text, final=final)

    monkeypatch.setattr(parser._Markers, "find", counting)
    number, machine = 3000, ReplyParser(layout)
    one = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    pieces = machine.push(one * number) + machine.finish()
    assert machine.num_calls == number
    assert pieces[-1] == CallArguments(number - 1, '{"a": 1}')
    assert looked_at < 3 * parser._SLICE_CHARACTERS * number < number * len(one) * number / 10


def test_a_long_text_is_one_piece() -> None:
    text = "word " * 5000
    assert ReplyParser(ReplyLayout()).push(text) == [Text(text.rstrip())]
