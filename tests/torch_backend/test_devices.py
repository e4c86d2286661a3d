"""Choice of device, dtype and kernels, on machines with and without a GPU."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import helpers.triton_interpreter
import pytest
import torch

from sglang_jax.config import AttentionBackend, Device, Dtype, EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner import this_machine
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.fixed import BlockAttention, ChunksOnly
from torch_backend.attention.interface import HeadForm, LatentForm
from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.attention.triton import TritonAttention
from torch_backend.cpu_kernels.operations import CpuOperations
from torch_backend.cpu_trial import CpuForm
from torch_backend.devices import available_memory, device_name, select_device, select_dtype
from torch_backend.kernel_choice import Kernels, choose_kernels
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.operations import TritonOperations
from torch_backend.kernels.sample import TritonSampler
from torch_backend.native_operations import NativeOperations
from torch_backend.native_sampler import NativeSampler
from torch_backend.recurrent.native import NativeStates
from torch_backend.recurrent.triton import TritonStates

assert helpers.triton_interpreter

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
FORM = CpuForm(torch.float32, torch.float32, (HeadForm(64, 2),))


def choose(
    wanted: AttentionBackend, device: torch.device, form: CpuForm = FORM, *, latents: bool = False, fixed: bool = False
) -> Kernels:
    return choose_kernels(wanted, device, form, EngineConfig().cache_folder(), latents=latents, fixed=fixed)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Makes torch report GPUs of these compute capabilities, on a machine whose only device files are in `tmp_path`."""
    monkeypatch.setattr(this_machine, "_DEVICES", tmp_path)
    monkeypatch.setattr(this_machine, "_CUDA_DRIVER", tmp_path / "version")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def show(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")

    return show


@pytest.mark.parametrize("wanted", [Device.CPU, Device.AUTO])
def test_a_machine_without_a_gpu_uses_its_cpu(gpus: Callable[..., None], wanted: Device) -> None:
    gpus()
    assert select_device(wanted) == CPU


def test_a_missing_gpu_is_an_error_with_a_remedy(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"device cuda was given, but torch \S+ sees no CUDA GPU.*--device cpu"):
        select_device(Device.CUDA)
    with pytest.raises(ConfigError, match=r"no NVIDIA driver is loaded \(there is no /dev/nvidia0\)"):
        select_device(Device.CUDA)


class TestAGpuThatTorchCannotUse:
    """The CPU would serve slowly and silently, although the machine has a GPU."""

    @pytest.fixture(autouse=True)
    def unusable(self, gpus: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gpus()
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            (tmp_path / name).touch()
        (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Tue Oct 26\n")
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    def assert_refused(self, reason: str) -> None:
        message = f"this machine has an NVIDIA GPU, but torch .* sees no CUDA GPU: .*{reason}.*--device cpu"
        with pytest.raises(ConfigError, match=message):
            select_device(Device.AUTO)
        with pytest.raises(ConfigError, match=f"device cuda was given.*{reason}.*--device cpu"):
            select_device(Device.CUDA)
        assert select_device(Device.CPU) == CPU

    def test_with_a_torch_for_cpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        self.assert_refused(r"built without CUDA\. Install a CUDA build")

    def test_with_a_driver_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

        monkeypatch.setattr(torch.cuda, "init", refuse)
        self.assert_refused(
            r"CUDA 13\.0 does not work with driver 470\.82\.01 \(.* too old .*\)\. Install a newer driver"
        )

    def test_with_a_driver_that_shows_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        self.assert_refused(r"finds no device with driver 470\.82\.01\. Check nvidia-smi")

    def test_without_permission(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # root may open any file
        monkeypatch.setattr("torch_backend.devices.os.access", lambda path, mode: False)
        self.assert_refused(r"this user may not open \S*nvidia0\. Run as a user with access")

    @pytest.mark.parametrize("listed", ["", "-1", "-1,0"])
    def test_a_hidden_gpu_does_not_count(self, listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert select_device(Device.AUTO) == CPU
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
            select_device(Device.CUDA)

    def test_in_wsl_where_the_vendor_is_unknown_it_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "nvidia0").rename(tmp_path / "dxg")
        monkeypatch.setattr(torch.version, "cuda", None)
        assert select_device(Device.AUTO) == CPU
        assert (
            "Running on the CPU. If this machine has an NVIDIA GPU, torch cannot use it: it was built without CUDA"
            in caplog.text
        )


def test_a_tpu_needs_the_other_backend(gpus: Callable[..., None]) -> None:
    gpus((9, 0))
    with pytest.raises(ConfigError, match=r"device tpu is not supported by .* choose --backend jax"):
        select_device(Device.TPU)


@pytest.mark.parametrize("wanted", [Device.CUDA, Device.AUTO])
def test_each_rank_has_its_own_gpu(gpus: Callable[..., None], wanted: Device) -> None:
    gpus((9, 0), (8, 0))
    assert [select_device(wanted, rank) for rank in (0, 1)] == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ConfigError, match="tp_size needs GPU number 2, but torch sees only 2"):
        select_device(wanted, 2)


def test_the_cpu_may_be_chosen_on_a_machine_with_a_gpu(gpus: Callable[..., None]) -> None:
    gpus((9, 0))
    assert select_device(Device.CPU) == CPU


def test_a_gpu_that_is_too_old_is_refused_by_name(gpus: Callable[..., None]) -> None:
    gpus((7, 5))
    with pytest.raises(ConfigError, match=r"GPU 0 has compute capability 7\.5; at least 8\.0 \(Ampere\) is needed"):
        select_device(Device.AUTO)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_requested_dtype_is_used(device: torch.device) -> None:
    assert select_dtype(Dtype.BFLOAT16, device) is torch.bfloat16
    assert select_dtype(Dtype.FLOAT16, device) is torch.float16
    assert select_dtype(Dtype.FLOAT32, device) is torch.float32


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ("flags : fpu avx512_bf16 sse", torch.bfloat16),
        ("flags : amx_bf16", torch.bfloat16),
        ("flags : avx512f", torch.float32),
    ],
)
def test_auto_is_bfloat16_where_the_device_multiplies_it(
    features: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(features + "\n")
    monkeypatch.setattr("sglang_jax.runner.this_machine._CPU_FEATURES", tmp_path / "cpuinfo")
    assert select_dtype(Dtype.AUTO, CPU) is dtype
    assert select_dtype(Dtype.AUTO, GPU) is torch.bfloat16


def test_memory_and_name_of_the_cpu() -> None:
    assert 2**26 < available_memory(CPU) < 2**45
    assert device_name(CPU) == f"cpu ({torch.get_num_threads()} threads)"


def test_unused_memory_of_torchs_allocator_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert available_memory(GPU) == 1200


class TestKernels:
    @pytest.fixture(autouse=True)
    def chip(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))

    @pytest.mark.parametrize(
        ("wanted", "name", "attention"),
        [
            (AttentionBackend.AUTO, AttentionBackend.NUMBA, CpuAttention),
            (AttentionBackend.NUMBA, AttentionBackend.NUMBA, CpuAttention),
            (AttentionBackend.NATIVE, AttentionBackend.NATIVE, NativeAttention),
            (AttentionBackend.REFERENCE, AttentionBackend.REFERENCE, ReferenceAttention),
            (AttentionBackend.SAGE, AttentionBackend.SAGE, NativeAttention),
        ],
    )
    def test_of_a_cpu(self, wanted: AttentionBackend, name: AttentionBackend, attention: type[object]) -> None:
        kernels = choose(wanted, CPU)
        assert kernels.attention_name is name
        assert isinstance(kernels.attention, attention)
        assert isinstance(kernels.operations, CpuOperations if attention is CpuAttention else NativeOperations)
        assert isinstance(kernels.sampler, NativeSampler)
        assert not kernels.capturable

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"dtype": torch.float16, "kv_dtype": torch.float16}, "not torch.float16"),
            ({"kv_dtype": torch.float8_e4m3fn}, "not torch.float32, torch.float8_e4m3fn"),
            ({"heads": (HeadForm(33, 2),)}, "float32 and 33$"),
        ],
        ids=["float16", "float8 pages", "odd heads"],
    )
    def test_of_a_cpu_for_a_shape_without_cpu_kernels(
        self, change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        form = replace(FORM, **change)  # type: ignore[arg-type]
        with caplog.at_level(logging.INFO):
            kernels = choose(AttentionBackend.AUTO, CPU, form)
        assert kernels.attention_name is AttentionBackend.NATIVE
        assert isinstance(kernels.operations, NativeOperations)
        (message,) = caplog.messages
        assert re.search(f"^Torch operations instead of CPU kernels: .*{reason}", message)
        with pytest.raises(ConfigError, match=f"^attention_backend numba has no kernels: .*{reason}"):
            choose(AttentionBackend.NUMBA, CPU, form)

    @pytest.mark.parametrize(
        ("wanted", "name", "attention"),
        [
            (AttentionBackend.AUTO, AttentionBackend.TRITON, TritonAttention),
            (AttentionBackend.TRITON, AttentionBackend.TRITON, TritonAttention),
            (AttentionBackend.NATIVE, AttentionBackend.NATIVE, NativeAttention),
            (AttentionBackend.REFERENCE, AttentionBackend.REFERENCE, ReferenceAttention),
            (AttentionBackend.SAGE, AttentionBackend.SAGE, TritonAttention),
        ],
    )
    def test_of_a_gpu(self, wanted: AttentionBackend, name: AttentionBackend, attention: type[object]) -> None:
        kernels = choose(wanted, GPU)
        assert kernels.attention_name is name
        assert isinstance(kernels.attention, attention)
        assert isinstance(kernels.operations, TritonOperations)
        assert isinstance(kernels.sampler, TritonSampler)
        # only these read no lengths on the host, which a CUDA graph cannot do
        assert kernels.capturable == (attention is TritonAttention)
        assert isinstance(kernels.states, TritonStates if attention is TritonAttention else NativeStates)

    @pytest.mark.parametrize(
        ("wanted", "attention", "captured"),
        [
            (AttentionBackend.AUTO, TritonAttention, True),
            (AttentionBackend.TRITON, TritonAttention, True),
            (AttentionBackend.NATIVE, NativeAttention, False),
        ],
    )
    def test_of_a_gpu_for_latent_attention(
        self, wanted: AttentionBackend, attention: type[object], captured: bool
    ) -> None:
        kernels = choose(wanted, GPU, latents=True)
        assert isinstance(kernels.attention, attention)
        assert kernels.capturable is captured
        with pytest.raises(ConfigError, match="sage does not support latent attention on cuda: choose triton, or auto"):
            choose(AttentionBackend.SAGE, GPU, latents=True)
        with pytest.raises(ConfigError, match=r"cuda, where results must not depend on the batch: choose native"):
            choose(AttentionBackend.TRITON, GPU, latents=True, fixed=True)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_for_latent_vectors_in_8_bits(self, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
        form = CpuForm(torch.float32, dtype, (), latents=(LatentForm(4, 32, 32),))
        assert isinstance(choose(AttentionBackend.AUTO, GPU, form, latents=True).attention, TritonAttention)
        with caplog.at_level("INFO"):
            assert isinstance(choose(AttentionBackend.AUTO, CPU, form, latents=True).attention, NativeAttention)
        assert "Torch operations instead of CPU kernels" in caplog.text
        with pytest.raises(ConfigError, match="numba has no kernels: they support"):
            choose(AttentionBackend.NUMBA, CPU, form, latents=True)

    @pytest.mark.parametrize(
        ("wanted", "latents", "attention"),
        [
            (AttentionBackend.AUTO, False, ChunksOnly),
            (AttentionBackend.SAGE, False, ChunksOnly),
            (AttentionBackend.NATIVE, False, BlockAttention),
            (AttentionBackend.AUTO, True, BlockAttention),
        ],
    )
    def test_of_a_gpu_with_the_same_bits_in_every_step(
        self, wanted: AttentionBackend, latents: bool, attention: type[object]
    ) -> None:
        kernels = choose(wanted, GPU, latents=latents, fixed=True)
        assert isinstance(kernels.attention, attention)
        assert isinstance(kernels.operations, TritonOperations)
        assert isinstance(kernels.states, NativeStates)
        assert kernels.capturable == (attention is ChunksOnly)

    @pytest.mark.parametrize("wanted", [AttentionBackend.REFERENCE, AttentionBackend.FLASHINFER])
    def test_kernels_that_depend_on_the_batch_are_refused(self, wanted: AttentionBackend) -> None:
        message = f"attention_backend {wanted} may depend on the batch, .*: choose triton, or auto"
        with pytest.raises(ConfigError, match=message):
            choose(wanted, GPU, fixed=True)

    @pytest.mark.parametrize(
        ("wanted", "device", "known"),
        [
            (AttentionBackend.TRITON, CPU, "numba or native or reference or sage"),
            (AttentionBackend.XLA, CPU, "numba or native or reference or sage"),
            (AttentionBackend.NUMBA, GPU, "triton or native or reference or sage or flashinfer"),
            (AttentionBackend.XLA, GPU, "triton or native or reference or sage or flashinfer"),
        ],
    )
    def test_kernels_that_do_not_run_on_the_device_are_refused(
        self, wanted: AttentionBackend, device: torch.device, known: str
    ) -> None:
        message = (
            f"attention_backend {wanted} is not available in the torch backend on {device.type}: "
            f"choose {known}, or auto"
        )
        with pytest.raises(ConfigError, match=message):
            choose(wanted, device)
