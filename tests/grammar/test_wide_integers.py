"""Bounds of integers beyond 2^53: allowed outputs are compared with the integers themselves."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.errors import GrammarError
from sglang_jax.grammar.integer_ranges import range_regex
from sglang_jax.grammar.interface import MatchState
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.grammar.llguidance_trial import Trial
from sglang_jax.runner.plan import allowed_tokens, mask_words
from sglang_jax.sampling.grammar import Grammar, json_grammar, tag_grammar

EOS = 256
TABLE = TokenTable((*(bytes([byte]) for byte in range(256)), b"<eos>"), frozenset({EOS}))
EXACT = 2**53


class Checker:
    def __init__(self) -> None:
        self._backend = LlguidanceBackend(TABLE, EOS + 1, (EOS,))
        self._trial = Trial(self._backend.specials)

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether this text is allowed as a whole output."""
        matcher = self._backend.build(grammar, self._trial.try_out(grammar)).matcher()
        words = np.zeros((1, mask_words(EOS + 1)), np.int32)
        data = text.encode()
        for count, byte in enumerate(data, 1):
            self._backend.fill([matcher], words)
            if byte not in allowed_tokens(words[0]).tolist():
                return False
            if self._backend.accept([matcher], [byte]) == [MatchState.COMPLETE]:
                return count == len(data)
        self._backend.fill([matcher], words)
        return EOS in allowed_tokens(words[0]).tolist()

    def refusal(self, schema: Any) -> str:
        with pytest.raises(GrammarError) as caught:
            self._trial.try_out(json_grammar(schema))
        return caught.value.message


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


RANGES: list[tuple[int | None, int | None]] = [
    (EXACT + 3, None),
    (None, EXACT + 3),
    (5, EXACT + 1),
    (-EXACT - 7, EXACT + 9),
    (2**60 + 1, 2**60 + 10),
    (2**60 + 1, 2**60 + 1),
    (-(2**60) - 10, -(2**60) - 1),
    (None, -(2**60) - 1),
    (-(2**63), 2**63 - 1),
    (0, 2**64 - 1),
    (10**18, None),
    (10**30 + 1, 10**31 + 7),
]


def around(least: int | None, most: int | None) -> list[int]:
    ends = [end for end in (least, most) if end is not None]
    near = {end + by for end in ends for by in (-1025, -2, -1, 0, 1, 2, 1025)}
    return sorted({*near, *(end * 10 for end in ends), 0, EXACT, -EXACT})


def inclusive(least: int | None, most: int | None) -> dict[str, Any]:
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{name: end for name, end in bounds.items() if end is not None}}


def exclusive(least: int | None, most: int | None) -> dict[str, Any]:
    lower = {} if least is None else {"exclusiveMinimum": least - 1, "minimum": least - 5}
    return {"type": "integer", **lower, **({} if most is None else {"exclusiveMaximum": most + 1})}


@pytest.mark.parametrize(("least", "most"), RANGES)
@pytest.mark.parametrize("schema_of", [inclusive, exclusive])
def test_bounds_are_exact(
    checker: Checker, schema_of: Callable[[int | None, int | None], dict[str, Any]], least: int | None, most: int | None
) -> None:
    """Regression: they were rounded to floating-point numbers."""
    grammar = json_grammar(schema_of(least, most))
    for number in around(least, most):
        fits = (least is None or least <= number) and (most is None or number <= most)
        assert checker.takes(grammar, str(number)) == fits, number


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "object": (lambda part: {"type": "object", "properties": {"id": part}, "required": ["id"]}, '{"id": %s}'),
    "closed object": (
        lambda part: {
            "type": "object",
            "properties": {"a": {"type": "string"}, "id": part, "b": {"type": "null"}},
            "required": ["id"],
            "additionalProperties": False,
        },
        '{"a": "x", "id": %s}',
    ),
    "other properties": (lambda part: {"type": "object", "additionalProperties": part}, '{"a": 0, "b": %s}'),
    "array": (lambda part: {"type": "array", "items": part, "minItems": 2, "maxItems": 3}, "[0, %s]"),
    "optional": (
        lambda part: {
            "$defs": {"Id": part, "Item": {"type": "object", "properties": {"id": {"$ref": "#/$defs/Id"}}}},
            "title": "Order",
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]}}
            },
        },
        '{"items": [null, {"id": %s}]}',
    ),
    "one of all": (lambda part: {"allOf": [part]}, "%s"),
    "types": (lambda part: {**part, "type": ["integer", "null"]}, "%s"),
}


@pytest.mark.parametrize(("schema_of", "output"), PLACES.values(), ids=PLACES)
def test_bounds_are_exact_anywhere_in_a_schema(checker: Checker, schema_of: Callable[[Any], Any], output: str) -> None:
    grammar = json_grammar(schema_of({"type": "integer", "minimum": -7, "maximum": EXACT + 3}))
    for number in (-8, -7, 0, EXACT + 2, EXACT + 3, EXACT + 4):
        assert checker.takes(grammar, output % number) == (-7 <= number <= EXACT + 3), number
    assert not checker.takes(grammar, output % '"a"')


