"""Grammars over a vocabulary of bytes and a few words: which outputs are possible, which grammars are refused, and the
errors."""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from helpers.fake_grammars import FakeGrammar
from llguidance import LLParserLimits

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.errors import GrammarError, GrammarUnavailableError, ParameterError
from sglang_jax.grammar.compile_queue import Compilation, CompileQueue
from sglang_jax.grammar.compiler import MAX_BUILT, MAX_CACHED_CHARACTERS, GrammarCompiler
from sglang_jax.grammar.interface import CompiledGrammar, Matcher, MatchState
from sglang_jax.grammar.lark import json_rule
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.grammar.llguidance_trial import LIMITS, Trial
from sglang_jax.grammar.sandbox import Sandbox
from sglang_jax.runner.plan import allowed_tokens, mask_words
from sglang_jax.sampling.grammar import Grammar, GrammarKind, choice_grammar, json_grammar, tag_grammar

WORDS = (b'{"', b'":', b"name", b" Paris", b"true", b", ", b"\n  ")
EOS = 256 + len(WORDS)
CALL = EOS + 1
TABLE = TokenTable((*(bytes([byte]) for byte in range(256)), *WORDS, b"<eos>", b"<|call|>"), frozenset({EOS, CALL}))
VOCAB = len(TABLE.tokens) + 5
"""The model has a few more tokens than have a text."""

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(TABLE, VOCAB, (EOS,))


@pytest.fixture(scope="module")
def trial(backend: LlguidanceBackend) -> Trial:
    return Trial(backend.specials)


def outputs(
    backend: LlguidanceBackend, trial: Trial, grammar: Grammar, count: int = 20
) -> Iterator[tuple[bytes, bool]]:
    """Random walks through a grammar: their bytes, and whether they are finished."""
    compiled = backend.build(grammar, trial.try_out(grammar))
    for seed in range(count):
        walk = random.Random(seed)
        matcher, output = compiled.matcher(), b""
        words = np.zeros((1, mask_words(VOCAB)), np.int32)
        finished = False
        for _ in range(60):
            (progress,) = backend.fill([matcher], words)
            assert progress is not MatchState.FAILED
            choice = allowed_tokens(words[0]).tolist()
            assert choice
            assert max(choice) < len(TABLE.tokens)
            token = EOS if EOS in choice and walk.random() < 0.5 else walk.choice(choice)
            if token == EOS:
                finished = True
                break
            output += TABLE.tokens[token]
            if backend.accept([matcher], [token]) == [MatchState.COMPLETE]:
                finished = True
                break
        yield output, finished


def test_json_parses_and_fits_its_schema(backend: LlguidanceBackend, trial: Trial) -> None:
    ended = 0
    for output, finished in outputs(backend, trial, json_grammar(PERSON), 60):
        if finished:
            ended += 1
            value = json.loads(output)
            assert set(value) == {"name", "age"}
            assert len(value["name"]) <= 5
            assert 0 <= value["age"] <= 99
    assert ended > 5


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-z]+", r"^(yes|no)$", r"a/b\d", "x\\$", "(é|ü){2}", " ", "\n", "\t "])
def test_regular_expressions_match_from_end_to_end(backend: LlguidanceBackend, trial: Trial, pattern: str) -> None:
    for output, finished in outputs(backend, trial, Grammar(GrammarKind.REGEX, pattern)):
        if finished:
            assert re.fullmatch(pattern, output.decode()), output


@pytest.mark.parametrize(
    ("kind", "text"), [(GrammarKind.REGEX, ""), (GrammarKind.EBNF, " \n"), (GrammarKind.JSON_SCHEMA, " ")]
)
def test_an_empty_grammar_is_refused_by_its_name(kind: GrammarKind, text: str) -> None:
    with pytest.raises(ParameterError, match=r"^guided is empty$"):
        Grammar(kind, text, "guided")


def test_choices_end_where_they_are_complete(backend: LlguidanceBackend, trial: Trial) -> None:
    texts = ["yes", "no", 'a "quoted"\nline', "名"]
    found = {output.decode() for output, finished in outputs(backend, trial, choice_grammar(texts)) if finished}
    assert found == set(texts)


