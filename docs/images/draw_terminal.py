"""Runs the commands of docs/tutorial.md, and draws terminal.svg from what they printed.

python docs/images/draw_terminal.py --record    # runs them, writes terminal.json and the page's outputs, and draws
python docs/images/draw_terminal.py             # only draws
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/tutorial.md"
PORT, SECOND_PORT = "30000", "30001"
SERVE = "make serve"
INSTALLED = ("pip install openai",)
"""Commands that are not run: they would change the environment."""

BLOCK = re.compile(r"(?:Save this as `(?P<file>[\w.]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```", re.M | re.S)
SHOWN = (SERVE, "python ask.py", "python weather.py", "sglang-jax batch")
"""The commands of the picture, by how they start."""

WIDTH, LINES = 100, 3
"""Of the picture: columns, and the most lines of one output."""


@dataclass(frozen=True)
class Ran:
    """A command of the page, what it printed, and its exit status."""

    command: str
    output: str
    status: int


def blocks(page: str) -> list[tuple[str | None, str, str]]:
    """The blocks of a page: the file in which to save it or None, the language, and the text."""
    return [(block["file"], block["language"], block["text"].rstrip("\n")) for block in BLOCK.finditer(page)]


@contextmanager
def served(folder: Path, port: str) -> Iterator[Ran]:
    """What `make serve` runs after the installation, and its line that it is ready."""
    command = [sys.executable, "-m", "sglang_jax.launch_server", "--port", port]
    with (folder / "log.txt").open("w") as log:
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        if not ready.startswith("Ready"):
            raise RuntimeError(f"the server did not start:\n{(folder / 'log.txt').read_text()}")
        yield Ran(SERVE, ready.partition(" Its routes")[0], 0)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


def run_page(page: str, folder: Path, port: str) -> list[Ran]:
    """Runs the page's commands in order in `folder`, against one server on `port`. A second server of the page gets a
    free port, too."""
    second = free_port()

    def with_ports(text: str) -> str:
        return text.replace(PORT, port).replace(SECOND_PORT, second)

    (folder / ".venv").symlink_to(sys.prefix)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    with served(folder, port) as server:
        ran = [server]
        for file, language, text in blocks(page):
            if file is not None:
                (folder / file).write_text(with_ports(text) + "\n")
            if language != "sh" or text in (SERVE, *INSTALLED):
                continue
            done = subprocess.run(
                ["bash", "-c", with_ports(text)],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            ran.append(Ran(text, done.stdout.rstrip("\n"), done.returncode))
    return [Ran(one.command, one.output.replace(port, PORT), one.status) for one in ran]


def with_outputs(page: str, ran: Sequence[Ran]) -> str:
    """The page, with the text after each command replaced by what it printed."""
    outputs, last = {one.command: one.output for one in ran}, ""

    def shown(block: re.Match[str]) -> str:
        nonlocal last
        if block["language"] == "sh":
            last = block["text"].rstrip("\n")
        if block["language"] != "text":
            return block[0]
        return f"```text\n{wrapped(outputs[last], 116)}\n```"

    return BLOCK.sub(shown, page)


def wrapped(text: str, width: int) -> str:
    """With no line longer than `width`, divided between words."""
    options: dict[str, bool] = {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, width, **options) or [""])


def draw(ran: Sequence[Ran]) -> str:
    """An SVG of a terminal, readable on light and dark pages: it has its own background."""
    lines: list[tuple[str, str]] = []
    for start in SHOWN:
        one = [one for one in ran if one.command.startswith(start)][-1]
        lines += [("command", line) for line in wrapped("$ " + re.sub(r"\\\n *", "", one.command), WIDTH).split("\n")]
        lines += [("output", line) for line in wrapped(one.output, WIDTH).split("\n")[:LINES]]
        lines.append(("output", ""))
    height = 44 + 18 * len(lines)
    rows = [
        f'<text class="{kind}" x="18" y="{58 + 18 * number}">{escape(line)}</text>'
        for number, (kind, line) in enumerate(lines)
        if line
    ]
    dots = [
        f'<circle cx="{20 + 18 * place}" cy="18" r="5" fill="{colour}"/>'
        for place, colour in enumerate(("#e0605e", "#d9a441", "#5fae62"))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" width="880" height="{height}"'
            ' role="img" aria-label="A terminal with commands of the tutorial and their outputs">',
            "<style>text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}"
            ".command{fill:#8fd3ff}.output{fill:#e6e8eb}</style>",
            f'<rect width="880" height="{height}" rx="8" fill="#1f242c" stroke="#57606a"/>',
            *dots,
            *rows,
            "</svg>",
            "",
        ]
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the commands first")
    recorded = HERE / "terminal.json"
    if parser.parse_args().record:
        with tempfile.TemporaryDirectory() as folder:
            ran = run_page(PAGE.read_text(), Path(folder), free_port())
        recorded.write_text(json.dumps([asdict(one) for one in ran], indent=2, ensure_ascii=False) + "\n")
        PAGE.write_text(with_outputs(PAGE.read_text(), ran))
    ran = [Ran(**one) for one in json.loads(recorded.read_text())]
    (HERE / "terminal.svg").write_text(draw(ran))


if __name__ == "__main__":
    main()
