"""`batch --engine ray` on a cluster that it starts itself, with one engine. `make ray-test` runs the other tests of
Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_with_ray() -> str | None:
    """This interpreter, or that of the environment which `make ray-test` installs."""
    if importlib.util.find_spec("ray") is not None:
        return sys.executable
    apart = Path(sys.prefix) / "ray/bin/python"
    return str(apart) if apart.exists() else None


@pytest.mark.slow
def test_a_file_is_answered_by_an_engine_on_ray(tmp_path: Path) -> None:
    python = python_with_ray()
    if python is None:
        pytest.skip("Ray is not installed: `make ray-test` installs it")
    started, output = tmp_path / "started", tmp_path / "answers"
    started.mkdir()
    (tmp_path / "input.jsonl").write_text("".join(json.dumps({"prompt": f"p{row}"}) + "\n" for row in range(20)))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    options = ["--engine", "ray", "--model-path", "echo", "--max-replicas", "1", "--device", "cpu"]
    files = ["--input", str(tmp_path / "input.jsonl"), "--output", str(output)]
    done = subprocess.run(
        [python, "-m", "helpers.ray_batch_command", str(started), "batch", *options, *files],
        env=environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for path in output.iterdir() for line in path.read_text().splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert texts == {f"line-{row + 1}": f"p{row}" for row in range(20)}
    assert len(list(started.iterdir())) == 1
