"""Structural tags: free text in which certain openings start parts that follow a schema, as in tool calls. Supports
SGLang's and vLLM's older form (`structures`, `triggers`), and XGrammar's newer one (`format`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_jax.errors import GrammarError, quote

_TEXT = r"/(.|\n)*/"
_MAX_DEPTH = 16


class TagWriter:
    """Writes Lark rules for structural tags. `schemas`: the schemas so far, each with the client's name for it.
    `field`: the client's name for the tags; `specials`: tokens that are not text; `json_rule`, `regex_rule`, `lark`:
    convert schemas, regular expressions and grammars."""

    def __init__(
        self,
        field: str,
        specials: Mapping[str, int],
        json_rule: Callable[[Any], str],
        regex_rule: Callable[[str, str], str],
        lark: Callable[[str], str],
    ) -> None:
        self.schemas: list[tuple[str, Any]] = []
        self._field = field
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, names))) if names else None
        self._json = json_rule
        self._regex = regex_rule
        self._lark = lark
        self._rules: list[str] = []

    def write(self, tags: Mapping[str, Any]) -> str:
        """Returns the whole grammar. Raises `GrammarError` naming the place."""
        if "format" in tags:
            start = self._format(tags["format"], f"{self._field}.format", 0)
        else:
            start = self._old_form(tags, self._field)
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _old_form(self, tags: Mapping[str, Any], place: str) -> str:
        structures = self._list(tags, "structures", place)
        triggers = self._list(tags, "triggers", place)
        places = [f"{place}.structures[{number}]" for number in range(len(structures))]
        parts = [self._old_tag(one, own) for one, own in zip(structures, places, strict=True)]
        return self._triggered(triggers, parts, place, at_least_one=False, stop_after_first=False)

    def _schema(self, schema: Any, field: str) -> str:
        if not isinstance(schema, (dict, bool)):
            raise self._error(field, f"must be a JSON schema, got {quote(schema)}")
        self.schemas.append((field, schema))
        return self._json(schema)

    def _format(self, value: Any, place: str, depth: int) -> str:
        if not isinstance(value, Mapping):
            raise self._error(place, f"must be an object, got {quote(value)}")
        if depth > _MAX_DEPTH:
            raise self._error(place, f"is nested more than {_MAX_DEPTH} levels deep")
        match value.get("type"):
            case "const_string":
                return self._literal(self._text(value, "value", place)) or '""'
            case "json_schema":
                field = str(value.get("field") or f"{place}.json_schema")
                return self._schema(value.get("json_schema"), field)
            case "grammar":
                return f"%lark {{\n{self._lark(self._text(value, 'grammar', place))}\n}}"
            case "structural_tag":
                return self._old_form(value, place)
            case "regex":
                return f"/{self._regex(self._text(value, 'pattern', place), f'{place}.pattern')}/"
            case "any_text":
                return _TEXT
            case "sequence":
                return self._rule(" ".join(self._elements(value, place, depth)))
            case "or":
                return self._rule(" | ".join(self._elements(value, place, depth)))
            case "tag":
                begin, rest = self._tag(value, place, depth)
                return self._rule(f"{self._literal(begin)} {rest}")
            case "triggered_tags":
                return self._triggered_format(value, place, depth)
            case "tags_with_separator":
                return self._separated(value, place, depth)
            case other:
                raise self._error(
                    f"{place}.type",
                    "must be const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags "
                    f"or tags_with_separator, got {quote(other)}",
                )

    def _elements(self, value: Mapping[str, Any], place: str, depth: int) -> list[str]:
        elements = self._list(value, "elements", place)
        return [self._format(one, f"{place}.elements[{number}]", depth + 1) for number, one in enumerate(elements)]

    def _tag(self, value: Any, place: str, depth: int) -> tuple[str, str]:
        """Returns the beginning of a tag, and the rule of its rest."""
        if not isinstance(value, Mapping):
            raise self._error(place, f"must be an object, got {quote(value)}")
        begin = self._text(value, "begin", place)
        end, content = self._text(value, "end", place), value.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            return begin, self._up_to(end)
        return begin, f"{self._format(content, f'{place}.content', depth + 1)} {self._literal(end)}"

    def _old_tag(self, value: Any, place: str) -> tuple[str, str]:
        if not isinstance(value, Mapping):
            raise self._error(place, f"must be an object, got {quote(value)}")
        schema = self._schema(value.get("schema", {}), f"{place}.schema")
        end = self._literal(self._text(value, "end", place))
        return self._text(value, "begin", place), f"{schema} {end}"

    def _tags(self, value: Mapping[str, Any], place: str, depth: int) -> list[tuple[str, str]]:
        tags = self._list(value, "tags", place)
        return [self._tag(one, f"{place}.tags[{number}]", depth + 1) for number, one in enumerate(tags)]

    def _triggered_format(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        return self._triggered(
            self._list(value, "triggers", place),
            self._tags(value, place, depth),
            place,
            at_least_one=value.get("at_least_one") is True,
            stop_after_first=value.get("stop_after_first") is True,
        )

    def _triggered(
        self,
        triggers: Sequence[Any],
        tags: Sequence[tuple[str, str]],
        place: str,
        *,
        at_least_one: bool,
        stop_after_first: bool,
    ) -> str:
        """Returns a rule for text up to a trigger, the rest of a tag that starts with the trigger, and so on."""
        parts: list[str] = []
        taken = 0
        for number, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise self._error(f"{place}.triggers[{number}]", f"must be a non-empty text, got {quote(trigger)}")
            own = [(begin[len(trigger) :], rest) for begin, rest in tags if begin.startswith(trigger)]
            taken += len(own)
            if own:
                rests = self._rule(" | ".join(f"{self._literal(begin)} {rest}" for begin, rest in own))
                parts.append(f"{self._up_to(trigger)} {rests}")
        if taken < len(tags):
            lost = next(begin for begin, _ in tags if not any(begin.startswith(str(one)) for one in triggers))
            raise self._error(f"{place}.triggers", f"has none with which {quote(lost)} begins")
        tag = self._rule(" | ".join(parts))
        if stop_after_first:
            return tag if at_least_one else self._rule(f"{tag} | {_TEXT}")
        return self._rule(f"{tag}{'+' if at_least_one else '*'} {_TEXT}")

    def _separated(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        tags = self._tags(value, place, depth)
        tag = self._rule(" | ".join(f"{self._literal(begin)} {rest}" for begin, rest in tags))
        if value.get("stop_after_first") is True:
            several = tag
        else:
            several = self._rule(f"{tag} ({self._literal(self._text(value, 'separator', place))} {tag})*")
        return several if value.get("at_least_one") is True else f"{several}?"

    def _up_to(self, end: str) -> str:
        """Returns a rule for text up to and including the first `end`."""
        if end in self._specials:
            return self._rule(f"{_TEXT} {self._literal(end)}")
        name = f"upto_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {_TEXT} {json.dumps(end, ensure_ascii=False)}")
        return name

    def _rule(self, body: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _literal(self, text: str) -> str:
        """Quotes a text; names of special tokens in it become those tokens."""
        parts: list[str] = []
        begin = 0
        for found in () if self._any_special is None else self._any_special.finditer(text):
            parts += [self._quoted(text[begin : found.start()]), f"<[{self._specials[found[0]]}]>"]
            begin = found.end()
        return " ".join(part for part in (*parts, self._quoted(text[begin:])) if part)

    @staticmethod
    def _quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _text(self, value: Mapping[str, Any], name: str, place: str) -> str:
        text = value.get(name)
        if not isinstance(text, str):
            raise self._error(f"{place}.{name}", f"must be a text, got {quote(text)}")
        return text

    def _list(self, value: Mapping[str, Any], name: str, place: str) -> list[Any]:
        found = value.get(name)
        if not isinstance(found, list) or not found:
            raise self._error(f"{place}.{name}", f"must be a non-empty list, got {quote(found)}")
        return found

    @staticmethod
    def _error(place: str, what: str) -> GrammarError:
        return GrammarError(f"{place} {what}", param=place)
