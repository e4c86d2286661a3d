"""How many tokens of a conversation probably begin others too: all before its first message that is not the system's.

Where layers keep states, a cached prefix serves at a few lengths alone. So that the second conversation with a system
message finds one at that message's end, and not the third, the first is told where that is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Encode = Callable[[str], Awaitable[list[int]]]

MOST_KEPT = 64
LEAST_CHARACTERS, MOST_CHARACTERS = 128, 64 << 10
"""Of a beginning that is looked at: a shorter one saves next to nothing, and to look at a longer one takes time."""


class SharedBeginnings:
    """Tokens of the last beginnings that were seen, so that each is tokenized once."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Int32] = OrderedDict()

    async def count(self, text: str, first_message: str, token_ids: Sequence[int], encode: Encode) -> int:
        """Tokens of a rendered conversation, whose ids are `token_ids`, before the first place where `first_message`
        stands in it; 0 where it does not, or stands near the begin. Raises what `encode` does."""
        end = text.find(first_message.strip()) if first_message.strip() else -1
        if not LEAST_CHARACTERS <= end <= MOST_CHARACTERS:
            return 0
        beginning = text[:end]
        known = self._known.get(beginning)
        if known is None:
            known = self._known[beginning] = np.array(await encode(beginning), np.int32)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(beginning)
        # What stands at the border may be one token with what follows.
        size = min(len(known), len(token_ids))
        different = known[:size] != np.array(token_ids[:size], np.int32)
        return int(different.argmax()) if different.any() else size
