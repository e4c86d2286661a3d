"""What a compiled kernel is called with: the address of words of 8 bytes, which all threads that work share.

They are two counters, the number of items of work, and what else the kernel wants to know. Each thread takes items
until none is left. A thread's slot is its place among the threads that take part.
"""

from __future__ import annotations

SLOT_COUNTER, ITEM_COUNTER, ITEMS, FIRST_FIELD = 0, 1, 2, 3
"""Words of a kernel's arguments."""

ELEMENTS_WORTH_SHARING = 2**15
"""Elements read, of about half a nanosecond each. To wake a team takes some microseconds."""
