"""The content of the wheel: the packages that serve, the data that they read, and no files for tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sglang_jax", "torch_backend", "tpu")

BUILD = "from setuptools.build_meta import build_wheel; build_wheel('wheels')"

# the page at /
WEB = (
    *("api.js", "base.css", "cache.js", "charts.js", "chat.css", "chat.js", "dom.js", "icon.svg"),
    *("index.html", "live.css", "live.js", "main.js", "markdown.js", "settings.js", "turns.js"),
)

# programs, entry points, and modules that users import: the wheel does not import these itself
STARTS = {
    "sglang_jax.__main__",
    "sglang_jax.architectures.dense",
    "sglang_jax.bench_offline_throughput",
    "sglang_jax.bench_serving",
    "sglang_jax.checkpoint.template_worker",
    "sglang_jax.launch_server",
    "sglang_jax.runner.fake",
    "sglang_jax.sampling.reference",
    "sglang_jax.server.embedded",
    "torch_backend.follower",
    "tpu.check",
    "tpu.launch",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The wheel's list of files, built from a copy of the files that a clone has next to its packages."""
    copy = tmp_path_factory.mktemp("clone")
    for folder in (*PACKAGES, "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr
    (wheel,) = (copy / "wheels").iterdir()
    return sorted(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_every_module_of_the_packages_and_no_other(files: list[str]) -> None:
    modules = [str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [name for name in files if name.endswith(".py")] == sorted(modules)


def test_the_wheel_has_only_the_data_that_a_server_or_check_reads(files: list[str]) -> None:
    data = [name for name in files if not name.endswith(".py") and ".dist-info/" not in name]
    assert data == [
        "sglang_jax/kernels/ragged_paged_attention/pallas/block_sizes.json",
        "sglang_jax/py.typed",
        *(f"sglang_jax/server/web/{name}" for name in WEB),
        "sglang_jax/spellings.toml",
        "torch_backend/py.typed",
        "tpu/py.typed",
        "tpu/shapes/deepseek-v2-lite.json",
        "tpu/shapes/deepseek-v3.json",
        "tpu/shapes/gemma-3-27b.json",
        "tpu/shapes/gpt-oss-120b.json",
        "tpu/shapes/gpt-oss-20b.json",
        "tpu/shapes/llama-3.1-8b.json",
        "tpu/shapes/qwen3-235b-a22b.json",
        "tpu/shapes/qwen3-30b-a3b.json",
        "tpu/shapes/qwen3-32b.json",
        "tpu/shapes/qwen3-8b.json",
    ]


def test_modules_that_are_not_imported_are_entry_points() -> None:
    """A module that the wheel does not import is only for tests, or unused. Families of models are found by their
    folder."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    unused = {
        module
        for module in graph.modules
        if not graph.find_modules_that_directly_import(module) and not graph.find_children(module)
    }
    assert {module for module in unused if ".architectures.families." not in module} == STARTS
