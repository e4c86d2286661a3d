"""The page on offline batches agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_jax.batch.driver import SYNC_SECONDS
from sglang_jax.batch.lines import MAX_LINE_BYTES, PROMPT_FIELDS, Line, parse_line
from sglang_jax.batch.options import BatchConfig
from sglang_jax.batch.progress import REPORT_SECONDS
from sglang_jax.batch.run import WINDOW_BYTES
from sglang_jax.batch.run_folder import HASHED_BLOCK_BYTES, HASHED_BLOCKS
from sglang_jax.cli.batch import batch
from sglang_jax.cli.options import flag_name
from sglang_jax.cli.serve import serve

PAGE = (Path(__file__).parent.parent.parent / "docs/batch.md").read_text()


def test_the_options_are_those_of_the_command() -> None:
    table = PAGE.partition("\n## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", table, re.MULTILINE)
    assert rows.pop(0) == ("--engine", "`local`")  # which of the two kinds of run it is, set by the command itself
    assert [flag for flag, _ in rows] == [flag_name(name) for name in BatchConfig.model_fields]
    for flag, default in rows:
        value = BatchConfig.model_fields[flag.strip("-").replace("-", "_")].default
        if isinstance(value, bool):
            assert default == "off"
        elif isinstance(value, int):
            assert default == f"`{value}`"


def test_flags_named_on_the_page_exist() -> None:
    known = {name for command in (batch, serve) for parameter in command.params for name in parameter.opts}
    page = re.sub(r"^## Many machines: Ray$.*?(?=^## )", "", PAGE, flags=re.MULTILINE | re.DOTALL)  # has flags of Ray
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) <= known


def test_lines_shown_on_the_page_are_valid() -> None:
    section = PAGE.partition("## Input")[2].partition("## Output")[0]
    shown = [line for block in re.findall(r"```json\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    assert len(shown) == 3
    assert all(isinstance(parse_line(0, line.encode(), {}), Line) for line in shown)


def test_figures_on_the_page() -> None:
    words = " ".join(PAGE.split())  # line breaks do not matter
    for text in (
        f"{MAX_LINE_BYTES // 2**20} MiB",
        f"{WINDOW_BYTES // 2**20} MiB",
        f"{HASHED_BLOCKS} blocks of {HASHED_BLOCK_BYTES // 1024} KiB",
        "at most the last five seconds",
        f"every {REPORT_SECONDS:.0f} seconds",
    ):
        assert text in words, text
    assert SYNC_SECONDS == 5.0
    assert all(f"`{url}`" in PAGE for url in PROMPT_FIELDS)
