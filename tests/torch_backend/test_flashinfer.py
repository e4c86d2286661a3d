"""The adapter for FlashInfer against a stand-in with its signatures (flashinfer-python 0.7.2), in numpy's float64."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_cases import FAMILIES
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_attention_steps import Case, Step, make_step, softmax_attention

from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.config import AttentionBackend, Device, EngineConfig, ModelImpl
from sglang_jax.errors import ConfigError
from torch_backend import building, create_runner, kernel_choice
from torch_backend.attention.flashinfer import FlashInferAttention
from torch_backend.attention.interface import AttentionOptions, HeadForm
from torch_backend.attention.native import NativeAttention
from torch_backend.cpu_trial import CpuForm
from torch_backend.kernel_choice import Kernels, choose_kernels
from torch_backend.kernels.chip import Chip
from torch_backend.native_operations import NativeOperations
from torch_backend.native_sampler import NativeSampler

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@dataclass
class PlannedStep:
    """The part of a plan that both wrappers keep."""

    queries: list[int]
    begins: list[int]
    pages: torch.Tensor
    last_keys: list[int]
    options: AttentionOptions
    page_size: int

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Reads whole pages, so that NaN in a page of the plan would show."""
        out = []
        for row in range(len(self.begins) - 1):
            pages = self.pages[self.begins[row] : self.begins[row + 1]].long()
            length = (len(pages) - 1) * self.page_size + self.last_keys[row]
            own = q[self.queries[row] : self.queries[row + 1]].double().numpy()
            sides = [stored[pages].transpose(1, 2).flatten(0, 1)[:length].double().numpy() for stored in (keys, values)]
            grouped = own.reshape(len(own), keys.shape[1], -1, own.shape[-1])
            found = softmax_attention(grouped, *sides, self.options)
            out.append(found.reshape(own.shape))
        return torch.from_numpy(np.concatenate(out)).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        self.planned: PlannedStep | None = None

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert q_data_type == kv_data_type
        assert sm_scale is not None
        options = AttentionOptions(sm_scale, None if window_left < 0 else window_left + 1, logits_soft_cap)
        rows = len(last_page_len)
        self.planned = PlannedStep(
            list(range(rows + 1)), indptr.tolist(), indices, last_page_len.tolist(), options, page_size
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        assert self.planned is not None
        return self.planned.attend(q, *paged_kv_cache)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "HND"
        self.planned: PlannedStep | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        assert sm_scale is not None
        options = AttentionOptions(sm_scale, None if window_left < 0 else window_left + 1, logits_soft_cap)
        self.planned = PlannedStep(
            qo_indptr.tolist(),
            paged_kv_indptr.tolist(),
            paged_kv_indices,
            paged_kv_last_page_len.tolist(),
            options,
            page_size,
        )

    run = BatchDecodeWithPagedKVCacheWrapper.run


class Library:
    BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    monkeypatch.setattr("torch_backend.attention.flashinfer._WORKSPACE_BYTES", 16)
    return FlashInferAttention(Library, CPU)


def check(attention: FlashInferAttention, step: Step) -> None:
    output = attention.prepare(step.batch)(step.queries, step.kv, step.options)
    expected = torch.from_numpy(step.expected)
    assert (output.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert output.is_contiguous()


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 7, 16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_of_a_step_equals_numpys(
    attention: FlashInferAttention, page_size: int, window: int | None, soft_cap: float | None
) -> None:
    """Decode rows, a whole prompt, and a chunk after a prefix, with NaN in every slot that must not be read."""
    case = Case(
        kv_lens=(33, 1, 16, 9, 40),
        query_lens=(1, 1, 1, 9, 7),
        num_decode=3,
        dtype=torch.bfloat16,
        page_size=page_size,
        window=window,
        soft_cap=soft_cap,
    )
    for seed in (0, 1):  # so that the wrappers plan again
        check(attention, make_step(case, seed))


def test_decode_steps_with_padding_and_layers_of_several_shapes(attention: FlashInferAttention) -> None:
    case = Case(kv_lens=(33, 5), query_lens=(1, 1), num_decode=2, padding=2, dtype=torch.bfloat16)
    steps = [make_step(replace(case, window=window)) for window in (None, 4, None)]
    attend = attention.prepare(steps[0].batch)
    for step in steps:
        output = attend(step.queries, step.kv, step.options)
        torch.testing.assert_close(output.double(), torch.from_numpy(step.expected), atol=1.6e-2, rtol=0)


def test_sinks_are_refused(attention: FlashInferAttention) -> None:
    step = make_step(Case(kv_lens=(5,), query_lens=(1,), num_decode=1, dtype=torch.bfloat16, sinks=True))
    with pytest.raises(ValueError, match="flashinfer does not support attention sinks: choose triton"):
        attention.prepare(step.batch)(step.queries, step.kv, step.options)


@pytest.mark.parametrize("impl", ModelImpl)
def test_models_with_sinks_are_refused_before_weights_are_read(
    impl: ModelImpl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(*given: object, **further: object) -> None:
        raise AssertionError("weights are read")

    case = FAMILIES["granite_swa"]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    kernels = Kernels(NativeAttention(), AttentionBackend.FLASHINFER, NativeOperations(), NativeSampler())
    monkeypatch.setattr(building, "choose_kernels", lambda *given, **options: kernels)
    monkeypatch.setattr(SafetensorsReader, "read", read)
    config = EngineConfig(model_path=str(folder), device=Device.CPU, model_impl=impl)
    with pytest.raises(
        ConfigError, match=r"flashinfer does not support attention sinks, which layers [0-9, ]+ have: c"
    ):
        create_runner(config, open_checkpoint(config.model_path, model_impl=impl))


FORM = CpuForm(torch.bfloat16, torch.bfloat16, (HeadForm(128, 4), HeadForm(64, 1)))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (replace(FORM, heads=(HeadForm(80, 1), HeadForm(128, 4))), "no kernels for heads of 80 numbers"),
        (replace(FORM, dtype=torch.float32, kv_dtype=torch.float32), "dtype bfloat16 or float16, got float32"),
        (replace(FORM, kv_dtype=torch.float8_e4m3fn), "kv_cache_dtype must be auto, got keys in float8_e4m3fn"),
        (FORM, "flashinfer is not installed: pip install -e '.\\[flashinfer\\]'"),
    ],
)
def test_unsupported_options_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, form: CpuForm, message: str
) -> None:
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        choose_kernels(AttentionBackend.FLASHINFER, GPU, form, EngineConfig().cache_folder())


def test_it_is_chosen_by_name_only_and_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(kernel_choice, "_flashinfer", lambda device, form: FlashInferAttention(library, CPU))
    folder = EngineConfig().cache_folder()
    kernels = choose_kernels(AttentionBackend.FLASHINFER, GPU, FORM, folder)
    assert isinstance(kernels.attention, FlashInferAttention)
    assert not kernels.capturable
    assert choose_kernels(AttentionBackend.AUTO, GPU, FORM, folder).attention_name is AttentionBackend.TRITON
    with pytest.raises(ConfigError, match="flashinfer is not available in the torch backend on cpu"):
        choose_kernels(AttentionBackend.FLASHINFER, CPU, FORM, folder)
