"""Converts the tokens of one completion to text, and cuts it at stop strings."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from sglang_jax.engine.types import StreamDecoder


class StopStrings:
    """Finds the first of several strings in a growing text. Most pieces of text have no first character of a stop
    string, and cost one scan. In the others, each string is searched for in the held-back text plus the new piece: for
    sixteen strings as fast as an automaton that takes a step per character, and faster for few strings."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings)
        self._beginning = re.compile(f"[{''.join(re.escape(string[0]) for string in self._strings)}]")
        # None for a text that contains no match and no possible beginning of one.
        self.may_match = self._beginning.search

    def find(self, text: str) -> tuple[int, str] | None:
        """Returns the end of the match that ends first, and its string: the longest one that ends there."""
        found = [string for string in self._strings if string in text]
        if not found:
            return None
        ends = {string: text.find(string) + len(string) for string in found}
        first = min(ends.values())
        return first, max((string for string in found if ends[string] == first), key=len)

    def safe_length(self, text: str) -> int:
        """For a text without a match, returns the length of the front that cannot be part of a later match."""
        for candidate in self._beginning.finditer(text):
            tail = text[candidate.start() :]
            # The strings that start with the tail are next to each other, from here on.
            place = bisect_left(self._strings, tail)
            if place < len(self._strings) and self._strings[place].startswith(tail):
                return candidate.start()
        return len(text)


_FIRST_SIGN, _SIGNS = 0xD800, 0x800
"""The first surrogate, and their number. No decoder returns them."""


@dataclass(frozen=True, slots=True)
class HiddenStops:
    """Stop strings that contain names of special tokens whose text is hidden. In the searched text, a *sign* stands for
    such a token: a character that no text contains.

    - `signs`: signs by token id; `names`: names of the tokens, by sign.
    - `strings`: the client's stop strings, by the same strings with signs instead of names.
    """

    signs: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    strings: Mapping[str, str] = field(default_factory=dict)


class SpecialNames:
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
    """Converts tokens to text that can be shown: without incomplete characters and parts of stop strings.

    - `decoder`: converts tokens to text and holds back the bytes of incomplete characters.
    - `stop`: strings that end the text; if several end at the same character, the longest counts.
    - `stop_token_ids`: tokens that end the output; not part of its text, unless `include_stop` (also for `stop`).
    - `markers`: tokens whose text is not searched for stop strings; text that was held back before one is released.
    - `unsearched`: the number of first tokens whose text is not searched for stop strings.
    - `hidden`: special tokens named in `stop` whose text the decoder hides; searched for even if they are `markers`.
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
        self._shown_names = {ord(sign): name if name in shown else "" for sign, name in hidden.names.items()}
        self._stop_token_ids = frozenset() if include_stop else stop_token_ids
        self._include_stop = include_stop
        self._markers = markers
        self._unsearched = unsearched
        self._held = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Adds a token, and returns the text that can be shown now. Once it sets `matched`, the text has ended."""
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
        """Returns the held-back text of an output that no stop string ended. May still set `matched`."""
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
        if stop.may_match(text) is None:
            self._held = ""
            return self._visible(text)
        found = stop.find(text)
        if found is not None:
            end, string = found
            self.matched = self._hidden.strings.get(string, string)
            self._held = ""
            return self._visible(text[: end - len(string)]) + (self.matched if self._include_stop else "")
        safe_length = stop.safe_length(text)
        self._held = text[safe_length:]
        return self._visible(text[:safe_length])

    def _visible(self, text: str) -> str:
        """Replaces signs by what the client sees of their tokens."""
        return text.translate(self._shown_names) if self._shown_names else text
