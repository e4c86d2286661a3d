"""The grammar and the parser of each family's calls agree: random walks through the grammar are parsed.

The oracle for the arguments is the schema, by a small separate check.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.config import ReasoningParser, ToolCallParser
from sglang_jax.errors import GrammarError, ParameterError
from sglang_jax.grammar.interface import MatchState
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.grammar.llguidance_trial import Trial
from sglang_jax.replies import call_reader
from sglang_jax.replies.enforce import ReasoningStart, after_reasoning, calls_format, grammar_format, grammar_of_format
from sglang_jax.replies.families import CALLS, REASONING, markers
from sglang_jax.replies.forms import CallFamily, ReasoningForm, ReplyLayout, Tool
from sglang_jax.replies.parser import CallArguments, CallBegin, Reasoning, ReplyParser, Text
from sglang_jax.runner.plan import allowed_tokens, mask_words
from sglang_jax.sampling.grammar import Grammar, GrammarKind, choice_grammar, json_grammar, tag_grammar

SPECIAL = (b"<eos>", *(token.encode() for token in ("[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>")))
SPECIAL += tuple(token.encode() for token in ("<|start|>", "<|constrain|>", "<|call|>", "<|python_tag|>"))
WORDS = (b"<tool_call>", b"</tool_call>", b"<think>", b"</think>", b'"city"', b"Paris", b"commentary", b"analysis")
EOS = 256
ENDS = frozenset(b'"}\n<')
TABLE = TokenTable(
    (*(bytes([byte]) for byte in range(256)), *SPECIAL, *WORDS), frozenset(range(EOS, EOS + len(SPECIAL)))
)
NAMES = {spelt.decode(): EOS + number for number, spelt in enumerate(SPECIAL)}
VOCAB = len(TABLE.tokens)

CITY = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Köln", 'a "b"']},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
        },
        "required": ["city", "deep"],
    },
    field="tools[0].function.parameters",
)
NOTE = Tool("note", {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}, strict=True)
NOW = Tool("now")
TOOLS = (CITY, NOTE, NOW)
FAMILIES = [(family, sign) for family in CALLS for sign in ("", "[ARGS] ```json")]
FAMILIES = [
    (family, sign)
    for family, sign in FAMILIES
    if not sign or family in (ToolCallParser.MISTRAL, ToolCallParser.DEEPSEEK)
]


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(TABLE, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def trial(backend: LlguidanceBackend) -> Trial:
    return Trial(backend.specials)


class Walker:
    """Walks through a grammar at random; yields texts and whether they are complete."""

    def __init__(self, backend: LlguidanceBackend, trial: Trial, grammar: Grammar) -> None:
        self._backend = backend
        self._compiled = backend.build(grammar, trial.try_out(grammar))

    def walk(self, seed: int, most: int = 400, begin: str = "") -> tuple[str, bool]:
        draw = random.Random(seed)
        matcher, output = self._compiled.matcher(), list(_spelt(begin))
        for token in output:
            assert self._backend.accept([matcher], [token]) == [MatchState.CONTINUES], (begin, token)
        words = np.zeros((1, mask_words(VOCAB)), np.int32)
        for _ in range(most):
            (progress,) = self._backend.fill([matcher], words)
            assert progress is not MatchState.FAILED
            choice = allowed_tokens(words[0]).tolist()
            # the ends of strings and values are too rare otherwise
            ends = [token for token in choice if token in ENDS or token >= EOS]
            closing = _closing(output)
            if closing is not None and closing in choice and draw.random() < 0.9:
                output.append(closing)
                assert self._backend.accept([matcher], [closing]) == [MatchState.CONTINUES]
                continue
            token = draw.choice(ends) if ends and draw.random() < 0.5 else draw.choice(choice)
            if token == EOS:
                return _text(output), True
            output.append(token)
            if self._backend.accept([matcher], [token]) == [MatchState.COMPLETE]:
                return _text(output), True
        return _text(output), False

    def takes(self, text: str) -> bool:
        """Whether the grammar accepts this whole text."""
        matcher = self._compiled.matcher()
        words = np.zeros((1, mask_words(VOCAB)), np.int32)
        for token in _spelt(text):
            self._backend.fill([matcher], words)
            if token not in allowed_tokens(words[0]):
                return False
            if self._backend.accept([matcher], [token]) == [MatchState.COMPLETE]:
                return True
        self._backend.fill([matcher], words)
        return EOS in allowed_tokens(words[0])


def _closing(output: Sequence[int]) -> int | None:
    """The end of a bare value that has started: it is too rare otherwise."""
    tail, end = b"".join(TABLE.tokens[token] for token in output[-12:]), b"</parameter>"
    return next((end[length] for length in range(len(end) - 1, 0, -1) if tail.endswith(end[:length])), None)


def _spelt(text: str) -> list[int]:
    tokens: list[int] = []
    pattern = "|".join(map(re.escape, NAMES))
    for part in re.split(f"({pattern})", text):
        tokens += [NAMES[part]] if part in NAMES else list(part.encode())
    return tokens


def _text(output: Sequence[int]) -> str:
    return b"".join(TABLE.tokens[token] for token in output).decode(errors="ignore")


def read(
    family: CallFamily, raw: str, *, live: bool, sign: str = "", reasoning: ReasoningForm | None = None,
    in_reasoning: bool = False, tools: Sequence[Tool] = TOOLS, required: bool = True,
) -> tuple[str, str, list[list[str]]]:  # fmt: skip
    """The parsed reply, which must be the same however it is cut."""
    forms = (family.enforced(sign),) if live else family.forms
    layout = ReplyLayout(
        reasoning=reasoning,
        forms=forms,
        separator=family.separator,
        tools={tool.name: tool for tool in tools},
        hidden=(*family.hidden, *markers(forms, reasoning, family.hidden) & NAMES.keys()),
        required=required,
    )
    answers = []
    for size in (len(raw) or 1, 1, 7):
        reader = ReplyParser(layout, in_reasoning=in_reasoning, live=live)
        text, thought = "", ""
        calls: list[list[str]] = []
        parts = [raw[place : place + size] for place in range(0, len(raw), size)]
        for piece in [piece for part in parts for piece in reader.push(part)] + reader.finish():
            match piece:
                case Text():
                    text += piece.text
                case Reasoning():
                    thought += piece.text
                case CallBegin():
                    calls.append([piece.name, ""])
                case CallArguments():
                    calls[piece.index][1] += piece.text
        answers.append((text, thought, calls))
    assert answers[0] == answers[1] == answers[2], raw
    return answers[0]


def fits(name: str, arguments: Any) -> bool:
    if name == "get_weather":
        deep = arguments.get("deep")
        return (
            set(arguments) <= {"city", "days", "deep"}
            and arguments.get("city") in ("Paris", "Köln", 'a "b"')
            and arguments.get("days", 1) in range(1, 10)
            and isinstance(deep, dict)
            and list(deep) == ["x"]
            and isinstance(deep["x"], bool)
        )
    if name == "note":
        return list(arguments) == ["text"] and isinstance(arguments["text"], str)
    return name == "now" and isinstance(arguments, dict)


@pytest.mark.parametrize(("name", "sign"), FAMILIES)
def test_the_parser_reads_what_the_grammar_allows(
    backend: LlguidanceBackend, trial: Trial, name: ToolCallParser, sign: str
) -> None:
    family = CALLS[name]
    found = calls_format(family, family.enforced(sign), TOOLS, required=True, parallel=True)
    walker = Walker(backend, trial, grammar_of_format(found, "tools"))
    ended, most = 0, 0
    for seed in range(12):
        raw, finished = walker.walk(seed)
        live = read(family, raw, live=True, sign=sign)
        for place in range(0, len(raw), 37):
            read(family, raw[:place], live=True, sign=sign)
        assert live[0].strip() == "" or not finished
        if finished:
            ended += 1
            most = max(most, len(live[2]))
            assert live[2], raw
            assert read(family, raw, live=False)[2] == live[2]
            for called, arguments in live[2]:
                assert fits(called, json.loads(arguments)), (called, arguments)
    assert ended > 2
    one = calls_format(family, family.enforced(sign), (CITY,), required=True, parallel=False)
    walker = Walker(backend, trial, grammar_of_format(one, "tools"))
    raws = [walker.walk(seed) for seed in range(3)]
    for raw, finished in raws:
        assert not finished or [called for called, _ in read(family, raw, live=True, sign=sign)[2]] == ["get_weather"]
    assert any(finished for _, finished in raws)


@pytest.mark.parametrize(("name", "sign"), FAMILIES)
def test_strict_tools_with_free_text(backend: LlguidanceBackend, trial: Trial, name: ToolCallParser, sign: str) -> None:
    """A reply may be text. Once a call has started, it must be a call."""
    family = CALLS[name]
    form = family.enforced(sign)
    assert form.written is not None
    found = calls_format(family, form, TOOLS, required=False, parallel=True)
    walker = Walker(backend, trial, grammar_of_format(found, "tools"))
    assert walker.takes("It is so.")
    raw, finished = walker.walk(3, begin=form.written.before + form.written.begin.split("{name}")[0])
    calls = read(family, raw, live=True, sign=sign)[2]
    assert not finished or calls
    assert not walker.takes(form.written.before + form.written.begin.replace("{name}", "rm") + "{}" + form.written.end)


ONE_BY_ONE = CALLS[ToolCallParser.QWEN3_CODER]
REFERRED = {
    "P": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
}


def one_by_one(backend: LlguidanceBackend, trial: Trial, *tools: Tool, required: bool = True) -> Walker:
    found = calls_format(ONE_BY_ONE, ONE_BY_ONE.enforced(""), tools, required=required, parallel=True)
    return Walker(backend, trial, grammar_of_format(found, "tools"))


def spelt_out(*arguments: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "values", "wrong"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {'"Oslo"': "Oslo", "null": None}, ["Oslo", "12"]),
        ({"type": ["string", "null"], "enum": ["Oslo", None]}, {'"Oslo"': "Oslo", "null": None}, ["Oslo"]),
        ({"type": ["integer", "string"]}, {'"5"': "5", "5": 5}, ["Oslo"]),
        ({"type": ["number", "string"]}, {"5": 5, "5.5": 5.5, '"5"': "5"}, ["Oslo", "null"]),
        ({"enum": ["a", 1]}, {'"a"': "a", "1": 1}, ["a", "2"]),
        ({"const": "x"}, {"x": "x"}, ['"x"', "y"]),
        ({"enum": ["null", " 5", ""]}, {"null": "null", " 5": " 5", "": ""}, ["5"]),
        ({"type": "string", "enum": ["a", None]}, {"a": "a"}, ["null"]),
        ({}, {"Oslo": "Oslo", "7": "7", '"a" {': '"a" {'}, []),
        (True, {"Oslo": "Oslo"}, []),
        ({"$ref": "#/$defs/P"}, {'{"x": true}': {"x": True}}, ["[]", "{}", "Oslo"]),
        ({"allOf": [{"$ref": "#/$defs/P"}]}, {'{"x": true}': {"x": True}}, ["[]", "Oslo"]),
        ({"type": "array", "items": {"$ref": "#"}}, {'[{"a": []}]': [{"a": []}]}, ["[[]]", "[{}]"]),
        ({"type": "string"}, {"a\n<b>": "a\n<b>", "": ""}, ["a</parameter>b", "a\n</parameter>\nb"]),
        ({"type": "string", "maxLength": 2}, {'"ab"': "ab"}, ["ab", '"abc"']),
        ({"type": "string", "format": "date"}, {'"2026-02-03"': "2026-02-03"}, ['"soon"']),
        ({"type": "string", "pattern": "b"}, {'"abc"': "abc"}, ['"a"']),
        ({"type": "string", "pattern": "^b"}, {'"b</parameter>"': "b</parameter>"}, ['"ab"']),
        ({"enum": ["x</parameter>"]}, {'"x</parameter>"': "x</parameter>"}, ["x"]),
        ({"type": "object"}, {'{"a": "</parameter>"}': {"a": "</parameter>"}}, ["a"]),
        ({"type": "integer"}, {"1" * 4400: None}, ["a"]),
    ],
    ids=str,
)  # fmt: skip
def test_grammar_and_parser_agree_on_bare_values_and_json(
    backend: LlguidanceBackend, trial: Trial, schema: Any, values: dict[str, Any], wrong: list[str]
) -> None:
    """Where a schema allows strings and other values, both the grammar and the parser take the value as JSON."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": REFERRED}
    for tool, required in ((Tool("f", parameters, True), False), (Tool("f", parameters), True)):
        walker = one_by_one(backend, trial, tool, required=required)
        for value, means in values.items():
            raw = spelt_out(("a", value))
            assert walker.takes(raw), value
            text, _, [[name, arguments]] = read(ONE_BY_ONE, raw, live=True, tools=(tool,), required=required)
            assert (text, name) == ("", "f")
            assert arguments == f'{{"a": {value}}}' if means is None and value != "null" else True
            assert len(value) > 4000 or json.loads(arguments) == {"a": means}
        for value in wrong:
            assert not walker.takes(spelt_out(("a", value))), value


