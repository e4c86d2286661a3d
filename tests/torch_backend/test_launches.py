"""The number of kernels that a captured step launches on a GPU, counted without one: at one row they are most of its
overhead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import helpers.triton_interpreter
import pytest
import torch
from helpers.small_configs import small_config
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.quantization import INT8_ROWS
from torch_backend.attention.fixed import ChunksOnly
from torch_backend.attention.triton import TritonAttention
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.operations import TritonOperations
from torch_backend.kv_pages import KVPages, LayerMemory
from torch_backend.layers.matrix import ScaledMatrix
from torch_backend.layers.scaled_products import integer_product_on
from torch_backend.loading import PagedTransformer
from torch_backend.models import build_model
from torch_backend.packing import StepLayout
from torch_backend.step import RowTensors, build_batch

assert helpers.triton_interpreter

META = torch.device("meta")
CHIP = Chip(capability=90, processors=132)
PAGE_SIZE = 16
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}


class _Operations(TorchDispatchMode):
    """Torch operations that compute or copy; views and allocations launch nothing."""

    def __init__(self, launches: Counter[str]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if not function.is_view and name not in ALLOCATIONS:
            self._launches[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches of torch operations and of Triton kernels, by name; the latter do nothing."""
    launches: Counter[str] = Counter()

    def launch(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches[self.__name__] += 1

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    with _Operations(launches):
        yield launches


def launches_of(
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    layout: StepLayout,
    *,
    fixed: bool = False,
    encoding: Encoding | None = None,
) -> Counter[str]:
    """The launches of the captured part of a step, from the page-table deltas to the hidden states. Numbers of a tensor
    on this device cannot be read on the host. With `fixed`, also those of logits. `encoding`: of the matrices
    of layers."""
    config = small_config(num_layers=layers, head_dim=64, num_heads=4, num_kv_heads=2)
    attention = TritonAttention(CHIP)
    model = build_model(
        config,
        dtype=torch.bfloat16,
        device=META,
        operations=TritonOperations(),
        attention=ChunksOnly(attention) if fixed else attention,
        fixed=fixed,
        encodings=lambda name: None if name.layer is None else encoding,
    ).to(META)
    for module in model.modules():
        if isinstance(module, ScaledMatrix):
            module.product = integer_product_on(META)
    if fixed:
        model.fix_rows(None)
    pages = [LayerMemory(KVPages.allocate(9, 2, PAGE_SIZE, 64, torch.bfloat16, META)) for _ in range(layers)]
    paged = PagedTransformer(model, pages)
    rows = RowTensors.zeros(9, 8, META)
    inputs = layout.unpack(torch.empty(layout.size, dtype=torch.int32, device=META))
    with torch.inference_mode(), counted(monkeypatch) as launches:
        hidden = paged.forward(build_batch(inputs, rows, PAGE_SIZE))
        if fixed:
            paged.logits(hidden)
    return launches


@pytest.mark.parametrize(
    ("layout", "of_attention"),
    [
        (StepLayout.decode(8, 8), {"decode_splits": 1}),
        (StepLayout.mixed(8, 4, 64, 8), {"decode_splits": 1, "extend_blocks": 1}),
    ],
    ids=["decode", "mixed"],
)
def test_the_number_of_launches_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, layout: StepLayout, of_attention: dict[str, int]
) -> None:
    two, three = (launches_of(monkeypatch, layers, layout) for layers in (2, 3))
    layer = three - two
    assert layer == {
        "linear": 4,
        "_add_rms_norm_kernel": 2,
        "_rotate_and_write_kernel": 1,
        "_gated_kernel": 1,
        **of_attention,
    }
    # launched once per step: the batch, attention's plans, embeddings, rotary tables, the last norm
    assert sum(two.values()) - 2 * sum(layer.values()) <= (24 if layout.tokens == 0 else 36)


def test_inputs_are_rounded_by_the_kernel_before_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values share one rounding, gate and up another. Only attention's output has its own kernel."""
    monkeypatch.setattr(Chip, "of", lambda device: CHIP)
    two, three = (launches_of(monkeypatch, layers, StepLayout.decode(8, 8), encoding=INT8_ROWS) for layers in (2, 3))
    assert three - two == {
        "multiply_tiles": 4,
        "_add_rms_norm_kernel": 2,
        "_rotate_and_write_kernel": 1,
        "_rounded_gated_kernel": 1,
        "round_row": 1,
        "decode_splits": 1,
    }


@pytest.mark.parametrize("layout", [StepLayout.decode(8, 8), StepLayout.mixed(8, 4, 64, 8)], ids=["decode", "mixed"])
def test_steps_with_the_same_bits_launch_one_kernel_for_all_products(
    monkeypatch: pytest.MonkeyPatch, layout: StepLayout
) -> None:
    """None of a library's, whose sums depend on the number of rows, and none of attention for decode rows."""
    monkeypatch.setattr(Chip, "of", lambda device: CHIP)
    two, three = (launches_of(monkeypatch, layers, layout, fixed=True) for layers in (2, 3))
    products = {"multiply_tiles": 4, "add_splits": 0}
    assert three - two == +Counter(
        {"_add_rms_norm_kernel": 2, "_rotate_and_write_kernel": 1, "_gated_kernel": 1, "extend_blocks": 1, **products}
    )
    assert two["multiply_tiles"] == 2 * 4 + 1
    assert not {"linear", "mm", "addmm", "bmm", "baddbmm", "einsum", "matmul", "decode_splits"}.intersection(two)
