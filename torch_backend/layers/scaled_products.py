"""Products with matrices of 8 bits that have a scale of each row."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType

from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType

logger = logging.getLogger(__name__)

ScaledProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`x [T, inputs]`, values `[outputs, inputs]` and float32 scales `[outputs]` → `[T, outputs]`."""

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_CAPABILITY = (8, 9)
"""Of a GPU that multiplies float8: Ada's."""

_MULTIPLE = 16
"""Of both sides of a matrix that such products take."""


def multiply_widened(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values are widened to the type of x, which has them exactly. float16 has no room for sums of them: there weights
    are scaled and rounded first."""
    if x.dtype == torch.float16:
        return functional.linear(x, (values.float() * scales[:, None]).to(x.dtype))
    return functional.linear(x, values.to(x.dtype)) * scales


def multiply_float8(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 `x` is rounded to float8 first, by a scale of each token."""
    rounded, of_tokens = _rounded(x)
    return functional.scaled_mm(
        rounded,
        values.t(),
        scale_a=of_tokens,
        scale_recipe_a=ScalingType.RowWise,
        scale_b=scales[None],
        scale_recipe_b=ScalingType.RowWise,
        output_dtype=x.dtype,
    )


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 `[T, inputs]`, and float32 scales `[T, 1]`: the largest number of each token over float8's largest."""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def product_for(encoding: Encoding, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> ScaledProduct:
    """The quickest product of a matrix on a device: of float8 where the checkpoint lets inputs be rounded to it and
    the GPU multiplies it; else values are widened."""
    wanted = encoding.values is ValueType.FLOAT8_E4M3 and encoding.activations is not ActivationScales.NONE
    fits = dtype == torch.bfloat16 and all(side % _MULTIPLE == 0 for side in shape)
    if wanted and fits and device.type == "cuda" and float8_works(device):
        return multiply_float8
    if device.type == "cuda":
        _tell_of_widening(encoding.values, dtype)
    return multiply_widened


@functools.cache
def _tell_of_widening(values: ValueType, dtype: torch.dtype) -> None:
    logger.info("Matrices of %s are widened to %s in each product", values.value, str(dtype).removeprefix("torch."))


@functools.cache
def float8_works(device: torch.device) -> bool:
    """Whether a GPU multiplies float8 rightly, with a scale of each row on both sides: tried on a small product, and
    said in the log if not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((17, 64), generator=generator).to(torch.bfloat16)
    values = (8 * torch.randn((48, 64), generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand(48, generator=generator)
    rounded, of_tokens = _rounded(x)
    exact = functional.linear(rounded.double() * of_tokens, values.double() * scales[:, None].double())
    try:
        found = multiply_float8(x.to(device), values.to(device), scales.to(device)).cpu()
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("Matrices of float8 are widened: torch %s cannot multiply them (%s)", torch.__version__, error)
        return False
    if not bool((found.double() - exact).abs().max() <= 0.01 * exact.abs().max()):
        logger.warning("Matrices of float8 are widened: torch %s computes wrong products", torch.__version__)
        return False
    return True