def test_tools_without_an_enforced_schema_take_any_arguments(backend: LlguidanceBackend, trial: Trial) -> None:
    raw = spelt_out(("city", "Oslo\n <b>"), ("n", "1"), name="note")
    free = Tool("note", {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}})
    walker = one_by_one(backend, trial, free, replace(NOTE, name="f"), required=False)
    assert walker.takes(raw)
    assert walker.takes(spelt_out(name="note"))
    assert not walker.takes(spelt_out(("city", "Oslo")))
    [[_, arguments]] = read(ONE_BY_ONE, raw, live=True, tools=(free,), required=False)[2]
    assert json.loads(arguments) == {"city": "Oslo\n <b>", "n": 1}
    schemas: list[Any] = [None, {"type": "object"}, {"anyOf": [{"properties": {"city": {}}}]}]
    for schema in schemas:
        assert one_by_one(backend, trial, Tool("note", schema)).takes(raw)
    numbers = Tool("note", {"type": "object", "additionalProperties": {"type": "integer"}}, strict=True)
    walker = one_by_one(backend, trial, numbers)
    assert walker.takes(spelt_out(("a", "1"), name="note"))
    assert not walker.takes(raw)
    inner = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
    walker = one_by_one(backend, trial, Tool("f", {"$ref": "#/$defs/A", "$defs": {"A": inner}}, strict=True))
    assert walker.takes(spelt_out(("q", "1")))
    assert not walker.takes(spelt_out())
    with pytest.raises(ParameterError, match="anyOf at the top level"):
        one_by_one(backend, trial, Tool("f", {"anyOf": [inner]}, strict=True))


