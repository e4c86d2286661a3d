"""Describes the machine that a figure comes from."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Processor, cores, load, and versions, as plain data."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        processor = next(names, processor)
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def report(title: str, rows: list[dict[str, Any]], json_file: Path | None) -> None:
    """Prints the rows as a table under a line about the machine; with a file, writes both as JSON."""
    machine = describe()
    print_title(title, machine)
    print(format_table(rows))
    if json_file is not None:
        write(title, machine, rows, json_file)


def print_title(title: str, machine: dict[str, Any]) -> None:
    """Prints the title and a line about the machine."""
    print(f"{title}\n" + ", ".join(f"{key}: {value}" for key, value in machine.items()))


def write(title: str, machine: dict[str, Any], rows: list[dict[str, Any]], json_file: Path) -> None:
    """Writes the rows and the machine as JSON."""
    json_file.write_text(json.dumps({"title": title, "machine": machine, "rows": rows}, indent=2) + "\n")


def format_table(rows: list[dict[str, Any]]) -> str:
    """A line of columns, the union of the rows' columns, and a line for each row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *[[_cell(row.get(column, "")) for column in columns] for row in rows]]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
