"""`cache-report`: the contents of a server's prefix cache, as text or as a picture."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import click
import httpx2
import msgspec

from sglang_jax.cli.result_file import writing
from sglang_jax.config import Environment
from sglang_jax.errors import ConfigError
from sglang_jax.scheduler.cache_report import CacheReport

SECONDS = 30.0
"""Timeout of the server's answer, which it creates between two steps."""

MAX_NODES = 40
"""Maximum nodes in the text."""

WIDTH, ROW = 1200, 22
"""Width of the picture, and height of one level of the tree, in pixels."""


class _ReplicaReport(CacheReport, frozen=True, kw_only=True):
    replica: int


class _Answer(msgspec.Struct):
    replicas: list[_ReplicaReport]


@click.command("cache-report", short_help="Show the contents of a server's prefix cache.")
@click.option("--url", default="http://127.0.0.1:30000", show_default=True, help="the server")
@click.option("--api-key", help="admin API key; also read from SGLANG_JAX_ADMIN_API_KEY and SGLANG_JAX_API_KEY")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="also draw the tree to this file")
def cache_report(url: str, api_key: str | None, svg: Path | None) -> None:
    """Show a server's prefix cache: its pools, the most used and largest prefixes, and its sessions."""
    reports = _ask(url, api_key)
    for report in reports:
        click.echo(as_text(report))
    if svg is not None:
        with writing(svg, "--svg"):
            svg.write_text(as_svg(reports), encoding="utf-8")