def test_odd_references_cause_no_internal_error() -> None:
    """Long chains of references, and values that are not schemas."""
    chain = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}]} for i in range(2000)}
    odd = {"type": [[]], "allOf": 5, "enum": 5, "const": 1, "anyOf": {}, "required": [[]]}
    for schema in ({"$ref": "#/$defs/A0"}, {"$ref": "#/default"}, {"allOf": [{"$ref": "#/default"}]}):
        tool = Tool("f", {"properties": {"a": schema}, "$defs": chain, "default": odd})
        assert read(ONE_BY_ONE, spelt_out(("a", "x")), live=False, tools=(tool,))[2] == [["f", '{"a": "x"}']]
        calls_format(ONE_BY_ONE, ONE_BY_ONE.enforced(""), (tool,), required=True, parallel=True)


def test_arguments_have_the_names_of_their_schema(backend: LlguidanceBackend, trial: Trial) -> None:
    integer = {"type": "integer"}
    tool = Tool("f", {"type": "object", "properties": {" a ": integer, "": integer}, "required": [" a ", "", "b"]})
    walker = one_by_one(backend, trial, tool)
    raw = spelt_out((" a ", "1"), ("", "2"), ("b", "c"))
    assert walker.takes(raw)
    assert not walker.takes(spelt_out((" a ", "1"), ("", "2")))
    [[_, arguments]] = read(ONE_BY_ONE, raw, live=True, tools=(tool,))[2]
    assert json.loads(arguments) == {" a ": 1, "": 2, "b": "c"}
    with pytest.raises(ParameterError, match="call format cannot express"):
        one_by_one(backend, trial, Tool("f", {"type": "object", "properties": {"k" * 129: integer}}))