def test_bounds_in_structural_tags(checker: Checker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": EXACT + 3}}}
    tags = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    for number in (EXACT + 3, EXACT + 4):
        fits = checker.takes(tag_grammar(tags), f'so <f>{{"a": {number}}}</f>')
        assert fits == (number == EXACT + 3)


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "id": {"type": "integer", "minimum": EXACT + 1}, 'a"b': {}, "idé": True},
    "required": ["id"],
}
ID = f'"id": {EXACT + 1}'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (f"{{{ID}}}", True),
        (f'{{"a": "b", {ID}, "a\\"b": [1, {{}}], "idé": 2}}', True),
        (f'{{\n "a" :"b",{ID}\t}}', True),
        (f'{{{ID}, "i": 1, "idx": 2, "": 3, "b": {{"id": 1}}}}', True),
        ("{}", False),
        ('{"a": "b"}', False),
        (f"{{{ID},}}", False),
        (f"{{{ID} {ID}}}", False),
        (f'{{{ID}, "id": 1}}', False),
        (f'{{{ID}, "idé": 1, "idé": 1}}', False),
        (f'{{{ID}, "\\u0069d": 1}}', False),
        (f'{{{ID}, "a": "b"}}', False),
    ],
)
def test_objects_around_them_keep_all_properties(checker: Checker, text: str, fits: bool) -> None:
    """Properties come in the order of their schema, then others with different names."""
    assert checker.takes(json_grammar(OBJECT), text) == fits


def test_white_space_follows_the_schema(checker: Checker) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": EXACT + 1}}
    for options, fits in (({}, True), ({"whitespace_flexible": False}, False), ({"whitespace_pattern": "_"}, False)):
        grammar = json_grammar({**schema, "x-guidance": options})
        assert checker.takes(grammar, f"[ {EXACT + 1}]") == fits
        assert checker.takes(grammar, f"[{EXACT + 1}]")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "minimum": EXACT + 1, "multipleOf": 3}, "/minimum"),
        ({"type": "array", "prefixItems": [{"type": "integer", "maximum": -EXACT - 1}]}, "/prefixItems/0/maximum"),
        ({"type": "integer", "exclusiveMaximum": 2**60, "enum": [1]}, "/exclusiveMaximum"),
    ],
)
def test_bounds_that_cannot_be_exact_are_refused_with_their_place(checker: Checker, schema: Any, place: str) -> None:
    message = checker.refusal(schema)
    assert message.startswith(f"grammar at {place}: the bound ")
    assert re.search(r"the bound -?\d+ cannot be enforced exactly.*bounds beyond 9007199254740992", message)
    grammar = json_grammar({**schema, "x-guidance": {"lenient": True}})
    assert not checker.takes(grammar, str(EXACT + 1) if "prefixItems" not in schema else f"[{-EXACT}]")


@pytest.mark.parametrize(
    ("bounds", "place"),
    [
        ({"minimum": EXACT + 2, "maximum": EXACT + 1}, "/maximum"),
        ({"exclusiveMinimum": EXACT + 1, "exclusiveMaximum": EXACT + 2}, "/exclusiveMaximum"),
        ({"minimum": EXACT + 1, "maximum": 5}, "/maximum"),
    ],
)
def test_bounds_that_no_integer_meets_are_refused(checker: Checker, bounds: dict[str, int], place: str) -> None:
    message = checker.refusal({"type": "array", "items": {"type": "integer", **bounds}})
    assert re.fullmatch(rf"grammar at /items{place}: no integer is at least \d+ and at most \d+", message)


def test_numbers_are_never_beyond_their_bounds(checker: Checker) -> None:
    """A floating-point number at or within the bound is used instead."""
    assert not checker.takes(json_grammar({"type": "number", "minimum": EXACT + 1}), str(EXACT))
    assert checker.takes(json_grammar({"type": "number", "minimum": EXACT + 1}), str(EXACT + 2))
    assert not checker.takes(json_grammar({"type": "number", "maximum": -EXACT - 1}), str(-EXACT))


def test_a_recursive_schema_is_accepted(checker: Checker) -> None:
    node = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/N"}, "id": {"type": "integer", "maximum": 2**63}},
    }
    grammar = json_grammar({"$defs": {"N": node}, "$ref": "#/$defs/N"})
    assert checker.takes(grammar, '{"next": {"id": 5}}')


def test_ranges_as_regular_expressions() -> None:
    walk = random.Random(0)
    ends = [None, *range(-25, 26), 99, 100, 101, 199, 999, 1000, -99, -100, -101]
    for least, most in itertools.product(ends, ends):
        if least is not None and most is not None and least > most:
            continue
        pattern = re.compile(range_regex(least, most))
        for number in (*range(-130, 131), *(walk.randint(-2000, 2000) for _ in range(20))):
            fits = (least is None or least <= number) and (most is None or number <= most)
            assert (pattern.fullmatch(str(number)) is not None) == fits, (least, most, number)
        assert not any(pattern.fullmatch(text) for text in ("-0", "00", "01", "-", "", "+1", "1.0"))
