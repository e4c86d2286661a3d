"""`Draw` by Triton kernels."""

from __future__ import annotations

import torch

from torch_backend.kernels.draw import draw, greedy
from torch_backend.sampler import DrawParameters


class TritonDraw:
    """Searches instead of sorts, and reads nothing on the host."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Draw.greedy`."""
        return greedy(logits)

    def draw(self, logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
        """See `Draw.draw`."""
        return draw(
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.seed,
            parameters.position,
        )