@pytest.mark.parametrize("name", [ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER])
def test_errors_of_schemas_name_the_place(backend: LlguidanceBackend, trial: Trial, name: ToolCallParser) -> None:
    family, field = CALLS[name], "tools[0].function.parameters"

    def enforce(schema: Any, loop: Any, *, strict: bool) -> None:
        tool = Tool("f", {"type": "object", "properties": {"a": schema}, "$defs": REFERRED | loop},
                    strict, field)  # fmt: skip
        found = calls_format(family, family.enforced(""), (tool,), required=True, parallel=True)
        trial.try_out(grammar_of_format(found, "tools"))

    for strict in (True, False):
        with pytest.raises(ParameterError, match=r"at /properties/a refers only to itself"):
            enforce({"$ref": "#/$defs/A"}, {"A": {"$ref": "#/$defs/A"}}, strict=strict)
        for pattern in ("(", r"^(?!x)\d+$"):
            with pytest.raises(GrammarError, match=r"properties.a.*regex parse error") as caught:
                enforce({"type": "string", "pattern": pattern}, {}, strict=strict)
            assert (caught.value.param or "").startswith(field)


def test_a_started_call_stays_a_call_at_any_depth(backend: LlguidanceBackend, trial: Trial) -> None:
    deep = '{"a": ' + "[" * 150 + "1" * 4400 + "]" * 150 + "}"
    for name in (ToolCallParser.HERMES, ToolCallParser.MISTRAL, ToolCallParser.DEEPSEEK, ToolCallParser.LLAMA3):
        family = CALLS[name]
        written = family.enforced("").written
        assert written is not None
        raw = written.before + written.begin.replace("{name}", "now") + deep + written.end + written.after
        found = calls_format(family, family.enforced(""), (NOW,), required=True, parallel=True)
        assert Walker(backend, trial, grammar_of_format(found, "tools")).takes(raw)
        assert read(family, raw, live=True) == ("", "", [["now", deep]])


