"""Which backend runs the model, found without importing any."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_backend
from sglang_jax import jax_runner
from sglang_jax.config import Backend, Device, EngineConfig
from sglang_jax.errors import ConfigError, how_to_install
from sglang_jax.runner import backends, this_machine

FACTORIES = {Backend.JAX: jax_runner.create_runner, Backend.TORCH: torch_backend.create_runner}


class Machine:
    """The folders that describe a machine's devices, to be filled."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._devices, self._pci = folder / "dev", folder / "pci"
        self._devices.mkdir()
        self._pci.mkdir()
        monkeypatch.setattr(this_machine, "_DEVICES", self._devices)
        monkeypatch.setattr(this_machine, "_PCI_DEVICES", self._pci)

    def add_device(self, name: str) -> None:
        (self._devices / name).touch()

    def add_pci(self, address: str, **files: str) -> None:
        (self._pci / address).mkdir()
        for name, text in files.items():
            (self._pci / address / name).write_text(text + "\n")

    def add_tpu(self) -> None:
        self.add_pci("0000:00:04.0", vendor="0x1ae0", **{"class": "0x120000"})

    def add_gpu(self) -> None:
        self.add_device("nvidia0")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without accelerators, but with similar devices."""
    machine = Machine(tmp_path, monkeypatch)
    for name in ("null", "nvidiactl", "nvidia-uvm", "dri"):
        machine.add_device(name)
    # Google's virtual network card, another vendor's GPU, and a device that reports nothing about itself.
    machine.add_pci("0000:00:05.0", vendor="0x1ae0", **{"class": "0x020000"})
    machine.add_pci("0000:00:06.0", vendor="0x10de", **{"class": "0x030200"})
    machine.add_pci("0000:00:07.0")
    return machine


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Hides installed modules."""

    def hide(*names: str) -> None:
        find = backends.find_spec
        for module in (backends, jax_runner, torch_backend):
            monkeypatch.setattr(module, "find_spec", lambda name: None if name in names else find(name))

    return hide


def chosen(device: Device = Device.AUTO) -> Backend:
    factory = backends.load_backend(EngineConfig(device=device))
    return next(backend for backend, known in FACTORIES.items() if known is factory)


