"""Each backend serves on a machine that lacks the other one's framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint

HIDDEN = {
    "jax": ("torch", "triton", "torch_backend"),
    "torch": ("jax", "jaxlib", "flax", "orbax", "triton"),
}
"""The modules hidden for each backend, as if not installed; Triton is only for GPUs."""

# Read by every process started with its folder on the path, the engine process included.
SITE_CUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

HIDDEN = {hidden!r}


finders = list(sys.meta_path)


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        found = (finder.find_spec(name, path, target) for finder in finders)
        return next((spec for spec in found if spec is not None), None)


sys.meta_path[:] = [Hiding]
"""

PROGRAM = """
import asyncio, importlib.util, json, sys
import sitecustomize
from sglang_jax import Engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.launch import launch_engine

SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


async def in_a_process_of_its_own(config):
    return await launch_engine(config, in_process=False)


def main():
    options = dict(device="cpu", dtype="float32", max_total_tokens=256, max_running_requests=2, skip_warmup=True)
    config = EngineConfig(model_path=sys.argv[1], compilation_cache_dir=sys.argv[1] + "/compiled", **options)
    outputs, backends = [], []
    for launch in ({}, {"launch": in_a_process_of_its_own}):
        with Engine(config=config, **launch) as engine:
            outputs.append(engine.generate([5, 17, 200, 33, 8], SAMPLING).output_ids)
            backends.append(engine.state()["backend"])
    assert all(importlib.util.find_spec(name) is None for name in sitecustomize.HIDDEN)
    imported = [name for name in sys.modules if name.partition(".")[0] in sitecustomize.HIDDEN]
    print(json.dumps({"outputs": outputs, "backends": backends, "imported": imported}))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def answers() -> dict[str, list[int]]:
    """The answers of the backends so far."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("backend", HIDDEN)
def test_a_machine_with_one_framework_serves(
    backend: str, folder: Path, answers: dict[str, list[int]], tmp_path: Path
) -> None:
    """`--backend auto` finds the installed one, both in this process and in an engine process."""
    result = run_without(HIDDEN[backend], folder, tmp_path)
    assert result["backends"] == [backend, backend]
    assert result["imported"] == []
    answers[backend], again = result["outputs"]
    assert len(answers[backend]) == 12
    assert again == answers[backend]
    assert len({tuple(tokens) for tokens in answers.values()}) == 1


def run_without(hidden: tuple[str, ...], folder: Path, scratch: Path) -> dict[str, Any]:
    site, program = scratch / "site", scratch / "program.py"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(hidden=hidden))
    program.write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[2])]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(),
    }
    finished = subprocess.run(
        [sys.executable, str(program), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answer: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return answer


def test_hidden_modules_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE.format(hidden=HIDDEN["torch"]))
    code = "import numpy, importlib.util; assert importlib.util.find_spec('jax') is None; import jax"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'jax'"
