"""Tensors on the host in huge pages (see `sglang_jax.cpu_kernels.huge_pages`)."""

from __future__ import annotations

import torch

from sglang_jax.cpu_kernels.huge_pages import ask_for_huge_pages, huge_pages


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, whose storage can be resized; on the host, a large one is in huge pages."""
    found = torch.zeros(shape, dtype=dtype, device=device)  # not written yet on the host if it is large
    ask(found)
    return found


def ask(tensor: torch.Tensor) -> None:
    """Asks for huge pages for a tensor that was not written yet, if it is on the host."""
    if tensor.device.type == "cpu":
        ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the host, which shares huge pages with others."""
    memory = torch.from_numpy(huge_pages.zeros((tensor.nbytes,), "uint8"))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
