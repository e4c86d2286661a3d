"""The shell commands of README and the pages in docs/ that start programs of this project."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL_PART = re.compile(r"&|\d?>.*")
"""What ends a command's own words: a redirection, or `&`."""

SHELLS = ("", "sh", "bash")
OURS = re.compile(r"(sglang-jax|make|docker run|python benchmarks/\S+|python -m (sglang_jax|tpu)\S*)( |$)")


@dataclass(frozen=True)
class Command:
    """A program and its arguments, as a page has them. `whole` is false within a sentence, where a command may leave
    out required arguments."""

    page: str
    words: tuple[str, ...]
    whole: bool

    @property
    def line(self) -> str:
        return shlex.join(self.words)


def statements(text: str) -> Iterator[list[str]]:
    """The words of each shell command, also of commands within a quoted string of several lines."""
    unfinished = ""
    for line in re.sub(r"\\\n *", " ", text).splitlines():
        unfinished += line + "\n"
        try:
            words = shlex.split(unfinished, comments=True)
        except ValueError:  # a quotation mark is open: the next line belongs to this one
            continue
        unfinished = ""
        for word in words:
            if "\n" in word:
                yield from statements(word)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        yield words


def program_of(words: list[str]) -> tuple[str, ...]:
    """The words from the program on, without its folder and variables before it. Empty for a program of another
    project."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words:
        return ()
    words = [words[0].removeprefix(".venv/bin/"), *takewhile(lambda word: not SHELL_PART.fullmatch(word), words[1:])]
    return tuple(words) if OURS.match(" ".join(words)) else ()


def commands_of(page: str, text: str) -> list[Command]:
    """The commands of a page's blocks, then those within its sentences, each once."""
    blocks = [block for language, block in BLOCK.findall(text) if language in SHELLS and OURS.search(block)]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]
    found = {}
    for source, whole in [*((block, True) for block in blocks), *((span, False) for span in spans if OURS.match(span))]:
        for words in statements(source):
            if program := program_of(words):
                command = Command(page, program, whole)
                found.setdefault(command.line, command)
    return list(found.values())


def documented_commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page.name, page.read_text())]
