"""Products with matrices that stay in bfloat16 on a CPU that does not multiply bfloat16."""

from __future__ import annotations

import logging

import torch
from numba.core.errors import NumbaError
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.cpu_kernels import block_product
from sglang_jax.cpu_kernels.bfloat16_product import build_bfloat16_product, items_of, scratch_floats
from sglang_jax.cpu_kernels.bfloat16_tiles import OUTPUTS, FloatVectors, best_vectors
from sglang_jax.cpu_kernels.compiling import KernelCompiler
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads

logger = logging.getLogger(__name__)

_ACTIVATIONS = {Activation.SILU: block_product.SILU, Activation.GELU_TANH: block_product.GELU_TANH}
_ALLOWED_ERROR = 1e-5
"""Maximum error of float32 sums, as a share of the largest result."""


class CpuBfloat16Products:
    """Implements `layers.bfloat16.Bfloat16Products`, for use by one thread at a time. `vectors`: by default those of
    this processor. Raises as numba if it cannot compile the kernels."""

    def __init__(
        self, compiler: KernelCompiler, *, vectors: FloatVectors | None = None, threads: OwnThreads | None = None
    ) -> None:
        self.vectors = best_vectors() if vectors is None else vectors
        self._launcher = Launcher(build_bfloat16_product(compiler, self.vectors), block_product.FIELDS, threads)
        self._scratch = torch.empty(self._launcher.slots * scratch_floats(self.vectors))

    @property
    def least_outputs(self) -> int:
        return OUTPUTS

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Bfloat16Products`. Sums are in an order that depends only on the number of inputs."""
        return self._run(x, weight, bias, len(weight), 0)

    def multiply_gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
    ) -> torch.Tensor:
        return self._run(x, weight, bias, len(weight) // 2, _ACTIVATIONS[activation])

    def right(self) -> bool:
        """Whether products of 1 row and of 37 equal those in float64; if not, that is logged."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn((140, 150), generator=generator).bfloat16()
        bias = torch.randn(140, generator=generator)
        for rows in (1, 37):
            x = torch.randn((rows, 150), generator=generator)
            exact = functional.linear(x.double(), weight.double(), bias.double())
            gate, up = exact.chunk(2, dim=-1)
            for found, expected in (
                (self.multiply(x, weight, bias), exact),
                (self.multiply(x, weight, None), exact - bias.double()),
                (self.multiply_gated(x, weight, bias, Activation.SILU), functional.silu(gate) * up),
            ):
                if not bool((found.double() - expected).abs().max() <= _ALLOWED_ERROR * expected.abs().max()):
                    logger.warning(
                        "Matrices of bfloat16 are widened to float32: the kernel of their product computes wrong "
                        "results on this machine"
                    )
                    return False
        return True

    def _run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, activation: int
    ) -> torch.Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        output = torch.empty((rows, outputs), dtype=x.dtype)
        self._launcher(
            weight.numel() * rows,
            items_of(rows, outputs),
            x.data_ptr(),
            weight.data_ptr(),
            0,
            0 if bias is None else bias.data_ptr(),
            output.data_ptr(),
            self._scratch.data_ptr(),
            self._launcher.slots,
            rows,
            outputs,
            inputs,
            activation,
            outputs,
        )
        return output


def bfloat16_products(compiler: KernelCompiler, threads: OwnThreads | None) -> CpuBfloat16Products | None:
    """The products, compared with float64; None, with a log line, if they cannot be compiled or are wrong."""
    try:
        products = CpuBfloat16Products(compiler, threads=threads)
    except (NumbaError, OSError, RuntimeError) as error:  # LLVM fails with RuntimeError
        logger.info("Matrices of bfloat16 are widened to float32: numba cannot compile their product (%s)", error)
        return None
    return products if products.right() else None
