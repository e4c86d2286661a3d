"""Triton attention in the interpreter, compared with numpy's results in float64."""

from __future__ import annotations

import helpers.triton_interpreter
import torch
from helpers.torch_attention_steps import Case, Step, make_step

from torch_backend.attention.triton import TritonAttention
from torch_backend.kernels.chip import Chip

assert helpers.triton_interpreter  # imported for its side effects

HOPPER, AMPERE = Chip(capability=90, processors=3), Chip(capability=80, processors=2)
"""Few processors, so that programs have more than one split each."""

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Fraction of a token's largest output. Narrow types round weights and outputs, by half of 2^-7 or 2^-10 at worst."""


def attend(step: Step, chip: Chip = HOPPER) -> torch.Tensor:
    return TritonAttention(chip).prepare(step.batch)(step.queries, step.kv, step.options)


def check(case: Case, chip: Chip = HOPPER, seed: int = 0) -> None:
    """Checks every token's output relative to its own size: one key too many or too few among some hundreds shows."""
    step = make_step(case, seed)
    output = attend(step, chip)
    assert output.shape == step.queries.shape
    assert output.dtype == step.queries.dtype
    assert output.is_contiguous()
    expected = torch.from_numpy(step.expected)
    errors = (output.double() - expected).abs().amax((1, 2))
    sizes = expected.abs().amax((1, 2))
    assert not errors.isnan().any()
    assert (errors <= TOLERANCE[case.dtype] * sizes).all(), f"errors up to {float((errors / sizes).nan_to_num().max())}"
