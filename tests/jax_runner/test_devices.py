"""Choice of device and dtype, and the compilation cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sglang_jax.config import Device, Dtype, EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.compiles import CompileCounter, use_compilation_cache
from sglang_jax.jax_runner.devices import available_memory, select_device, select_dtype


@pytest.mark.parametrize("wanted", [Device.CPU, Device.AUTO])
def test_the_cpu_is_found(wanted: Device) -> None:
    assert select_device(wanted).platform == "cpu"


def test_a_missing_device_is_an_error_that_names_the_available_ones() -> None:
    with pytest.raises(ConfigError, match="device tpu was given, but JAX sees only: cpu"):
        select_device(Device.TPU)


def test_dtypes() -> None:
    device = jax.devices("cpu")[0]
    assert select_dtype(Dtype.BFLOAT16, device) == jnp.bfloat16
    assert select_dtype(Dtype.FLOAT32, device) == jnp.float32
    with pytest.raises(ConfigError, match="bfloat16 or float32, not in float16: choose --dtype bfloat16"):
        select_dtype(Dtype.FLOAT16, device)


@pytest.mark.parametrize(
    ("features", "dtype"),
    [("flags : fpu avx512_bf16 sse", "bfloat16"), ("flags : amx_bf16", "bfloat16"), ("flags : avx512f", "float32")],
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(
    features: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(features + "\n")
    monkeypatch.setattr("sglang_jax.runner.this_machine._CPU_FEATURES", tmp_path / "cpuinfo")
    assert select_dtype(Dtype.AUTO, jax.devices("cpu")[0]).name == dtype


def test_available_memory_is_below_that_of_the_machine() -> None:
    assert 2**26 < available_memory(jax.devices("cpu")[0]) < 2**45


def test_a_compile_counter_counts_until_it_is_closed() -> None:
    counter = CompileCounter()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    after_one = counter.count
    assert after_one >= 1
    counter.close()
    jax.jit(lambda x: x * 4 + 1)(jnp.ones(7))
    assert counter.count == after_one


_COMPILE_ONCE = """
import jax, sys
from pathlib import Path
from sglang_jax.jax_runner.compiles import use_compilation_cache
use_compilation_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(lambda event, **kwargs: hits.append(event))
jax.jit(lambda x: x * 3 + 1)(1.0)
print(sum(event.endswith("/cache_hits") for event in hits))
"""


def test_programs_are_kept_between_processes(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    hits = [
        int(subprocess.run([sys.executable, "-c", _COMPILE_ONCE, folder], capture_output=True, check=True).stdout)
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] >= 1


def test_without_a_writable_folder_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """For example for a user without a home directory, or in a read-only container."""
    set_to: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    (tmp_path / "file").touch()
    use_compilation_cache(str(tmp_path / "file/cache"))
    assert not set_to
    (said,) = caplog.messages
    assert str(tmp_path / "file") in said
    assert "--compilation-cache-dir" in said


def test_a_bucket_keeps_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a path it would lose one of its two slashes."""
    monkeypatch.chdir(tmp_path)
    set_to: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    config = EngineConfig(compilation_cache_dir="gs://bucket/compiled")
    use_compilation_cache(config.cache_address())
    assert set_to["jax_compilation_cache_dir"] == "gs://bucket/compiled"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"local folder for compiled programs, got gs://bucket/compiled"):
        config.cache_folder()
    assert EngineConfig(compilation_cache_dir=tmp_path / "here").cache_address() == str(tmp_path / "here")