class TestThisMachine:
    def test_a_plain_machine_has_neither(self, machine: Machine) -> None:
        assert not this_machine.has_tpu()
        assert not this_machine.has_cuda_gpu()

    @pytest.mark.parametrize("name", ["nvidia0", "nvidia11", "dxg"])
    def test_a_gpu_counts_if_its_driver_is_loaded(self, machine: Machine, name: str) -> None:
        machine.add_device(name)
        assert this_machine.has_cuda_gpu()
        assert not this_machine.has_tpu()

    @pytest.mark.parametrize("kind", ["0x120000", "0x088000", "0xff0000"])
    def test_a_tpu_is_a_google_device_other_than_a_network_card(self, machine: Machine, kind: str) -> None:
        machine.add_pci("0000:00:04.0", vendor="0x1ae0", **{"class": kind})
        assert this_machine.has_tpu()
        assert not this_machine.has_cuda_gpu()

    def test_missing_folders_mean_no_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(this_machine, "_DEVICES", tmp_path / "no-dev")
        monkeypatch.setattr(this_machine, "_PCI_DEVICES", tmp_path / "no-pci")
        assert not this_machine.has_tpu()
        assert not this_machine.has_cuda_gpu()

    def test_memory_within_a_container(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(this_machine, "_CONTAINER", tmp_path)
        unlimited = this_machine.available_host_memory()
        assert 2**26 < unlimited < 2**45
        (tmp_path / "memory.current").write_text("60000000\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 7000000\n")
        (tmp_path / "memory.max").write_text("100000000\n")
        # Unused file pages are given back when memory is needed.
        assert this_machine.available_host_memory() == 47_000_000
        (tmp_path / "memory.max").write_text("max\n")
        assert this_machine.available_host_memory() == pytest.approx(unlimited, rel=0.2)


class TestAuto:
    @pytest.mark.parametrize(
        ("accelerators", "device", "backend"),
        [
            ("", Device.AUTO, Backend.JAX),
            ("tpu", Device.AUTO, Backend.JAX),
            ("gpu", Device.AUTO, Backend.TORCH),
            ("tpu gpu", Device.AUTO, Backend.JAX),
            # A requested device is treated as if it were there.
            ("gpu", Device.CPU, Backend.JAX),
            ("gpu", Device.TPU, Backend.JAX),
            ("tpu", Device.CUDA, Backend.TORCH),
            ("", Device.CUDA, Backend.TORCH),
        ],
    )
    def test_it_follows_the_machine(
        self,
        machine: Machine,
        caplog: pytest.LogCaptureFixture,
        accelerators: str,
        device: Device,
        backend: Backend,
    ) -> None:
        for kind in accelerators.split():
            {"tpu": machine.add_tpu, "gpu": machine.add_gpu}[kind]()
        with caplog.at_level(logging.WARNING):
            assert chosen(device) is backend
        assert not caplog.messages

    @pytest.mark.parametrize(("hidden", "backend"), [("jax", Backend.TORCH), ("torch", Backend.JAX)])
    def test_without_an_accelerator_it_is_the_installed_backend(
        self,
        machine: Machine,
        without: Callable[..., None],
        caplog: pytest.LogCaptureFixture,
        hidden: str,
        backend: Backend,
    ) -> None:
        without(hidden)
        with caplog.at_level(logging.WARNING):
            assert chosen() is backend
        assert not caplog.messages

    @pytest.mark.parametrize(
        ("accelerator", "hidden", "backend", "words"),
        [
            ("gpu", "torch", Backend.JAX, "with the torch backend, which is not installed; using jax."),
            ("tpu", "jax", Backend.TORCH, "with the jax backend, which is not installed; using torch."),
        ],
    )
    def test_an_accelerator_whose_backend_is_missing_is_a_warning(
        self,
        machine: Machine,
        without: Callable[..., None],
        caplog: pytest.LogCaptureFixture,
        accelerator: str,
        hidden: str,
        backend: Backend,
        words: str,
    ) -> None:
        {"tpu": machine.add_tpu, "gpu": machine.add_gpu}[accelerator]()
        without(hidden)
        with caplog.at_level(logging.WARNING):
            assert chosen() is backend
        (message,) = caplog.messages
        assert words in message
        assert message.endswith(how_to_install("cuda" if accelerator == "gpu" else "tpu"))

    @pytest.mark.parametrize(
        ("accelerator", "message"),
        [
            ("", r"the JAX backend needs jax and flax: pip install -e '\.\[jax\]' in the clone"),
            ("gpu", r"the Torch backend needs torch: pip install -e '\.\[cuda\]' in the clone .*, or '\.\[torch\]'"),
        ],
    )
    def test_without_any_framework_the_error_says_what_to_install(
        self, machine: Machine, without: Callable[..., None], accelerator: str, message: str
    ) -> None:
        if accelerator:
            machine.add_gpu()
        without("jax", "flax", "torch")
        factory = backends.load_backend(EngineConfig())
        with pytest.raises(ConfigError, match=message):
            factory(EngineConfig(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", FACTORIES)
def test_a_requested_backend_is_used_on_any_machine(machine: Machine, backend: Backend) -> None:
    machine.add_tpu()
    machine.add_gpu()
    assert backends.load_backend(EngineConfig(backend=backend)) is FACTORIES[backend]


@pytest.mark.parametrize(
    ("backend", "hidden", "message"),
    [
        (Backend.JAX, "jax", "the JAX backend needs jax: pip"),
        (Backend.JAX, "flax", "the JAX backend needs flax: pip"),
        (Backend.TORCH, "torch", "the Torch backend needs torch: pip"),
    ],
)
def test_the_error_for_a_requested_backend_without_its_framework_says_what_to_install(
    without: Callable[..., None], backend: Backend, hidden: str, message: str
) -> None:
    without(hidden)
    config = EngineConfig(backend=backend)
    with pytest.raises(ConfigError, match=message):
        backends.load_backend(config)(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", Backend)
def test_a_backend_that_is_not_installed_is_an_error(machine: Machine, backend: Backend) -> None:
    name = "jax" if backend is Backend.AUTO else backend.value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "BACKENDS", "sglang_jax.no_such_group")
        with pytest.raises(ConfigError, match=rf"no backend '{name}' is installed \(installed: none\).*\[{name}\]'"):
            backends.load_backend(EngineConfig(backend=backend))


@pytest.mark.parametrize("backend", Backend)
def test_finding_a_backend_imports_no_framework(backend: Backend) -> None:
    code = (
        "import sys; from sglang_jax.config import EngineConfig; from sglang_jax.runner.backends import load_backend; "
        f"load_backend(EngineConfig(backend='{backend.value}')); "
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'torch', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