def test_lark_and_gbnf(backend: LlguidanceBackend, trial: Trial) -> None:
    for text in ('start: "a" NUMBER\nNUMBER: /[0-9]{2}/\n', 'root ::= "a" [0-9] [0-9]\n'):
        for output, finished in outputs(backend, trial, Grammar(GrammarKind.EBNF, text), 5):
            assert finished
            assert re.fullmatch(rb"a[0-9]{2}", output)


def test_tags_start_with_their_triggers_and_follow_their_schema(backend: LlguidanceBackend, trial: Trial) -> None:
    old = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=go>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    compiled = backend.build(grammar := tag_grammar(old), trial.try_out(grammar))
    words = np.zeros((1, mask_words(VOCAB)), np.int32)
    matcher = compiled.matcher()
    assert backend.fill([matcher], words) == [MatchState.CONTINUES]
    assert {EOS, ord("x"), ord("<")} <= set(allowed_tokens(words[0]).tolist())
    for byte in b"hi <f=":
        assert backend.accept([matcher], [byte]) == [MatchState.CONTINUES]
    for byte in b"go>2</f>":
        backend.fill([matcher], words)
        assert byte in allowed_tokens(words[0])
        if byte in b"go>/f":
            assert allowed_tokens(words[0]).tolist() == [byte]
        backend.accept([matcher], [byte])
    backend.fill([matcher], words)
    assert EOS in allowed_tokens(words[0])


def test_a_special_token_that_a_tag_names_is_that_token(backend: LlguidanceBackend, trial: Trial) -> None:
    tags = {"format": {"type": "tag", "begin": "<|call|>", "content": {"type": "regex", "pattern": "[ab]"}, "end": "."}}
    compiled = backend.build(grammar := tag_grammar(tags), trial.try_out(grammar))
    words = np.zeros((1, mask_words(VOCAB)), np.int32)
    matcher = compiled.matcher()
    backend.fill([matcher], words)
    assert allowed_tokens(words[0]).tolist() == [CALL]
    assert backend.accept([matcher], [CALL]) == [MatchState.CONTINUES]
    backend.fill([matcher], words)
    assert allowed_tokens(words[0]).tolist() == [ord("a"), ord("b")]


NO_TYPE = {"properties": {"a": {"properties": {"b/c": {"type": "intger"}}}}}
NO_KEYWORD = {"items": {"anyOf": [{}, {"type": "array", "contains": {}}]}}
NO_PLACE = {"properties": {"a": {"$ref": "#/$defs/no"}}}
LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
ALL_LOOP = {
    "$defs": {"a/b": {"allOf": [{"type": "string"}, {"$ref": "#/$defs/a~1b"}]}},
    "items": {"$ref": "#/$defs/a~1b"},
}
NO_PATTERN = {"type": "object", "properties": {"x": {"type": "string", "pattern": ["a"]}}}
LEAST = {"properties": {"a/b": {"anyOf": [{"type": "null"}, {"enum": [1, {"c": [-(2**63)]}]}]}}}
TAG_OF_LEAST = {"format": {"type": "json_schema", "json_schema": {"const": -(2**63)}}}
NO_TAG = {"format": {"type": "or", "elements": [{"type": "tagg"}]}}

