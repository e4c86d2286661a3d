"""Type-checks the Python of README.md and docs/ that uses this package: code that users copy must pass their checkers.

python tests/typed_docs.py           # the blocks of a page, in order, are one program
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from mypy import api

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def program_of(page: Path) -> str:
    """The page's blocks at their own line numbers; empty if it has none."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for found in BLOCK.finditer(text):
        first = text.count("\n", 0, found.start(2))
        for number, line in enumerate(found[2].splitlines()):
            lines[first + number] = line.removeprefix(found[1])
    return "\n".join(lines).rstrip()


def main() -> int:
    """The exit status: 1 if a page does not pass."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
            program = program_of(page)
            if "from sglang_jax import" in program:
                files.append(Path(folder) / f"{page.stem}_md.py")
                files[-1].write_text(program + "\n")
        options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        told, failed, status = api.run([*options, *map(str, files)])
        print(told.replace(f"{folder}/", "").replace("_md.py", ".md"), failed, end="", sep="")
    return status


if __name__ == "__main__":
    sys.exit(main())
