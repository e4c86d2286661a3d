"""Axes of channels that several devices share: runs of heads, groups or channels, of each of which a device has a part.

Each device has whole heads, and the channels that these read. Of heads that share keys (of a delta net), or directions
of the state (of Mamba-2), it has what its own heads read; where there are fewer of those than devices, neighbours have
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Section:
    """A run of channels of `units` (heads, groups, or channels by themselves), each with so many `rows`."""

    units: int
    rows: int

    def part(self, device: int, size: int) -> range:
        """The rows that `device` of `size` has, counted from the section's beginning."""
        share = max(self.units // size, 1)
        first = device * self.units // size
        return range(first * self.rows, (first + share) * self.rows)


Sections = tuple[Section, ...]
"""What lies one behind the other along an axis of channels."""


def rows_of_device(sections: Sections, device: int, size: int) -> list[range]:
    """Rows of all sections that `device` of `size` has, a range of each section."""
    first, found = 0, []
    for section in sections:
        part = section.part(device, size)
        found.append(range(first + part.start, first + part.stop))
        first += section.units * section.rows
    return found


def rows_by_device(sections: Sections, size: int) -> list[int]:
    """The rows of all `size` devices, one device behind the other."""
    return list(chain.from_iterable(chain(*rows_of_device(sections, device, size)) for device in range(size)))


def can_share(count: int, size: int) -> bool:
    """Each of `size` devices has whole ones of so many, or several neighbours the same one."""
    return count % size == 0 or size % count == 0