REFUSED: list[tuple[GrammarKind, Any, str]] = [
    (GrammarKind.JSON_SCHEMA, NO_TYPE, "at /properties/a/properties/b~1c: Invalid type: intger"),
    (GrammarKind.JSON_SCHEMA, NO_KEYWORD, "at /items/anyOf/1: Unimplemented keys"),
    (GrammarKind.JSON_SCHEMA, NO_PLACE, "at /properties/a: Pointer '/$defs/no' does not exist"),
    (GrammarKind.JSON_SCHEMA, {"$ref": "#"}, "field: $ref '#' refers to itself"),
    (GrammarKind.JSON_SCHEMA, LOOP, "at /$defs/a: $ref '#/$defs/b' refers to itself"),
    (GrammarKind.JSON_SCHEMA, ALL_LOOP, "at /$defs/a~1b/allOf/1: $ref '#/$defs/a~1b' refers to itself"),
    (GrammarKind.JSON_SCHEMA, NO_PATTERN, "at /properties/x: Expected string for 'pattern'"),
    (GrammarKind.JSON_SCHEMA, {"minimum": 10**400}, "number out of range"),
    (GrammarKind.JSON_SCHEMA, {"enum": []}, "anyOf is empty"),
    (GrammarKind.JSON_SCHEMA, LEAST, "at /properties/a~1b/anyOf/1/enum: the whole number -9223372036854775808 is not"),
    (GrammarKind.JSON_SCHEMA, {"const": -(2**63) + 1}, "at /const: the whole number -9223372036854775807 is not"),
    (GrammarKind.JSON_SCHEMA, {"const": -(2**53) - 1}, "at /const: the whole number -9007199254740993 is not"),
    (GrammarKind.JSON_SCHEMA, {"const": 2**53 + 1}, "at /const: the whole number 9007199254740993 is not"),
    (GrammarKind.JSON_SCHEMA, {"enum": [2**64 - 1]}, "at /enum: the whole number 18446744073709551615 is not"),
    (GrammarKind.JSON_SCHEMA, {"const": 10**400}, "at /const: the whole number 1000"),
    (GrammarKind.STRUCTURAL_TAG, TAG_OF_LEAST, "json_schema at /const: the whole number -9223372036854775808 is not"),
    (GrammarKind.REGEX, "(ab[c", "unclosed character class"),
    (GrammarKind.REGEX, "a\\\\\\", "field: the pattern ends in a backslash"),
    (
        GrammarKind.STRUCTURAL_TAG,
        {"format": {"type": "regex", "pattern": "a\\"}},
        "format.pattern: the pattern ends in",
    ),
    (GrammarKind.EBNF, "start: foo\nbar: /x/", "line 1, column 8: unknown name"),
    (GrammarKind.EBNF, 'root ::= "a" [0-9\n', "is not a valid grammar"),
    (GrammarKind.STRUCTURAL_TAG, NO_TAG, "elements[0].type must be"),
]


@pytest.mark.parametrize(("kind", "text", "message"), REFUSED)
def test_errors_name_the_place_in_the_schema(trial: Trial, kind: GrammarKind, text: Any, message: str) -> None:
    text = text if isinstance(text, str) else json.dumps(text)
    with pytest.raises(GrammarError, match=re.escape(message)) as caught:
        trial.try_out(Grammar(kind, text, "field"))
    assert caught.value.message.startswith("field")
    assert (caught.value.param or "").startswith("field")


LONG = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
DOUBLE = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}


@pytest.mark.parametrize("limits", [LONG, DOUBLE, {"minimum": -(2**63), "type": ["integer", "null"]}])
@pytest.mark.parametrize(
    "schema_of",
    [
        lambda part: part,
        lambda part: {"type": "object", "properties": {"minimum": part}, "required": ["minimum"]},
        lambda part: {
            "$defs": {"a": {"items": part, "maxItems": 2, "type": "array"}},
            "allOf": [{"$ref": "#/$defs/a"}],
        },
    ],
)
def test_the_limits_of_64_bit_numbers_are_accepted(
    backend: LlguidanceBackend, trial: Trial, schema_of: Callable[[Any], Any], limits: dict[str, Any]
) -> None:
    """Code generators write them, and the grammar library has no patterns for such wide ranges."""
    schema = schema_of(limits)
    written = json.dumps(schema)
    assert [json.loads(output) for output, finished in outputs(backend, trial, json_grammar(schema), 3) if finished]
    assert json.dumps(schema) == written
    # Integers have exact limits, numbers the nearest that the library has.
    assert ("-9223372036854774784" in trial.try_out(json_grammar(schema))) == (limits is DOUBLE)


@pytest.mark.parametrize("number", [2**63 - 1, 2**62, 2**53, -(2**53), -(10**18), -(10**25), 10**25, -9.3e18, -1, 0])
def test_a_constant_number_keeps_its_spelling(backend: LlguidanceBackend, trial: Trial, number: float) -> None:
    for schema in ({"const": number}, {"enum": [number]}):
        ((output, finished),) = outputs(backend, trial, json_grammar(schema), 1)
        assert finished
        assert json.loads(output) == number


