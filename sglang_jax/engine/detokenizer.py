"""Text of one completion, grown token by token and cut at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from functools import lru_cache

from sglang_jax.engine.types import StreamDecoder


class StopStrings:
    """Finds the first of several strings in a growing text, in one step per character however many they are.

    The automaton of Aho and Corasick (1975), "Efficient string matching: an aid to bibliographic search". A state
    stands for the longest end of the text that may yet become a stop string; `depth[state]` is its length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self.depth: list[int] = [0]
        self.found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][character]
        self.found[state] = string

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], character)
                if self.found[child] is None:
                    self.found[child] = self.found[self._fallback[child]]
                queue.append(child)

    def advance(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][character]


@lru_cache(maxsize=64)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings, shared between the requests that have the same."""
    return StopStrings(strings)


class OutputText:
    """Turns tokens into text that can be shown: never a part of a character, never a part of a stop string.

    **Arguments:**

    - `decoder`: turns tokens into text and holds back the bytes of unfinished characters.
    - `stop`: strings that end the text; where several end at the same character, the longest counts.
    - `stop_token_ids`: tokens that end the output; they are no part of its text.
    - `include_stop`: the text keeps the stop string or token that ended it.
    """

    def __init__(
        self, decoder: StreamDecoder, stop: Sequence[str], stop_token_ids: Set[int], *, include_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._stop = stop_strings(tuple(stop)) if stop else None
        self._stop_token_ids = frozenset() if include_stop else stop_token_ids
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """Text that one more token made certain, maybe empty. Once it sets `matched`, the text has ended."""
        if token_id in self._stop_token_ids:
            return ""
        piece = self._decoder.push(token_id)
        return piece if self._stop is None else self._release(self._stop, piece)

    def flush(self) -> str:
        """What was held back, at the end of an output that no stop string ended; may still set `matched`."""
        piece = self._decoder.flush()
        if self._stop is None:
            return piece
        released = self._release(self._stop, piece)
        if self.matched is None:
            released += self._held
        self._held = ""
        return released

    def _release(self, stop: StopStrings, piece: str) -> str:
        text = self._held + piece
        state = self._state
        for end, character in enumerate(piece, start=len(self._held) + 1):
            state = stop.advance(state, character)
            matched = stop.found[state]
            if matched is not None:
                self.matched = matched
                self._held = ""
                return text[: end if self._include_stop else end - len(matched)]
        self._state = state
        certain = len(text) - stop.depth[state]
        self._held = text[certain:]
        return text[:certain]
