"""Products with 8-bit matrices that have a scale per row. Some want inputs of 8 bits, and say how these are rounded, so
that the operation before a product can do it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from torch_backend.rounded_rows import RoundedRows, Rounding, Rows

logger = logging.getLogger(__name__)

VALUE_TYPES = {ValueType.INT8: torch.int8, ValueType.FLOAT8_E4M3: torch.float8_e4m3fn}
"""Dtypes of matrices with a scale per row."""

ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`x [T, inputs]`, values `[outputs, inputs]`, float32 scales `[outputs]` and a bias `[outputs]` → `[T, outputs]`, in
the dtype of x."""

PlainProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The same without scales, for values of the dtype of x."""

FixedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""Either, without scales for values of the dtype of x."""


@dataclass(frozen=True, slots=True)
class RoundedProduct:
    """A product of rows that are rounded by `rounding`; plain numbers are rounded first."""

    rounding: Rounding
    multiply: Callable[[RoundedRows, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

    def __call__(
        self, x: Rows, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `ScaledProduct`."""
        rounded = x if isinstance(x, RoundedRows) else self.rounding.round(x)
        return self.multiply(rounded, values, scales, bias)


_MIN_CAPABILITY = (8, 9)
"""Minimum capability of a GPU that multiplies float8: Ada."""

_CAPABILITY_WITHOUT_INTEGERS = (10, 0)
"""The first GPUs whose matrix units have no int8, or so few that products with widened values are faster."""

_MULTIPLE, _MULTIPLE_OF_INTEGERS = 16, 8
"""Divisors of both sides of a matrix for torch's products of float8 and of int8."""

ROWS_TRIED = (3, 30, 64, 70)
"""Numbers of rows to try: one for each configuration of the kernels, and one for torch's int8 product."""


def multiply_widened(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies after widening values to the dtype of x, which is exact. float16 would overflow for sums of unscaled
    values, so weights are scaled and rounded first."""
    if x.dtype == torch.float16:
        return functional.linear(x, (values.float() * scales[:, None]).to(x.dtype), bias)
    product = functional.linear(x, values.to(x.dtype)) * scales
    return (product if bias is None else product + bias).to(x.dtype)


def multiply_float8(
    x: RoundedRows, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies bfloat16 rows that were rounded to float8."""
    product = functional.scaled_mm(
        x.values,
        values.t(),
        scale_a=x.scales[:, None],
        scale_recipe_a=ScalingType.RowWise,
        scale_b=scales[None],
        scale_recipe_b=ScalingType.RowWise,
        output_dtype=x.dtype,
    )
    return product if bias is None else product + bias


def product_for(
    encoding: Encoding, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> ScaledProduct | RoundedProduct:
    """Chooses the fastest product of a matrix on a device, and logs it. On a GPU: 8 bits with 8 bits if checkpoint and
    GPU allow; else a kernel that widens values in registers. On a CPU, and for float32, values are widened."""
    if device.type == "cuda" and dtype != torch.float32:
        rounds = encoding.activations is not ActivationScales.NONE
        if rounds and encoding.values is ValueType.FLOAT8_E4M3:
            fits = dtype == torch.bfloat16 and all(side % _MULTIPLE == 0 for side in shape)
            if fits and float8_works(device):
                _log_product(encoding.values, "as float8, by torch's scaled_mm; inputs are rounded to float8")
                return float8_product_on(device)
        elif rounds and all(side % _MULTIPLE_OF_INTEGERS == 0 for side in shape) and integers_work(device, dtype):
            _log_product(encoding.values, "as int8, by a kernel or torch's _int_mm; inputs are rounded to int8")
            return integer_product_on(device)
        if kernel_works(device, VALUE_TYPES[encoding.value_type], dtype):
            _log_product(encoding.values, "by a kernel that widens them in registers")
            return kernel_product_on(device)
    _log_product(encoding.values, f"after they are widened to {str(dtype).removeprefix('torch.')}, in each product")
    return multiply_widened


def fixed_product_for(
    encoding: Encoding, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> ScaledProduct | RoundedProduct:
    """As `product_for` on a GPU, but a row's result does not depend on the number of rows: exact products of integers,
    or a kernel with one tile that widens values."""
    rounds = encoding.activations is not ActivationScales.NONE and encoding.values is ValueType.INT8
    fits = all(side % _MULTIPLE_OF_INTEGERS == 0 for side in shape)
    if dtype != torch.float32 and rounds and fits and integers_work(device, dtype):
        return integer_product_on(device)
    return fixed_scaled_product(device)


def fixed_scaled_product(device: torch.device) -> FixedProduct:
    """The product of a Triton kernel with one tile for any number of rows."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.scaled_product import fixed_product

    chip = Chip.of(device)

    def multiply(
        x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return fixed_product(x.contiguous(), values, scales, bias, chip)

    return multiply


def fixed_plain_product(device: torch.device) -> PlainProduct:
    """`fixed_scaled_product` for plain values."""
    multiply = fixed_scaled_product(device)
    return lambda x, weight, bias: multiply(x, weight, None, bias)


@functools.cache
def _log_product(values: ValueType, how: str) -> None:
    logger.info("Matrices of %s are multiplied %s", values.value, how)


def kernel_product_on(device: torch.device) -> ScaledProduct:
    """The product by a Triton kernel; for many rows, by widened values."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.scaled_product import max_rows, scaled_product

    chip = Chip.of(device)

    def multiply(
        x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if len(x) > max_rows(values.dtype, chip):
            return multiply_widened(x, values, scales, bias)
        return scaled_product(x.contiguous(), values, scales, bias, chip)

    return multiply


def float8_product_on(device: torch.device) -> RoundedProduct:
    """The product of float8 with inputs rounded to float8, with a scale per token."""
    return RoundedProduct(float8_rounding_on(device), multiply_float8)


def integer_product_on(device: torch.device) -> RoundedProduct:
    """The product of int8 with inputs rounded to int8, with a scale per token."""
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.integer_product import integer_product

    chip = Chip.of(device)

    def multiply(
        x: RoundedRows, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return integer_product(x, values, scales, bias, chip)

    return RoundedProduct(_rounding_on(device, torch.int8), multiply)


def float8_rounding_on(device: torch.device) -> Rounding:
    """Rounds rows to float8, by Triton's kernels."""
    return _rounding_on(device, torch.float8_e4m3fn)


def _rounding_on(device: torch.device, values: torch.dtype) -> Rounding:
    # Imported here, because a machine without a GPU needs no Triton.
    from torch_backend.kernels.chip import Chip
    from torch_backend.kernels.operations import TritonRounding

    return TritonRounding(values, Chip.of(device).dependent_launches)


@functools.cache
def kernel_works(device: torch.device, values: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether the kernel's results on a GPU are correct: tested on small products; a failure is logged."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(ROWS_TRIED), 1200), generator=generator).to(dtype)
    stored = (30 * torch.randn((72, 1200), generator=generator)).clamp(-127, 127).to(values)
    return _works(kernel_product_on, device, x, x.double(), stored, f"Triton's kernel for matrices of {values}")


@functools.cache
def integers_work(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU's products of int8 with int8 are correct: tested on small products against integers; a failure is
    logged. Not used on Blackwell, whose matrix units lack them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY_WITHOUT_INTEGERS:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(ROWS_TRIED), 1200), generator=generator).to(dtype)
    stored = torch.randint(-127, 128, (72, 1200), generator=generator).to(torch.int8)
    of_tokens = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / of_tokens).round().double() * of_tokens.double()
    return _works(integer_product_on, device, x, rounded, stored, "The product of int8 with int8")


def _works(
    product_on: Callable[[torch.device], ScaledProduct | RoundedProduct],
    device: torch.device,
    x: torch.Tensor,
    meant: torch.Tensor,
    stored: torch.Tensor,
    what: str,
) -> bool:
    """Whether the product of some rows of x is near that of the float64 values `meant`."""
    scales = torch.linspace(0.1, 1.0, len(stored))
    exact = functional.linear(meant, stored.double() * scales[:, None].double())

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return product_on(device)(rows.to(device), stored.to(device), scales.to(device), None).cpu()

    return runs_right(multiply, x, exact, what)


def runs_right(
    multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, exact: torch.Tensor, what: str
) -> bool:
    """Whether a product of the first rows of x is near `exact`, for several numbers of rows; a failure is logged."""
    # Imported here, because a machine without a GPU needs no Triton.
    from triton.errors import TritonError

    try:
        found = [multiply(x[:rows]) for rows in ROWS_TRIED]
    except (TritonError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("%s does not run with torch %s: %s", what, torch.__version__, error)
        return False
    if not all(_near(product, exact[: len(product)]) for product in found):
        logger.warning("%s is wrong with torch %s", what, torch.__version__)
        return False
    return True


def _near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact).abs().max() <= 0.01 * exact.abs().max())


@functools.cache
def float8_works(device: torch.device) -> bool:
    """Whether a GPU's products of float8 with float8 are correct: tested on small products; a failure is logged."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(ROWS_TRIED), 1200), generator=generator).to(torch.bfloat16)
    stored = (30 * torch.randn((80, 1200), generator=generator)).to(torch.float8_e4m3fn)
    of_tokens = x.float().abs().amax(-1, keepdim=True) / torch.finfo(stored.dtype).max
    rounded = (x.float() / of_tokens).to(stored.dtype).double() * of_tokens.double()
    return _works(float8_product_on, device, x, rounded, stored, "The product of float8 with float8")
