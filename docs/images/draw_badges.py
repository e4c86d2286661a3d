"""Draws README's badges from what pyproject.toml says: python docs/images/draw_badges.py"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WIDE, NARROW = 8.2, 6.4
"""Widths of letters in pixels: of capitals, and of others on average."""


def badges() -> dict[str, tuple[str, str, str]]:
    """Label, value and colour of each, by file name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.search(r"Python (3\.\d+) to (3\.\d+)", (ROOT / "docs/installation.md").read_text())
    assert versions is not None
    [status] = [name.partition(" - ")[2].lower() for name in project["classifiers"] if name.startswith("Development")]
    return {
        "python": ("Python", f"{versions[1]}\u2013{versions[2]}", "#2f6ca8"),
        "licence": ("licence", project["license"], "#2f6ca8"),
        "api": ("API", "OpenAI-compatible", "#2d7d46"),
        "status": ("status", status, "#9a5b00"),
    }


def width(text: str) -> int:
    return round(sum(WIDE if letter.isupper() else NARROW for letter in text)) + 14


def draw(label: str, value: str, colour: str) -> str:
    """Its own background makes it readable on light and dark pages."""
    left, right = width(label), width(value)
    text = '<text x="{}" y="14" textLength="{}" text-anchor="middle">{}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img"'
        f' aria-label="{escape(label)}: {escape(value)}">\n'
        f'<rect width="{left + right}" height="20" rx="3" fill="{colour}"/>\n'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#4a5058"/>\n'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">\n'
        f"{text.format(left / 2, left - 12, escape(label))}\n"
        f"{text.format(left + right / 2, right - 12, escape(value))}\n"
        "</g>\n</svg>\n"
    )


def main() -> None:
    for name, badge in badges().items():
        (HERE / f"badge_{name}.svg").write_text(draw(*badge))


if __name__ == "__main__":
    main()
