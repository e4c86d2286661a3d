"""Text of one completion, grown token by token and cut at stop strings."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from sglang_jax.engine.types import StreamDecoder


class StopStrings:
    """Finds the first of several strings in a growing text.

    Most pieces of text have no character with which a stop string begins, and cost one scan. For the others, each stop
    string is looked for in what was held back and the new piece. For sixteen strings that is as fast as an automaton
    that takes a step for each character, and for few it is faster.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings)
        self._beginning = re.compile(f"[{''.join(re.escape(string[0]) for string in self._strings)}]")
        # Of a text: None where nothing begins that is, or may become, a match.
        self.begins_in = self._beginning.search

    def find(self, text: str) -> tuple[int, str] | None:
        """The end of the match that ends first, and its string: the longest of those that end there."""
        found = [string for string in self._strings if string in text]
        if not found:
            return None
        ends = {string: text.find(string) + len(string) for string in found}
        first = min(ends.values())
        return first, max((string for string in found if ends[string] == first), key=len)

    def certain(self, text: str) -> int:
        """How much of the front of a text that has no match can be no part of a later one."""
        for candidate in self._beginning.finditer(text):
            tail = text[candidate.start() :]
            # The strings that begin with the tail are next to each other, from here on.
            place = bisect_left(self._strings, tail)
            if place < len(self._strings) and self._strings[place].startswith(tail):
                return candidate.start()
        return len(text)


_FIRST_SIGN, _SIGNS = 0xD800, 0x800
"""Halves of characters, which no decoder gives."""


@dataclass(frozen=True, slots=True)
class HiddenStops:
    """Stop strings that name special tokens whose text is not shown.

    - `signs`: what stands for such a token in the text that is searched, by its id: a character that no text has.
    - `names`: by its sign.
    - `strings`: stop strings with signs for the names in them, and what they are as the client has them.
    """

    signs: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    strings: Mapping[str, str] = field(default_factory=dict)


class SpecialNames:
    """Finds the names of special tokens in stop strings. `special_tokens`: ids by name."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._ids = special_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hidden_in(self, stop: Sequence[str]) -> HiddenStops:
        named = list(dict.fromkeys(name for string in stop for name in self._any.findall(string)))[:_SIGNS]
        signs = {name: chr(_FIRST_SIGN + number) for number, name in enumerate(named)}
        return HiddenStops(
            {self._ids[name]: sign for name, sign in signs.items()},
            {sign: name for name, sign in signs.items()},
            {
                self._any.sub(lambda found: signs.get(found[0], found[0]), string): string
                for string in stop
                if self._any.search(string)
            },
        )


_NO_HIDDEN_STOPS = HiddenStops()


class OutputText:
    """Turns tokens into text that can be shown: never a part of a character, never a part of a stop string.

    **Arguments:**

    - `decoder`: turns tokens into text and holds back the bytes of unfinished characters.
    - `stop`: strings that end the text; where several end at the same character, the longest counts.
    - `stop_token_ids`: tokens that end the output; they are no part of its text.
    - `include_stop`: the text keeps the stop string or token that ended it.
    - `markers`: tokens in whose text no stop string is looked for; what was held back before one is shown.
    - `unsearched`: the number of first tokens in whose text no stop string is looked for.
    - `hidden`: the special tokens that `stop` names, where the decoder leaves them out, or shows only `markers`. They
      are looked for among `markers` as well.
    """

    def __init__(
        self,
        decoder: StreamDecoder,
        stop: Sequence[str],
        stop_token_ids: Set[int],
        *,
        include_stop: bool = False,
        markers: Set[int] = frozenset(),
        unsearched: int = 0,
        hidden: HiddenStops = _NO_HIDDEN_STOPS,
    ) -> None:
        self._decoder = decoder
        self._stop = StopStrings([*stop, *hidden.strings]) if stop else None
        self._hidden = hidden
        shown = {hidden.names[hidden.signs[token]] for token in markers if token in hidden.signs}
        self._shown = {ord(sign): name if name in shown else "" for sign, name in hidden.names.items()}
        self._stop_token_ids = frozenset() if include_stop else stop_token_ids
        self._include_stop = include_stop
        self._markers = markers
        self._unsearched = unsearched
        self._held = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Text that one more token made certain, maybe empty. Once it sets `matched`, the text has ended."""
        sign = self._hidden.signs.get(token_id, "")
        if token_id in self._stop_token_ids and not (sign and self._stop is not None and self._unsearched <= 0):
            return ""
        piece = self._decoder.push(token_id)
        if self._stop is None:
            return piece
        if self._unsearched > 0:
            self._unsearched -= 1
            return piece
        if sign:
            return self._release(self._stop, piece.removesuffix(self._hidden.names[sign]) + sign)
        if token_id in self._markers:
            piece, self._held = self._visible(self._held) + piece, ""
            return piece
        return self._release(self._stop, piece)

    def flush(self) -> str:
        """What was held back, at the end of an output that no stop string ended; may still set `matched`."""
        piece = self._decoder.flush()
        if self._stop is None or self._unsearched > 0:
            return piece
        released = self._release(self._stop, piece)
        if self.matched is None:
            released += self._visible(self._held)
        self._held = ""
        return released

    def _release(self, stop: StopStrings, piece: str) -> str:
        text = self._held + piece
        if stop.begins_in(text) is None:
            self._held = ""
            return self._visible(text)
        found = stop.find(text)
        if found is not None:
            end, string = found
            self.matched = self._hidden.strings.get(string, string)
            self._held = ""
            return self._visible(text[: end - len(string)]) + (self.matched if self._include_stop else "")
        certain = stop.certain(text)
        self._held = text[certain:]
        return self._visible(text[:certain])

    def _visible(self, text: str) -> str:
        """With what the client is shown of special tokens for their signs."""
        return text.translate(self._shown) if self._shown else text