def test_a_call_starts_where_the_grammar_starts_it(backend: LlguidanceBackend, trial: Trial) -> None:
    """DeepSeek's calls are in a block. Outside of it nothing is enforced, so nothing is a call."""
    family = CALLS[ToolCallParser.DEEPSEEK]
    form = family.enforced("")
    assert form.written is not None
    found = calls_format(family, form, (NOTE,), required=False, parallel=True)
    walker = Walker(backend, trial, grammar_of_format(found, "tools"))
    loose = form.written.begin.replace("{name}", "note") + '{"zzz": 1}' + form.written.end
    assert walker.takes("x" + loose)
    assert read(family, "x" + loose, live=True) == ("x" + loose, "", [])
    block = form.written.before + loose.replace('"zzz": 1', '"text": ""') + form.written.after
    assert walker.takes("x" + block + loose)
    assert read(family, "x" + block + loose, live=True) == ("x" + loose, "", [["note", '{"text": ""}']])
    assert read(family, loose, live=False)[2] == [["note", '{"zzz": 1}']]


def test_the_cost_of_a_list_of_calls_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is scanned while it grows, and not again with later ones."""
    looks = 0
    seen = call_reader._value

    def counted(*arguments: Any) -> str:
        nonlocal looks
        looks += 1
        return seen(*arguments)

    monkeypatch.setattr(call_reader, "_value", counted)
    family = CALLS[ToolCallParser.MISTRAL]
    layout = ReplyLayout(forms=(family.enforced(""),), tools={"now": NOW})
    reader = ReplyParser(layout, live=True)
    raw = "[TOOL_CALLS][" + ", ".join(['{"name": "now", "arguments": {}}'] * 200) + "]"
    for char in raw:
        reader.push(char)
    reader.finish()
    assert reader.num_calls == 200
    assert looks < 5 * len(raw)


def test_a_response_format_with_tools(backend: LlguidanceBackend, trial: Trial) -> None:
    """A reply is a call or follows `response_format`."""
    answer = grammar_format(json_grammar({"type": "object", "required": ["ok"], "properties": {"ok": {"const": 1}},
                                          "additionalProperties": False}))  # fmt: skip
    for name in (ToolCallParser.HERMES, ToolCallParser.MISTRAL):
        family = CALLS[name]
        form = family.enforced("[ARGS]")
        found = calls_format(family, form, (NOW,), required=False, parallel=True, answer=answer)
        walker = Walker(backend, trial, grammar_of_format(found, "tools"))
        assert form.written is not None
        assert walker.takes('{"ok":1}')
        assert walker.takes(form.written.begin.replace("{name}", "now") + "{}" + form.written.end)
        assert not walker.takes("ok")
    llama = CALLS[ToolCallParser.LLAMA3]
    with pytest.raises(ParameterError, match="could be mistaken for a call"):
        calls_format(llama, llama.enforced(""), (NOW,), required=False, parallel=True, answer=answer)


GRAMMARS = [
    json_grammar({"enum": ["ab"]}),
    Grammar(GrammarKind.REGEX, '"ab"'),
    choice_grammar(['"ab"', "c"]),
    Grammar(GrammarKind.EBNF, 'start: "\\"a" b\nb: "b\\""'),
    Grammar(GrammarKind.EBNF, 'root ::= "\\"ab" [\\x22]'),
    tag_grammar({"format": {"type": "const_string", "value": '"ab"'}}),
    tag_grammar({"structures": [{"begin": '"', "schema": {"const": "x"}, "end": ""}], "triggers": ['"']}),
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_grammar_starts_after_reasoning(backend: LlguidanceBackend, trial: Trial, grammar: Grammar) -> None:
    older = grammar.kind is GrammarKind.STRUCTURAL_TAG and "structures" in grammar.text
    said = 'free "' + '"x"' if older else '"ab"'
    qwen3 = REASONING[ReasoningParser.QWEN3]
    for start, texts in (
        (ReasoningStart.OPEN, ['Hm "x\n</think>\n\n' + said, "</think>" + said]),
        (ReasoningStart.UNKNOWN, [said, "<think>\nHm <thi</think>\n" + said]),
        (ReasoningStart.CLOSED, [said]),
    ):
        found = after_reasoning(grammar_format(grammar), qwen3, start, text=True)
        walker = Walker(backend, trial, grammar_of_format(found, "field"))
        for text in texts:
            assert walker.takes(text), (start, text)
        assert walker.takes("Hm </think> no") is older
        if start is ReasoningStart.OPEN:
            assert not walker.takes(said)


def test_harmonys_answers_and_calls_start_after_its_reasoning(backend: LlguidanceBackend, trial: Trial) -> None:
    harmony, family = REASONING[ReasoningParser.GPT_OSS], CALLS[ToolCallParser.GPT_OSS]
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer = after_reasoning(grammar_format(json_grammar({"const": 1})), harmony, ReasoningStart.UNKNOWN, text=True)
    walker = Walker(backend, trial, grammar_of_format(answer, "field"))
    assert walker.takes("<|channel|>final<|message|>1")
    assert walker.takes(thought + "<|channel|>final<|message|>1")
    assert not walker.takes(thought + "1")
    calls = calls_format(
        family, family.enforced(""), (NOW, NOTE), required=False, parallel=True, text_begin=harmony.answer
    )
    walker = Walker(
        backend, trial, grammar_of_format(after_reasoning(calls, harmony, ReasoningStart.UNKNOWN, text=False), "tools")
    )
    call = '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "a"}'
    for raw in (call, thought + call, thought + "<|channel|>final<|message|>It is."):
        assert walker.takes(raw), raw
    assert not walker.takes(thought + call.replace("text", "txt"))
    assert read(family, thought + call, live=True, reasoning=harmony) == ("", "Hm.", [["note", '{"text": "a"}']])


@pytest.mark.parametrize("name", [ToolCallParser.HERMES, ToolCallParser.QWEN3_CODER])
def test_a_schema_that_cannot_be_enforced_is_named(
    backend: LlguidanceBackend, trial: Trial, name: ToolCallParser
) -> None:
    family = CALLS[name]
    schema = {"type": "object", "properties": {"ok": {"type": "string"}, "bad": {"type": "array", "contains": {}}}}
    field = "tools[1].function.parameters"
    for strict in (True, False):
        bad = Tool("bad", schema, strict, field)
        found = calls_format(family, family.enforced(""), (NOW, bad), required=True, parallel=True)
        grammar = grammar_of_format(found, "tools")
        if not strict:  # then keywords that cannot be enforced are ignored
            assert trial.try_out(grammar)
            continue
        with pytest.raises(GrammarError) as caught:
            trial.try_out(grammar)
        assert (caught.value.param or "").startswith(field)
        assert caught.value.message.startswith(field)
        assert "Unimplemented keys" in caught.value.message
        assert "bad" in caught.value.message


def test_a_required_tool_may_have_no_schema(backend: LlguidanceBackend, trial: Trial) -> None:
    family = CALLS[ToolCallParser.HERMES]
    loose = Tool("now", {"type": "object", "properties": {}, "required": ["a"]})
    found = calls_format(family, family.enforced(""), (loose,), required=True, parallel=True)
    walker = Walker(backend, trial, grammar_of_format(found, "tools"))
    call = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    assert walker.takes(call)
    assert not walker.takes(call.replace('"a": 1', ""))


def test_names_that_a_familys_calls_cannot_express_are_refused() -> None:
    family = CALLS[ToolCallParser.QWEN3_CODER]
    odd = Tool("odd", {"type": "object", "properties": {"a>b": {"type": "string"}}})
    with pytest.raises(ParameterError, match="'a>b'"):
        calls_format(family, family.enforced(""), (odd,), required=True, parallel=True)


def test_too_many_tools_for_a_grammar_are_refused() -> None:
    family = CALLS[ToolCallParser.HERMES]
    large = [replace(CITY, name=f"t{i}", parameters={"description": "x" * 11_000}) for i in range(100)]
    with pytest.raises(ParameterError, match="the limit is 1048576"):
        grammar_of_format(calls_format(family, family.enforced(""), large, required=True, parallel=True), "tools")
