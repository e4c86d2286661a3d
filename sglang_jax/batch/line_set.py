"""A set of line numbers with one bit per line."""

from __future__ import annotations


class LineSet:
    """Numbers from 0. Takes one bit for each up to the largest: 12 MB for a hundred million lines."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Adds a number. Returns False if the set has it already."""
        if number in self:
            return False
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (number & 7)
        self._count += 1
        return True
