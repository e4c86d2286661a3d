"""Links and paths in the documentation resolve."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                yield page, target


@pytest.mark.parametrize(("page", "target"), list(links()), ids=lambda value: getattr(value, "name", value))
def test_a_link_resolves(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    assert file.exists(), f"{page.name} links to {target}"
    if anchor:
        assert anchor in anchors(file), f"{page.name} links to {target}; there are {sorted(anchors(file))}"


def broken_tables(text: str) -> list[str]:
    """First lines of tables that are rendered as text: without a line of dashes below the head, or with rows of a
    different number of cells."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        lines = re.sub(r"\\\|", "", table).splitlines()
        cells = {line.count("|") for line in lines}
        if len(lines) < 2 or set(lines[1]) > set("|-: ") or len(cells) != 1:
            found.append(lines[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_well_formed(page: Path) -> None:
    assert broken_tables(page.read_text()) == []


def test_a_broken_table_is_detected() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert broken_tables(table) == []
    assert broken_tables(table + "\n| 3 | 4 |\n") == ["| 3 | 4 |"]
    assert broken_tables(table + "| 3 |\n") == ["| a | b |"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_backticks_exist(page: Path) -> None:
    """`scheduler/planner.py` and similar paths are relative to the package, `benchmarks/` and similar ones to the
    root."""
    paths = re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.[a-z]+)?)`", page.read_text())
    missing = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "sglang_jax" / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_and_modules_in_commands_exist(page: Path) -> None:
    text = page.read_text()
    for script in re.findall(r"python ((?:benchmarks|examples)/\S+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"python -m (sglang_jax[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for target in re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_site_has_every_page() -> None:
    """`make docs` builds it in a separate environment, and checks its links."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(
        {
            "readme.md",
            "changelog.md",
            *(page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")),
        }
    )


def test_the_reference_shows_existing_names() -> None:
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE):
        assert pkgutil.resolve_name(name).__doc__, name


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    """As by `make docs`, if the extra `docs` is installed."""
    installed = shutil.which("mkdocs", path=os.pathsep.join([f"{sys.prefix}/docs/bin", f"{sys.prefix}/bin"]))
    if installed is None:
        pytest.skip("mkdocs is not installed: `make docs` installs it")
    built = subprocess.run(
        [installed, "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    [reference] = tmp_path.glob("*/reference.html")
    assert "SamplingParams" in reference.read_text()


def test_the_plot_matches_the_page_of_figures() -> None:
    figures = json.loads((ROOT / "docs/images/decode_cpu.json").read_text())
    page, drawn = (ROOT / "docs/benchmarks.md").read_text(), (ROOT / "docs/images/decode_cpu.svg").read_text()
    for name in ("JAX backend", "Torch backend"):
        values = figures["output tokens per second"][name]
        assert " / ".join(f"{value:g}" for value in values) in page
        assert all(f">{value:g}</text>" in drawn for value in values)
    torch, reference = (
        figures["output tokens per second"][name] for name in ("Torch backend", "transformers generate")
    )
    ratios = [f"{ours / theirs:.2f}" for ours, theirs in zip(torch, reference, strict=True)]
    assert f"{' / '.join(ratios)} times transformers" in page


def test_the_picture_is_drawn_from_its_description() -> None:
    images = ROOT / "docs/images"
    drawing = runpy.run_path(str(images / "draw_architecture.py"))
    described = yaml.safe_load((images / "architecture.yaml").read_text())
    assert (images / "architecture.svg").read_text() == drawing["draw"](described)


def test_the_layout_names_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    layout = readme.partition("## Layout")[2]
    packages = {path.name for path in (ROOT / "sglang_jax").iterdir() if (path / "__init__.py").exists()}
    assert packages
    assert not [room for room in packages if f"{room}/" not in layout]
