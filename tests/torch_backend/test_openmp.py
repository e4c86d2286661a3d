"""The wait policy of torch's threads, which must be set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import make_tiny_checkpoint

from torch_backend.openmp import spin_shortly

CHOSEN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
RUNNER = """
import sys
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import AttentionBackend, Device, EngineConfig
from torch_backend import create_runner

config = EngineConfig(
    model_path=sys.argv[1],
    device=Device.CPU,
    attention_backend=AttentionBackend.NATIVE,
    max_total_tokens=64,
    max_running_requests=1,
    skip_warmup=True,
)
create_runner(config, open_checkpoint(config.model_path)).close()
"""


@pytest.mark.skipif("USE_OPENMP=ON" not in torch.__config__.show(), reason="this torch has no OpenMP")
def test_a_runners_threads_sleep_soon(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3")
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    ran = subprocess.run(
        [sys.executable, "-c", RUNNER, str(folder)],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '20000'" in ran.stderr


@pytest.mark.parametrize("name", CHOSEN)
def test_a_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in CHOSEN:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "mine")
    spin_shortly()
    assert os.environ[name] == "mine"
    assert ("GOMP_SPINCOUNT" in os.environ) == (name == "GOMP_SPINCOUNT")
