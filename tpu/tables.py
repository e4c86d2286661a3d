"""Formats figures with units, and tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("", "k", "M", "G", "T", "P")


def in_bytes(size: float) -> str:
    """As `1.50 GiB`."""
    return _scaled(size, 1024, _BINARY)


def in_units(number: float, unit: str) -> str:
    """As `1.50 TFLOP`."""
    return _scaled(number, 1000, [prefix + unit for prefix in _DECIMAL])


def in_seconds(seconds: float) -> str:
    """As `1.50 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, indented; the first column is text, the others are right-aligned figures."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    found = []
    for line in lines:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        found.append("  " + "  ".join(cells).rstrip())
    return found


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(number) < step:
            return f"{number:.0f} {unit}" if unit == units[0] else f"{number:.2f} {unit}"
        number /= step
    return f"{number:.2f} {units[-1]}"
