"""Kernels that start while the previous one ends: they access nothing before they have waited, and give the same
results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
from helpers.torch_attention_steps import Case, make_step
from helpers.triton_attention import attend
from helpers.triton_interpreter import dependent_launches
from triton.runtime.errors import InterpreterError

from torch_backend.kernels.chip import Chip, can_launch_dependents
from torch_backend.kernels.operations import TritonOperations
from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Rotation

WEIGHT = torch.linspace(0.5, 1.5, 64)
HEAD_WEIGHTS = HeadNorms(WEIGHT, WEIGHT.flip(0), 1e-5)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def rotated(operations: TritonOperations) -> list[torch.Tensor]:
    kv = KVPages.allocate(2, 1, 4, 64, torch.float32, torch.device("cpu"))
    rotation = Rotation(numbers(3, 32), numbers(3, 32))
    queries = operations.rotate_and_write(numbers(3, 4 * 64), rotation, HEAD_WEIGHTS, kv, torch.tensor([4, 6, 5]))
    return [queries, kv.keys[1], kv.values[1]]


OPERATIONS: dict[str, Callable[[TritonOperations], list[torch.Tensor]]] = {
    "rms_norm": lambda operations: [operations.rms_norm(numbers(3, 64), WEIGHT, 1e-5)],
    "add_rms_norm": lambda operations: list(operations.add_rms_norm(numbers(3, 64), numbers(3, 64), WEIGHT, 1e-5)),
    "silu_mul": lambda operations: [operations.silu_mul(numbers(3, 128))],
    "gelu_mul": lambda operations: [operations.gelu_mul(numbers(3, 128))],
    "rotate_and_write": rotated,
}


@pytest.mark.parametrize("compute", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_wait_before_they_access_other_kernels_outputs(
    compute: Callable[[TritonOperations], list[torch.Tensor]],
) -> None:
    plain = compute(TritonOperations())
    with dependent_launches(WEIGHT) as waits:
        dependent = compute(TritonOperations(dependent=True))
    assert waits.programs >= 3
    for one, other in zip(dependent, plain, strict=True):
        assert torch.equal(one, other)


def test_decode_attention_waits_as_well() -> None:
    step = make_step(Case(kv_lens=(300, 9, 40), query_lens=(1, 1, 1), num_decode=3, padding=1, dtype=torch.bfloat16))
    plain = attend(step, Chip(90, 3))
    with dependent_launches(plain=["plan_splits"]) as waits:
        assert torch.equal(attend(step, Chip(90, 3, dependent_launches=True)), plain)
    assert waits.programs


def test_an_access_before_the_wait_is_noticed() -> None:
    """An access to something not named as a weight, or no wait at all."""
    for free, operations in (((), TritonOperations(dependent=True)), ((WEIGHT,), TritonOperations())):
        with dependent_launches(*free), pytest.raises(InterpreterError, match="load comes before it has waited"):
            operations.rms_norm(numbers(3, 64), WEIGHT, 1e-5)


@pytest.mark.parametrize(
    ("capability", "version", "can"),
    [(80, "3.7.1", False), (89, "3.7.1", False), (90, "3.7.1", True), (120, "4.0.0", True), (90, "3.6.0", False)],
)
def test_where_kernels_can_be_launched_early(
    monkeypatch: pytest.MonkeyPatch, capability: int, version: str, can: bool
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert can_launch_dependents(capability) is can
