"""Draws architecture.svg from architecture.yaml: python docs/images/draw_architecture.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import yaml

HERE = Path(__file__).parent
LINE = 18
"""Pixels from one line of text to the next."""

STYLE = """
  text { font: 13px sans-serif; fill: #1f2933 }
  .title { font-weight: bold } .group { fill: #52606d; font-size: 12px }
  .box rect { fill: #ffffff; stroke: #3e7cb1 } .groups rect { fill: #eef4fa; stroke: none }
  path { stroke: #52606d; stroke-width: 1.5; fill: none }
"""


def rectangle(left: int, top: int, width: int, height: int) -> str:
    return f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>'


def box(at: list[int], text: list[str]) -> str:
    """Lines in the middle of a rectangle, the first of several in bold."""
    left, top, width, height = at
    first = top + (height - LINE * len(text)) / 2 + 13
    lines = []
    for number, line in enumerate(text):
        title = ' class="title"' if number == 0 and len(text) > 1 else ""
        place = f'x="{left + width / 2:g}" y="{first + LINE * number:g}"'
        lines.append(f'<text {place} text-anchor="middle"{title}>{escape(line)}</text>')
    return f'<g class="box">{rectangle(*at)}{"".join(lines)}</g>'


def arrow(path: list[list[int]], *, both: bool = False, text: str = "", at: tuple[int, int] = (0, 0)) -> str:
    points = " L".join(f"{x} {y}" for x, y in path)
    start = ' marker-start="url(#head)"' if both else ""
    label = f'<text x="{at[0]}" y="{at[1]}">{escape(text)}</text>' if text else ""
    return f'<path d="M{points}"{start} marker-end="url(#head)"/>{label}'


def draw(described: dict[str, Any]) -> str:
    """The picture as SVG."""
    width, height = described["size"]
    groups = [
        f'{rectangle(*at)}<text class="group" x="{at[0] + 12}" y="{at[1] + 18}">{escape(name)}</text>'
        for name, at in described["groups"].items()
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<g class="groups">{"".join(groups)}</g>',
        *(arrow(**each) for each in described["arrows"]),
        *(box(each["at"], each["text"]) for each in described["boxes"].values()),
        "</svg>\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(draw(yaml.safe_load((HERE / "architecture.yaml").read_text())))
