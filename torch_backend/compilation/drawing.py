"""Writes graphs for people: as text, a line per operation, and as SVG, with curves to uses further down."""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
from torch import fx

from torch_backend.compilation.graph import VALUE, Program, args, weight_of

_LINE = 16
_LEFT = 150
_COLOURS = {"placeholder": "#d8e8ff", "get_attr": "#eeeeee", "output": "#d8e8ff"}
_OURS = "#d6f5d6"
_ATEN = "#ffffff"


def write_graphs(program: Program, folder: Path, stage: str) -> None:
    """Writes `STAGE.body.txt`, `.svg`, and the same of the head."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, graph in (("body", program.body), ("head", program.head)):
        (folder / f"{stage}.{part}.txt").write_text(as_text(graph), encoding="utf-8")
        (folder / f"{stage}.{part}.svg").write_text(as_svg(graph), encoding="utf-8")


def as_text(graph: fx.Graph) -> str:
    return "".join(f"{_line(node)}\n" for node in graph.nodes)


def _line(node: fx.Node) -> str:
    weight = weight_of(node)
    if weight is not None:
        offset = f" + {weight.offset:g}" if weight.offset else ""
        return f"{node.name}: {_shape(node)} = weight {' | '.join(weight.parts)}{offset}"
    arguments = [str(arg) for arg in args(node)] + [f"{name}={arg}" for name, arg in node.kwargs.items()]
    return f"{node.name}: {_shape(node)} = {_target(node)}({', '.join(arguments)})"


def _target(node: fx.Node) -> str:
    if callable(node.target) and not isinstance(node.target, torch._ops.OpOverload):
        return node.target.__name__
    return str(node.target)


def _shape(node: fx.Node) -> str:
    found = node.meta.get(VALUE)
    if not isinstance(found, torch.Tensor):
        return "-"
    sizes = ", ".join("T" if isinstance(size, torch.SymInt) else str(size) for size in found.shape)
    return f"{str(found.dtype).removeprefix('torch.')} [{sizes}]"


def as_svg(graph: fx.Graph) -> str:
    """Nodes from top to bottom in execution order. Green: this backend's operations; white: ATen's; grey: weights."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    lines = [_line(node) for node in nodes]
    width = _LEFT + 20 + max(len(line) for line in lines) * 7
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_LINE * (len(nodes) + 1)}" '
        'font-family="monospace" font-size="11">'
    ]
    for node in nodes:
        if node.op == "get_attr" or (node.op == "placeholder" and node.name == "step"):
            continue  # read by nearly all
        top = place[node] * _LINE + _LINE / 2
        for user in node.users:
            bottom = place[user] * _LINE + _LINE / 2
            reach = min(_LEFT - 10, 6 + 3 * (place[user] - place[node]))
            parts.append(
                f'<path d="M{_LEFT} {top} C{_LEFT - reach} {top} {_LEFT - reach} {bottom} {_LEFT} {bottom}" '
                'fill="none" stroke="#8888aa"/>'
            )
    for node, line in zip(nodes, lines, strict=True):
        top = place[node] * _LINE
        parts.append(
            f'<rect x="{_LEFT}" y="{top + 1}" width="{width - _LEFT - 10}" height="{_LINE - 2}" '
            f'fill="{_colour(node)}" stroke="#cccccc"/><text x="{_LEFT + 4}" y="{top + 12}">{escape(line)}</text>'
        )
    return "\n".join((*parts, "</svg>", ""))


def _colour(node: fx.Node) -> str:
    if node.op != "call_function":
        return _COLOURS[node.op]
    return _ATEN if isinstance(node.target, torch._ops.OpOverload) else _OURS
