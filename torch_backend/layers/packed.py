"""Matrices in the layout of oneDNN's CPU kernels, with operations fused after a product. A matrix is reordered once
after loading: without reordering in each product, it is multiplied by a row in little more than half the time. The
operators are internal to torch, so `packing_works` tests them first."""

from __future__ import annotations

import functools
import logging

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)


class PackedMatrix:
    """A matrix `[outputs, inputs]` on the CPU, with the bias of its product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return product

    def multiply_then_silu(self, x: torch.Tensor) -> torch.Tensor:
        """`silu` of the product, rounded once."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "swish", [], "")
        return product

    def multiply_then_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """`gelu` of the product by the tanh approximation, rounded once."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "gelu", [], "tanh")
        return product

    def multiply_then_scale(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The product times `factors [T, outputs]`, rounded once."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factors, self._packed, self._bias, "mul")
        return product


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this processor packs matrices of `dtype` and computes correct products, tested on
    a small matrix; a failure is logged once."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 32), generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn((3, 32), generator=generator).to(dtype)
    exact = functional.linear(x.double(), weight.double(), bias.double())
    try:
        packed = PackedMatrix(weight, bias)
        gate = packed.multiply_then_silu(x)
        pairs = [
            (packed.multiply(x), exact),
            (gate, functional.silu(exact)),
            (packed.multiply_then_gelu(x), functional.gelu(exact, approximate="tanh")),
            (packed.multiply_then_scale(x, gate), exact * gate.double()),
        ]
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("Matrices of %s are not packed: torch %s cannot pack them (%s)", dtype, torch.__version__, error)
        return False
    for found, expected in pairs:
        allowed = 4 * torch.finfo(dtype).eps * (1 + expected.abs().max())
        if found.dtype != dtype or not bool((found.double() - expected).abs().max() <= allowed):
            logger.warning(
                "Matrices of %s are not packed: torch %s computes wrong products with packed ones",
                dtype,
                torch.__version__,
            )
            return False
    return True
