"""The import contracts hold, and a violation of any of them is detected."""

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
    for package in ("sglang_jax", "torch_backend", "tpu"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("sglang_jax/scheduler/messages.py", "import jax", "neither jax nor torch"),
        ("sglang_jax/mem_cache/page_pool.py", "def lazy(): import torch", "neither jax nor torch"),
        ("sglang_jax/checkpoint/tensors.py", "import sglang_jax.layers.batch", "neither jax nor torch"),
        ("sglang_jax/architectures/manifest.py", "import sglang_jax.layers.batch", "neither jax nor torch"),
        (
            "sglang_jax/architectures/manifest.py",
            "import sglang_jax.checkpoint.reader",
            "downwards only",
        ),
        (
            "sglang_jax/mem_cache/page_table.py",
            "import sglang_jax.scheduler.messages",
            "downwards only",
        ),
        ("sglang_jax/scheduler/messages.py", "import sglang_jax.engine.types", "downwards only"),
        ("sglang_jax/engine/types.py", "import sglang_jax.server.errors", "downwards only"),
        ("sglang_jax/replies/forms.py", "import sglang_jax.engine.types", "downwards only"),
        ("sglang_jax/server/errors.py", "import sglang_jax.batch.lines", "downwards only"),
        ("sglang_jax/batch/work_queue.py", "import sglang_jax.cli.main", "downwards only"),
        ("sglang_jax/batch/work_queue.py", "def lazy(): import torch", "neither jax nor torch"),
        ("sglang_jax/server/errors.py", "import sglang_jax.cli.main", "downwards only"),
        ("sglang_jax/layers/batch.py", "import sglang_jax.scheduler.messages", "know only the seam"),
        ("sglang_jax/layers/batch.py", "import sglang_jax.jax_runner.runner", "import downwards"),
        ("sglang_jax/layers/batch.py", "import torch_backend.batch", "JAX backend know only the seam"),
        ("sglang_jax/layers/block_matrix.py", "def lazy(): import numba", "no compiler of CPU kernels"),
        ("sglang_jax/cpu_kernels/work.py", "import jax", "CPU kernels of both backends"),
        ("sglang_jax/checkpoint/encoding.py", "import sglang_jax.cpu_kernels.work", "neither jax nor torch"),
        ("sglang_jax/runner/backends.py", "import torch_backend.runner", "neither jax nor torch"),
        ("sglang_jax/cli/serve.py", "import tpu.topologies", "rented and checked"),
        ("tpu/topologies.py", "import torch_backend.batch", "imports no torch"),
        ("torch_backend/step.py", "def lazy(): import jax", "torch backend knows only the seam"),
        ("torch_backend/step.py", "import sglang_jax.layers.batch", "torch backend knows only the seam"),
        ("torch_backend/step.py", "import sglang_jax.scheduler.messages", "torch backend knows only the seam"),
    ],
)
def test_a_violation_is_detected(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1
    broken = " ".join(result.stdout.partition("Broken contracts")[2].split())
    assert contract in broken


def test_the_command_line_loads_neither_jax_nor_torch() -> None:
    script = "import sglang_jax.launch_server, sys; print([m for m in ('jax', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
