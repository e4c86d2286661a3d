"""Tensors in huge pages."""

from __future__ import annotations

import numpy as np
import torch

from sglang_jax.cpu_kernels.huge_pages import HugePages
from torch_backend import host_memory


def test_arrays_of_any_sizes_are_zero_aligned_and_apart() -> None:
    """Some share a mapping, others have their own; numbers in one do not appear in another."""
    memory, random = HugePages(), np.random.default_rng(0)
    sizes = [0, 1, 63, 64, 65, *random.integers(1, 2**20, 60).tolist(), 2**23, 2**23 - 1, 2**21 + 1]
    arrays = [memory.zeros((size,), np.uint8) for size in sizes]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 or not array.size
        assert not array.any()
        array[:] = number % 255 + 1
    for number, array in enumerate(arrays):
        assert (array == number % 255 + 1).all()


def test_tensors_have_their_shape_and_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        numbers = torch.arange(60).reshape(3, 4, 5).to(dtype)
        assert torch.equal(host_memory.moved(numbers), numbers)
        for shape in ((2, 0, 3), (3, 2**21)):
            assert torch.equal(host_memory.zeros(shape, dtype, torch.device("cpu")), torch.zeros(shape, dtype=dtype))
