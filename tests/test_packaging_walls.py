"""The import walls stand, and a hole in any of them is seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    return subprocess.run([*command, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "sglang_jax", tmp_path / "sglang_jax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_walls_stand(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("scheduler/messages.py", "import jax", "neither jax nor torch"),
        ("mem_cache/page_pool.py", "def lazy(): import torch", "neither jax nor torch"),
        ("checkpoint/model_config.py", "import sglang_jax.layers.batch", "neither jax nor torch"),
        ("mem_cache/page_table.py", "import sglang_jax.scheduler.messages", "go down the house"),
        ("scheduler/messages.py", "import sglang_jax.engine.types", "go down the house"),
        ("engine/types.py", "import sglang_jax.server.errors", "go down the house"),
        ("server/errors.py", "import sglang_jax.cli.main", "go down the house"),
        ("layers/batch.py", "import sglang_jax.scheduler.messages", "know only the seam"),
        ("layers/batch.py", "import sglang_jax.jax_runner.runner", "import downwards"),
    ],
)
def test_a_hole_is_seen(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / "sglang_jax" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    broken = " ".join(result.stdout.partition("Broken contracts")[2].split())
    assert contract in broken


def test_the_command_line_loads_neither_jax_nor_torch() -> None:
    script = "import sglang_jax.launch_server, sys; print([m for m in ('jax', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
