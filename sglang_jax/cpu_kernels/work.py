"""The argument of a compiled kernel: the address of words of 8 bytes, shared by all its threads: two counters, the
number of work items, and the kernel's own arguments. Each thread takes items until none is left. A thread's slot is its
index among the threads that take part."""

from __future__ import annotations

SLOT_COUNTER, ITEM_COUNTER, ITEMS, FIRST_FIELD = 0, 1, 2, 3
"""Words of a kernel's arguments."""

ELEMENTS_WORTH_SHARING = 2**15
"""Elements to read, at about half a nanosecond each. Waking a team of threads takes some microseconds."""
