"""Sharding of channel axes that concatenate several sections (runs of heads, groups or channels): each section is
sharded separately.

Each device gets complete heads, and the channels that these read: keys of a delta net, or directions of Mamba-2's
state. Heads may share keys or directions; if there are fewer of these than devices, they are replicated on adjacent
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Section:
    """A run of channels: `units` heads, groups or single channels, each with `rows` rows."""

    units: int
    rows: int

    def part(self, device: int, size: int) -> range:
        """The rows of `device` out of `size`, relative to the start of the section."""
        share = max(self.units // size, 1)
        first = device * self.units // size
        return range(first * self.rows, (first + share) * self.rows)


Sections = tuple[Section, ...]
"""The consecutive sections of an axis of channels."""


def rows_of_device(sections: Sections, device: int, size: int) -> list[range]:
    first, found = 0, []
    for section in sections:
        part = section.part(device, size)
        found.append(range(first + part.start, first + part.stop))
        first += section.units * section.rows
    return found


def rows_by_device(sections: Sections, size: int) -> list[int]:
    return list(chain.from_iterable(chain(*rows_of_device(sections, device, size)) for device in range(size)))


def can_share(count: int, size: int) -> bool:
    """Whether each of `size` devices gets a whole number of `count` units, or each unit a whole number of devices."""
    return count % size == 0 or size % count == 0