@pytest.mark.parametrize(
    ("keywords", "schema"),
    [
        ({"propertyNames": {"type": "string"}, "dependentRequired": {}, "unevaluatedProperties": True}, {}),
        ({"uniqueItems": False, "additionalItems": True, "unevaluatedItems": True}, {"type": "array"}),
        ({"not": False, "patternProperties": {}, "propertyNames": {}}, {"type": "object", "maxProperties": 3}),
    ],
)
def test_keywords_without_effect_are_left_out(
    backend: LlguidanceBackend, trial: Trial, keywords: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert json_rule({**schema, **keywords}) == json_rule(schema)
    inside = {"type": "object", "properties": {"a": {**schema, **keywords}}}
    assert json_rule(inside) == json_rule({"type": "object", "properties": {"a": schema}})
    grammar = json_grammar(inside)
    backend.build(grammar, trial.try_out(grammar))


@pytest.mark.parametrize("keywords", [{"uniqueItems": True}, {"propertyNames": {"maxLength": 3}}, {"not": {}}])
def test_keywords_with_an_effect_stay(keywords: dict[str, Any]) -> None:
    assert json_rule(keywords) != json_rule({})


def test_a_constant_is_not_treated_as_a_limit() -> None:
    assert str(-(2**63)) in json_rule({"const": {"minimum": -(2**63)}})


RECURSIVE = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}
ENDLESS = {"$defs": {"a": {"properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}}, "$ref": "#/$defs/a"}
EITHER = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize("schema", [RECURSIVE, ENDLESS, EITHER])
def test_recursive_schemas_are_accepted(trial: Trial, schema: dict[str, Any]) -> None:
    assert "start" in trial.try_out(json_grammar(schema))


def test_a_schema_with_halves_of_surrogate_pairs_is_refused_with_the_place() -> None:
    for schema in ({"const": "\ud800"}, {"properties": {"\udc00": {}}}, {"pattern": "a\ud83d"}):
        with pytest.raises(ParameterError, match=r"lone surrogate U\+D[89C][03][0D] at character \d+") as caught:
            json_grammar(schema, "guided_json")
        assert caught.value.param == "guided_json"


DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" | "b" r{(i + 1) % 4000}' for i in range(4000))


@pytest.mark.slow
def test_a_grammar_that_ends_its_process_is_refused_and_the_next_one_is_not() -> None:
    sandbox = Sandbox({}, seconds=20.0)
    with pytest.raises(GrammarError, match="nested too deeply"):
        sandbox.try_out(Grammar(GrammarKind.EBNF, DEEP, "ebnf"))
    assert "start:" in sandbox.try_out(choice_grammar(["a", "b"]))
    sandbox.close()


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused() -> None:
    sandbox = Sandbox({}, seconds=0.05)
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
    with pytest.raises(GrammarError, match=r"takes more than 0\.05 s"):
        sandbox.try_out(json_grammar(many))
    sandbox.close()


@pytest.mark.slow
def test_time_without_the_processor_does_not_count_against_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process uses no processor time, as on a busy machine."""
    monkeypatch.setattr("sglang_jax.grammar.sandbox.PATIENCE_SECONDS", 0.3)
    sandbox = Sandbox({}, seconds=0.1)
    sandbox.prepare()
    assert sandbox._process is not None
    sandbox._process.send_signal(signal.SIGSTOP)
    with pytest.raises(GrammarUnavailableError, match=r"not compiled within 0\.3 s"):
        sandbox.try_out(choice_grammar(["a"]))
    assert "start:" in sandbox.try_out(choice_grammar(["a"]))
    sandbox.close()


@pytest.mark.slow
def test_the_start_of_a_process_does_not_count_against_a_grammar() -> None:
    """Regression: on a busy machine it took longer than a grammar may, and the first one was refused."""
    sandbox = Sandbox({}, seconds=0.1)
    assert "start:" in sandbox.try_out(choice_grammar(["a", "b"]))
    sandbox.close()


class Quick:
    """A sandbox that accepts every grammar, and counts."""

    tried = 0

    def prepare(self) -> None:
        """Nothing to start."""

    def try_out(self, grammar: Grammar) -> str:
        Quick.tried += 1
        return f'start: "{grammar.text}"'

    def close(self) -> None:
        """Nothing to close."""


def settle(compiler: GrammarCompiler, compilation: Compilation) -> None:
    until = time.monotonic() + 20
    while not compiler.settled(compilation) and time.monotonic() < until:
        compiler.wait(0.01)
    assert compilation.done


def test_the_same_text_is_compiled_once(backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quick, "tried", 0)
    compiler = GrammarCompiler(backend, trier=Quick)
    first = compiler.start(Grammar(GrammarKind.REGEX, "ab", "regex"))
    assert compiler.start(Grammar(GrammarKind.REGEX, "ab", "guided_regex")) is first
    settle(compiler, first)
    assert compiler.start(Grammar(GrammarKind.REGEX, "ab")) is first
    assert first.grammar is not None
    other = compiler.start(Grammar(GrammarKind.EBNF, "ab"))
    assert other is not first
    settle(compiler, other)
    assert Quick.tried == 2
    compiler.close()


@dataclass(eq=False)
class Stub:
    """A backend whose grammars are empty, and that knows which exist."""

    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    specials: dict[str, int] = field(default_factory=dict)

    def build(self, grammar: Grammar, lark: str) -> Any:
        built = FakeGrammar(len(self.alive))
        self.alive.add(built)
        return built


def compile_all(compiler: GrammarCompiler, texts: Iterable[str]) -> list[CompiledGrammar | None]:
    """Compiles the grammars of these texts, one after the other."""
    built = []
    for text in texts:
        compilation = compiler.start(Grammar(GrammarKind.REGEX, text, "regex"))
        settle(compiler, compilation)
        built.append(compilation.grammar)
    return built


def test_compiled_grammars_are_kept_up_to_a_number_and_those_in_use() -> None:
    """A grammar takes up to 60 MB after long outputs, and 128 were kept."""
    stub: Any = Stub()
    compiler = GrammarCompiler(stub, trier=Quick)
    used = compile_all(compiler, ["used"])
    compile_all(compiler, (str(number) for number in range(MAX_BUILT + 40)))
    assert len(stub.alive) <= MAX_BUILT + 2  # the last one is checked with the next
    assert used[0] in stub.alive
    tried = Quick.tried
    compile_all(compiler, [str(MAX_BUILT + 39)])
    assert Quick.tried == tried
    long = "x" * (MAX_CACHED_CHARACTERS // 8 - 10)
    compile_all(compiler, (f"{number}{long}" for number in range(20)))
    assert len(stub.alive) <= 8 + 2
    compiler.close()


def test_no_grammar_is_compiled_while_grammars_of_requests_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of queued requests: 4,096 of them with grammars of 24 MB filled it."""
    monkeypatch.setattr("sglang_jax.grammar.compiler.MAX_HELD_CHARACTERS", 10)
    monkeypatch.setattr("sglang_jax.grammar.compiler.MAX_CACHED_CHARACTERS", 5)
    now = [0.0]
    stub: Any = Stub()
    compiler = GrammarCompiler(stub, trier=Quick, threads=1, clock=lambda: now[0])
    used = compile_all(compiler, ["12345", "67890"])
    waits = compiler.start(Grammar(GrammarKind.REGEX, "abc", "regex"))
    compiler.wait(0.1)
    assert not compiler.settled(waits)
    used.clear()
    settle(compiler, waits)
    assert waits.grammar is not None
    used = compile_all(compiler, ["1234567"])
    late = compiler.start(Grammar(GrammarKind.REGEX, "abcd", "regex"))
    compiler.wait(0.1)
    now[0] = 61.0
    settle(compiler, late)
    assert late.error is not None
    assert late.error.status == 503
    assert "take all the memory" in late.error.message
    compiler.close()


COUNTED = Grammar(GrammarKind.REGEX, "(a|b)*a(a|b){40}x7", "regex")
"""Its lexer meets a new state with almost each letter."""


def follow(backend: LlguidanceBackend, matchers: Sequence[Matcher], texts: Sequence[str]) -> list[list[Any]]:
    """The tokens allowed before each letter of each text; None once the output is over."""
    found: list[list[Any]] = []
    words = np.zeros((len(matchers), mask_words(VOCAB)), np.int32)
    for letters in zip(*texts, strict=True):
        progress = backend.fill(matchers, words)
        pairs = zip(progress, words, strict=True)
        found.append([allowed_tokens(row).tolist() if one is MatchState.CONTINUES else None for one, row in pairs])
        progress = backend.accept(matchers, [ord(letter) for letter in letters])
        found[-1] = [None if one is MatchState.FAILED else own for one, own in zip(progress, found[-1], strict=True)]
    return found


def test_an_output_does_not_fail_because_of_states_that_others_of_its_grammar_met(
    backend: LlguidanceBackend, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two outputs of 10,000 characters made every later request with the same schema fail at once,
    permanently."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab", k=60)) for _ in range(6)]
    lark = trial.try_out(COUNTED)
    right = follow(backend, [backend.build(COUNTED, lark).matcher() for _ in texts], texts)
    few = {name: getattr(LIMITS, name) for name in ("initial_lexer_fuel", "step_lexer_fuel", "step_max_items")}
    monkeypatch.setattr(
        "sglang_jax.grammar.llguidance_backend.LIMITS",
        LLParserLimits(**few, max_grammar_size=200_000, max_lexer_states=200, verbose_errors=False),
    )
    compiler = GrammarCompiler(backend, trier=Quick)
    monkeypatch.setattr(Quick, "try_out", lambda self, grammar: lark)
    (first,) = compile_all(compiler, [COUNTED.text])
    assert first is not None
    assert follow(backend, [first.matcher() for _ in texts], texts) == right
    (second,) = compile_all(compiler, [COUNTED.text])
    assert second is not first
    (whole,) = zip(*follow(backend, [first.matcher()], ["".join(texts)]), strict=True)
    assert whole[-1] is None  # by itself it takes more than the limit
    monkeypatch.setattr("sglang_jax.grammar.llguidance_backend.MAX_DETACHED", 2)
    gc.collect()
    for _ in range(2):  # ended outputs no longer count
        last = follow(backend, [second.matcher() for _ in texts], texts)[-1]
        assert sum(one is not None for one in last) == 2, "each of them took 60 MB, however many they were"
    compiler.close()


class Panic(BaseException):
    """Raised by a Rust library where it has a bug."""


def test_a_panic_of_the_library_fails_one_request_and_ends_no_thread(
    backend: LlguidanceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Quick):
        def try_out(self, grammar: Grammar) -> str:
            if grammar.text == "bad":
                raise Panic("index out of bounds")
            return super().try_out(grammar)

        def close(self) -> None:
            closed.append(self)

    closed: list[Faulty] = []
    compiler = GrammarCompiler(backend, trier=Faulty, threads=1)
    bad, good = (compiler.start(Grammar(GrammarKind.REGEX, text, "regex")) for text in ("bad", "good"))
    settle(compiler, bad)
    settle(compiler, good)
    assert bad.error is not None
    assert bad.error.message == "regex could not be compiled; for the reason see the engine's log"
    assert good.grammar is not None
    assert "index out of bounds" in caplog.text
    assert len(closed) == 1  # its process may still hold an answer, which must not reach the next grammar
    compiler.close()


def test_failures_unrelated_to_the_grammar_are_not_remembered(backend: LlguidanceBackend) -> None:
    class NotYet(Quick):
        starts = 0

        def prepare(self) -> None:
            NotYet.starts += 1
            if NotYet.starts == 1:
                raise GrammarUnavailableError("does not start")

    compiler = GrammarCompiler(backend, trier=NotYet, threads=1)
    first = compiler.start(Grammar(GrammarKind.REGEX, "ab", "regex"))
    settle(compiler, first)
    assert first.error is not None
    assert first.error.status == 503
    second = compiler.start(Grammar(GrammarKind.REGEX, "ab", "regex"))
    settle(compiler, second)
    assert second.grammar is not None
    assert compiler.start(Grammar(GrammarKind.REGEX, "ab", "regex")) is second
    compiler.close()


class Held(Quick):
    """A sandbox that starts when the test says so."""

    def __init__(self, tried: list[str]) -> None:
        self.begin = threading.Semaphore(0)
        self._tried = tried

    def try_out(self, grammar: Grammar) -> str:
        assert self.begin.acquire(timeout=20)
        self._tried.append(grammar.text)
        return super().try_out(grammar)


@pytest.mark.parametrize(
    ("many", "few"), [(("many", "1"), ("few", "1")), (("", "many"), ("", "few"))], ids=["tenants", "requests"]
)
def test_many_slow_grammars_of_one_key_do_not_block_other_keys(
    backend: LlguidanceBackend, many: tuple[str, str], few: tuple[str, str]
) -> None:
    tried: list[str] = []
    held, now = Held(tried), [0.0]
    compiler = GrammarCompiler(backend, trier=lambda: held, threads=1, clock=lambda: now[0])
    slow = [compiler.start(Grammar(GrammarKind.REGEX, f"slow{number}", "regex"), many) for number in range(4)]
    while slow[0].started is None:
        time.sleep(0.001)
    quick = [compiler.start(Grammar(GrammarKind.REGEX, f"quick{number}", "regex"), few) for number in range(2)]
    now[0] = 10.0  # the time that the first one has used the thread
    held.begin.release(6)
    for compilation in (*slow, *quick):
        settle(compiler, compilation)
    assert tried == ["slow0", "quick0", "quick1", "slow1", "slow2", "slow3"]
    compiler.close()


def test_queue_entries_of_ended_requests_are_forgotten() -> None:
    """New requests arrive all the time."""
    queue = CompileQueue()
    waiting = [Compilation(Grammar(GrammarKind.REGEX, str(number))) for number in range(40)]
    for number, compilation in enumerate(waiting):
        queue.put(compilation, ("", str(number // 4)))
    queue.put(Compilation(Grammar(GrammarKind.REGEX, "x")), ("other", "0"))
    for compilation in waiting[::3]:
        assert queue.withdraw(compilation)
        assert not queue.withdraw(compilation)
    seen = []
    while queue._queue:
        got = queue.get()
        assert got is not None
        seen.append(got[1])
        queue.done(got[1], 1.0)
        tenants = queue._queue._tenants
        remembered = [*tenants.children, *tenants._ahead]
        for tenant in tenants.children.values():
            remembered += [*tenant.flows.children, *tenant.flows._ahead]
        assert len(remembered) <= 2 + 11
    assert len(seen) == 40 + 1 - 14
    assert ("other", "0") in seen[:2]
    assert (queue._queue._tenants.children, queue._queue._tenants._ahead) == ({}, {})


def test_a_grammar_without_a_waiting_request_is_not_compiled(backend: LlguidanceBackend) -> None:
    """Regression: grammars of clients that had left were compiled anyway, for ten seconds each, before those of
    others."""
    tried: list[str] = []
    held = Held(tried)
    compiler = GrammarCompiler(backend, trier=lambda: held, threads=1)
    first, left, shared, last = (
        compiler.start(Grammar(GrammarKind.REGEX, text, "regex")) for text in ("first", "left", "shared", "last")
    )
    assert compiler.start(Grammar(GrammarKind.REGEX, "shared", "regex")) is shared
    while first.started is None:
        time.sleep(0.001)
    for compilation in (first, left, shared):
        compiler.leave(compilation)
    held.begin.release(9)
    settle(compiler, last)
    assert tried == ["first", "shared", "last"]
    again = compiler.start(Grammar(GrammarKind.REGEX, "left", "regex"))
    assert again is not left
    settle(compiler, again)
    assert tried[-1] == "left"
    compiler.close()


def test_an_endless_compilation_is_given_up(backend: LlguidanceBackend) -> None:
    now = [0.0]
    compiler = GrammarCompiler(backend, trier=Quick, clock=lambda: now[0], seconds=5.0)
    stuck = Compilation(Grammar(GrammarKind.REGEX, "x", "regex"), started=0.0)
    assert not compiler.settled(stuck)
    now[0] = 120.5
    assert compiler.settled(stuck)
    assert stuck.failed  # timed by the wall clock of a machine that may be busy, so nothing is remembered
    assert stuck.error is not None
    assert stuck.error.message == "regex was not compiled within 120 s"
