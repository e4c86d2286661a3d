"""What the site needs beyond the pages of docs/: the files of the repository that they link to, and its version.

Each version lies in a folder of its own, site/VERSION, and site/versions.json lists those that were built, in the form
that the theme's list of versions reads. So `make docs` on another version's commit adds that one.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, and what they are called in the site."""

REDIRECT = '<meta http-equiv="refresh" content="0; url={}">'
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]*)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The version that is described: in the footer, in the folder's name and in the list of versions."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config.site_dir = str(Path(config.site_dir) / version)
    config.copyright = f"sglang-jax {version}"
    config.extra["version"] = {"provider": "mike", "default": version}
    return config


def on_post_build(config: MkDocsConfig) -> None:
    """Lists the versions, the newest first, and leads from the site's root to the one that was built last."""
    folder = Path(config.site_dir)
    built = sorted((path.parent.name for path in folder.parent.glob("*/index.html")), key=Version, reverse=True)
    versions = [{"version": name, "title": name, "aliases": []} for name in built]
    (folder.parent / "versions.json").write_text(json.dumps(versions))
    (folder.parent / "index.html").write_text(REDIRECT.format(f"{folder.name}/"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages, the start page, and every file of the repository that a page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_moved((ROOT / name).read_text(), ROOT)))
    files.append(File.generated(config, "index.html", content=REDIRECT.format("readme.html")))
    for page in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)]:
        for _, target, _ in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if target and ":" not in target and path.is_file() and path.suffix != ".md":
                place = _place(path)
                if files.get_file_from_path(place) is None:
                    files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ lead to where `on_files` put what they lead to."""
    return markdown if page.file.src_uri in PAGES.values() else _moved(markdown, ROOT / "docs")


def _moved(markdown: str, folder: Path) -> str:
    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        if not target or ":" in target or not path.is_relative_to(ROOT) or not path.exists():
            return link[0]
        if path.is_dir() or (path.suffix == ".md" and not _is_page(path)):
            return text.strip("![]")  # of which the site has nothing
        return f"{text}({_place(path)}{anchor})"

    return LINK.sub(moved, markdown)


def _is_page(path: Path) -> bool:
    return (path.parent == ROOT / "docs" and path.suffix == ".md") or (path.name in PAGES and path.parent == ROOT)


def _place(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    if path.parent == ROOT and path.name in PAGES:
        return PAGES[path.name]
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    return f"files/{path.relative_to(ROOT).as_posix()}"
