"""Counts the tokens of a chat that other chats probably share: all before its first message that is not the system's.
Where layers keep states, a cached prefix matches only at certain lengths; with this count, the first chat with a system
message saves its states at the end of that message, so that the second chat can already use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Encode = Callable[[str], Awaitable[list[int]]]

MAX_KEPT = 64
MIN_CHARACTERS, MAX_CHARACTERS = 128, 64 << 10
"""Limits of a prefix that is considered: a shorter one saves little, a longer one takes time to check."""


class SharedBeginnings:
    """Keeps the tokens of recently seen prefixes, so that each is tokenized once."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Int32] = OrderedDict()

    async def count(self, text: str, first_message: str, token_ids: Sequence[int], encode: Encode) -> int:
        """Returns the number of tokens in `token_ids`, the ids of the rendered chat `text`, before the first occurrence
        of `first_message`; 0 if it does not occur, or outside of the limits. Raises as `encode` does."""
        end = text.find(first_message.strip()) if first_message.strip() else -1
        if not MIN_CHARACTERS <= end <= MAX_CHARACTERS:
            return 0
        beginning = text[:end]
        known = self._known.get(beginning)
        if known is None:
            known = self._known[beginning] = np.array(await encode(beginning), np.int32)
            if len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(beginning)
        # The last characters may form a token together with the text that follows.
        size = min(len(known), len(token_ids))
        different = known[:size] != np.array(token_ids[:size], np.int32)
        return int(different.argmax()) if different.any() else size
