"""Matrices kept in a checkpoint's quantised blocks, for CPU kernels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from numba.core.errors import NumbaError
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.encoding import AnyValues, Encoding, Stored
from sglang_jax.cpu_kernels import block_product
from sglang_jax.cpu_kernels.block_layout import EXACT, BlockForm, random_blocks, with_zeros
from sglang_jax.cpu_kernels.byte_units import UNITS
from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler
from sglang_jax.cpu_kernels.integer_layout import LevelKind, kind_of
from sglang_jax.cpu_kernels.integer_product import build_integer_product
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads

logger = logging.getLogger(__name__)

_ACTIVATIONS = {Activation.SILU: block_product.SILU, Activation.GELU_TANH: block_product.GELU_TANH}


class BlockProducts:
    """The products of all matrices in blocks, each compiled at first use; to be used by one thread at a time.

    `unit`: an index of `byte_units.UNITS`: rows are rounded to int8 and multiplied by its instructions; None: rows are
    multiplied as they are. `dtype`: of rows and results; with None as `unit`, bfloat16."""

    def __init__(
        self,
        compiler: KernelCompiler,
        *,
        unit: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        threads: OwnThreads | None = None,
    ) -> None:
        self.compiler, self._threads = compiler, threads
        self.unit, self.dtype = unit, dtype
        self.form = EXACT if unit is None else UNITS[unit].form
        self._launchers: dict[tuple[Encoding, bool], Launcher] = {}
        self._scratch = torch.empty(0)
        self._found: dict[tuple[Encoding, bool], bool] = {}

    def work(self, encoding: Encoding, *, gated: bool) -> bool:
        """Whether products of an encoding, or gated ones, compile here and are correct: tested once; a failure is
        logged."""
        key = encoding, gated
        if not self.form.serves(encoding.values):
            return False
        if key not in self._found:
            if self.unit is not None and not self._found:
                logger.info("Matrices in blocks multiply activations rounded to int8, with %s", UNITS[self.unit].name)
            try:
                self._found[key] = self._right(encoding, gated)
            except (NumbaError, OSError, RuntimeError) as error:  # LLVM fails with RuntimeError
                logger.info(
                    "%s matrices are dequantised: numba cannot compile their product (%s)", encoding.values.value, error
                )
                self._found[key] = False
        return self._found[key]

    def _right(self, encoding: Encoding, gated: bool) -> bool:
        """Whether products of 1 row and of 17 equal those of the widened matrix in float64, rounded."""
        blocks = random_blocks(encoding, outputs=256, inputs=96)
        inputs = blocks.shape[1]
        weights = torch.from_numpy(blocks.widened())
        # Integers are multiplied without rounding the weights before.
        weights = weights.bfloat16().double() if self.unit is None else weights.double()
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(256, generator=generator).to(self.dtype)
        matrix = self.matrix(blocks, bias)
        for rows in (1, 17):
            x = torch.randn((rows, inputs), generator=generator).to(self.dtype)
            rounded = torch.from_numpy(self.form.rounded(x.float().numpy())).double()
            exact = functional.linear(rounded, weights, bias.double())
            found = matrix.multiply(x)
            if gated:
                found, (gate, up) = matrix.multiply_gated(x, Activation.SILU), exact.chunk(2, dim=-1)
                exact = functional.silu(gate).to(self.dtype).double() * up
            # At least the errors of float32 sums.
            allowed = max(2 * torch.finfo(self.dtype).eps, 1e-5) * (1 + exact.abs().max())
            if not bool((found.double() - exact).abs().max() <= allowed):
                logger.warning(
                    "%s matrices are dequantised: the kernel of their product computes wrong results on this machine",
                    encoding.values.value,
                )
                return False
        return True

    @property
    def outputs_together(self) -> int:
        """Outputs that are computed together; other rows would be zeros."""
        return self.form.outputs

    @property
    def serves_all_rows(self) -> bool:
        """Whether products are fast for many rows too, so that a matrix needs no other form."""
        return self.unit is not None

    def matrix(self, blocks: Stored, bias: torch.Tensor | None) -> BlockMatrix:
        """Creates a matrix. Half of its outputs are a multiple of `outputs_together` for a gated product."""
        self._reserve(blocks.shape[1])
        return BlockMatrix(self, blocks, bias)

    def run(
        self, matrix: BlockMatrix, x: torch.Tensor, activation: Activation | None, output: torch.Tensor, outputs: int
    ) -> torch.Tensor:
        """Writes `outputs` numbers to each row of `output`, which is contiguous or some columns of a matrix that is."""
        rows = len(x)
        launcher = matrix.launcher if activation is None else matrix.gated_launcher
        launcher(
            matrix.num_levels * rows,
            self.form.items(rows, outputs),
            x.data_ptr(),
            *matrix.addresses,
            output.data_ptr(),
            self._scratch.data_ptr(),
            launcher.slots,
            rows,
            outputs,
            matrix.inputs,
            0 if activation is None else _ACTIVATIONS[activation],
            output.stride(0),
        )
        return output

    def launcher(self, encoding: Encoding, *, gated: bool) -> Launcher:
        key = encoding, gated
        if key not in self._launchers:
            kernel = self._kernel(encoding.values, gated)
            self._launchers[key] = Launcher(kernel, block_product.FIELDS, self._threads)
        return self._launchers[key]

    def _kernel(self, values: AnyValues, gated: bool) -> CompiledKernel:
        if self.unit is None:
            return block_product.build_block_product(self.compiler, kind_of(values).bits, gated)
        size = self.dtype.itemsize
        return build_integer_product(self.compiler, self.unit, kind_of(values), gated, width=size, output_width=size)

    def _reserve(self, inputs: int) -> None:
        """Allocates scratch for every thread to multiply by a matrix with this many inputs."""
        slots = torch.get_num_threads() if self._threads is None else self._threads.size
        needed = slots * self.form.scratch_floats(inputs)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed)


class BlockMatrix:
    """A matrix `[outputs, inputs]` of quantised values, with the bias of its product. Weights are rounded to bfloat16
    in registers, to the same bits as in the widened matrix, or rows to int8; sums are float32, in an order that does
    not depend on the number of rows."""

    def __init__(self, products: BlockProducts, blocks: Stored, bias: torch.Tensor | None) -> None:
        self.encoding = blocks.encoding
        self.outputs, self.inputs = blocks.shape
        missing = -self.outputs % products.form.outputs
        packed = products.form.pack(blocks.of_rows(functools.partial(with_zeros, missing)))
        self.bias = None if bias is None else functional.pad(bias, (0, missing))
        self.columns = self.outputs + missing
        """Outputs that a product writes: those behind `outputs` are zeros."""
        self.levels, self.scales = torch.from_numpy(packed.levels), torch.from_numpy(packed.scales)
        self.num_levels = self.levels.numel()
        self.addresses = (
            self.levels.data_ptr(),
            self.scales.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
        )
        """Of quantised values, scales and bias."""
        self._products = products

    @functools.cached_property
    def launcher(self) -> Launcher:
        return self._products.launcher(self.encoding, gated=False)

    @functools.cached_property
    def gated_launcher(self) -> Launcher:
        return self._products.launcher(self.encoding, gated=True)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        output = torch.empty((len(x), self.columns), dtype=x.dtype)
        self.multiply_into(x, output)
        return output[:, : self.outputs] if self.columns > self.outputs else output

    def multiply_into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """See `BlockedMatrix`."""
        self._products.run(self, x.contiguous(), None, output, self.columns)

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """For a matrix of gate and up, in this order: `activation(gate(x)) * up(x)`, `[T, outputs / 2]`."""
        output = torch.empty((len(x), self.outputs // 2), dtype=x.dtype)
        return self._products.run(self, x.contiguous(), activation, output, self.outputs // 2)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Dequantised rows `[T]` of a matrix in a layout of integers, `[T, inputs]` in the dtype of products."""
        form, kind = self._products.form, kind_of(self.encoding.values)
        tile, lane = numbers // form.outputs, numbers % form.outputs
        scale, *offset = self._numbers(tile, lane, kind, form)
        values = self._levels(tile, lane, kind, form).reshape(*scale.shape, -1) * scale[..., None]
        if offset:
            values = values + offset[0][..., None]
        return values.flatten(1).to(self._products.dtype)

    def _levels(self, tile: torch.Tensor, lane: torch.Tensor, kind: LevelKind, form: BlockForm) -> torch.Tensor:
        """Levels without their zeros, float32 `[T, blocks, 8, 4]`."""
        levels = self.levels[tile, :, :, lane]
        if kind.bits == 8:
            return levels.float() - form.zero if form.zero else levels.view(torch.int8).float()
        low, upper = levels[:, :, :4], levels[:, :, 4:]
        values = torch.stack((low & 15, low >> 4), dim=3).flatten(2, 3)
        if kind.bits > 4:
            shifts = torch.arange(0, 8, kind.bits - 4, dtype=torch.uint8)[:, None]
            bits = upper[:, :, :, None] >> shifts & (1 << (kind.bits - 4)) - 1
            values = values | bits.flatten(2, 3) << 4
        if kind.table:
            values = torch.tensor(kind.table, dtype=torch.uint8)[values.long()]
        return values.float() - kind.zero

    def _numbers(
        self, tile: torch.Tensor, lane: torch.Tensor, kind: LevelKind, form: BlockForm
    ) -> Sequence[torch.Tensor]:
        """Scales, and offsets if there are any, each float32 `[T, groups]`."""
        if not kind.factors:
            return self.scales[tile, :, :, lane].float().unbind(2)
        found, size = self.scales[tile], 2 * kind.numbers * form.outputs
        shape = (*found.shape[:2], -1, kind.numbers, form.outputs)
        factors = found[:, :, :size].contiguous().view(torch.float16).reshape(shape)
        numbers = found[:, :, size:].contiguous().view(torch.int8).reshape(shape)
        at = torch.arange(len(tile))
        own = numbers[at, :, :, :, lane].float() * factors[at, :, :, :, lane].float()
        return own.flatten(1, 2).unbind(2)