def _ask(url: str, api_key: str | None) -> list[dict[str, Any]]:
    environment = Environment()
    key = api_key or environment.admin_api_key or environment.api_key
    headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}
    try:
        response = httpx2.get(f"{url.rstrip('/')}/cache_report", headers=headers, timeout=SECONDS)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(f"{url} does not answer: {type(error).__name__} {error}") from error
    if response.status_code != 200:
        remedy = (
            "; give the key with --api-key, or in SGLANG_JAX_ADMIN_API_KEY"
            if response.status_code in (401, 403)
            else ""
        )
        raise ConfigError(f"{url} returned status {response.status_code}: {_plain(response.text[:300])}{remedy}")
    try:
        answer = msgspec.json.decode(response.content, type=_Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{url} did not return a cache report: {error}: {_plain(response.text[:300])}") from error
    reports: list[dict[str, Any]] = msgspec.to_builtins(answer)["replicas"]
    return reports


def as_text(report: dict[str, Any]) -> str:
    """Returns one replica's cache as tables: the pools, the tree (indented by level), and the sessions."""
    head = f"Replica {report['replica']}: {report['num_nodes']} nodes, {report['num_namespaces']} namespaces, "
    lines = [head + f"pages of {report['page_size']} tokens", "", _pools(report["groups"]), "", *_tree(report)]
    if report["sessions"]:
        lines += ["", "Session                           owner       tokens     kept  idle s"]
        lines += [_session_line(one) for one in report["sessions"]]
    return "\n".join([*lines, ""])


def _pools(groups: list[dict[str, Any]]) -> str:
    columns = ("total", "free", "evictable", "session", "protected", "request_owned", "retired", "tombstones")
    head = f"{'Pool':14}" + "".join(f"{name.replace('_owned', ''):>12}" for name in columns)
    rows = [
        f"{group['name'] + ' ' + group['unit'] + 's':14}" + "".join(f"{group[name]:>12}" for name in columns)
        for group in groups
    ]
    return "\n".join([head, *rows])


def _tree(report: dict[str, Any]) -> list[str]:
    nodes = report["nodes"]
    names = [group["name"] for group in report["groups"]]
    lines = [f"{'Tree (tokens)':34}{'hits':>7}{'age':>8}{'requests':>10}{'sessions':>10}  held"]
    below = _children(nodes)
    for node, depth in _walk(below, 0, 0):
        if len(lines) > MAX_NODES:
            lines.append(f"... {len(nodes) - MAX_NODES} more in the report, {report['num_nodes']} in all")
            break
        held = ", ".join(f"{count} {name}" for name, count in zip(names, node["pages"], strict=True) if count)
        label = f"{'  ' * min(depth, 12)}{node['tokens']}"
        numbers = f"{node['hits']:>7}{node['age']:>8}{node['requests']:>10}{node['sessions']:>10}"
        lines.append(f"{label:34}{numbers}  {held or 'nothing'}")
    return lines


def _session_line(session: dict[str, Any]) -> str:
    idle = "running" if session["idle_seconds"] is None else f"{session['idle_seconds']:.0f}"
    name = _plain(session["id"])
    name = name if len(name) <= 32 else name[:29] + "..."
    return f"{name:34}{_plain(session['owner'])[:10]:10}{session['tokens']:>8}{session['kept_tokens']:>9}{idle:>8}"


def _plain(text: str) -> str:
    """Returns a client's text without characters that move the terminal's cursor or break the line."""
    return "".join([one if one.isprintable() else ascii(one)[1:-1] for one in text])


def _children(nodes: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Returns nodes by the id of their parent, 0 for the roots; the most used ones first."""
    below: dict[int, list[dict[str, Any]]] = {}
    for node in nodes:
        below.setdefault(node["parent"], []).append(node)
    for each in below.values():
        each.sort(key=lambda node: (-node["hits"], -node["tokens"], node["id"]))
    return below


def _walk(below: dict[int, list[dict[str, Any]]], parent: int, depth: int) -> list[tuple[dict[str, Any], int]]:
    """Returns nodes with their depths, parents first. Not recursive, because conversations form long chains."""
    order = []
    stack = [(node, depth) for node in reversed(below.get(parent, []))]
    while stack:
        node, level = stack.pop()
        order.append((node, level))
        stack += [(child, level + 1) for child in reversed(below.get(node["id"], []))]
    return order


def as_svg(reports: list[dict[str, Any]]) -> str:
    """Draws the trees one below the other. A node's width is the tokens of its subtree, and its red the number of hits.
    A frame shows that a request (black) or a session (blue) uses it. It is pale if it has no pages of some pool."""
    parts: list[str] = []
    top = 0
    for report in reports:
        parts.append(f'<text x="4" y="{top + 15}">Replica {report["replica"]}</text>')
        drawn, height = _draw(report, top + ROW)
        parts += drawn
        top += height + 2 * ROW
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{max(top, ROW)}" '
        f'font-family="sans-serif" font-size="11">\n{body}\n</svg>\n'
    )


def _draw(report: dict[str, Any], top: int) -> tuple[list[str], int]:
    order = _walk(_children(report["nodes"]), 0, 0)
    weight = {node["id"]: node["tokens"] for node, _ in order}
    for node, _ in reversed(order):
        if node["parent"] in weight:
            weight[node["parent"]] += weight[node["id"]]
    total = sum(weight[node["id"]] for node, _ in order if node["parent"] == 0) or 1
    left: dict[int, float] = {0: 0.0}
    most = max((node["hits"] for node, _ in order), default=0) or 1
    parts = []
    for node, depth in order:
        x, width = left[node["parent"]], WIDTH * weight[node["id"]] / total
        left[node["parent"]] = x + width
        left[node["id"]] = x
        parts.append(_box(node, report["groups"], x, top + depth * ROW, width, node["hits"] / most))
    return parts, ROW * (1 + max((depth for _, depth in order), default=0))


def _box(node: dict[str, Any], groups: list[dict[str, Any]], x: float, y: int, width: float, heat: float) -> str:
    frame = "black" if node["requests"] else "blue" if node["sessions"] else "white"
    opacity = 1.0 if all(node["pages"]) else 0.4
    held = ", ".join(f"{count} {group['name']}" for group, count in zip(groups, node["pages"], strict=True))
    users = f"{node['requests']} requests, {node['sessions']} sessions"
    title = escape(f"{node['tokens']} tokens, {node['hits']} hits, {users}; {held}")
    green = round(200 - 150 * heat)
    label = str(node["tokens"]) if width > 30 else ""
    return (
        f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" '
        f'height="{ROW - 2}" fill="rgb(235,{green},80)" fill-opacity="{opacity}" stroke="{frame}"/>'
        f'<text x="{x + 3:.1f}" y="{y + 14}">{label}</text></g>'
    )
