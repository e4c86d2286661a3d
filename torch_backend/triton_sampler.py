"""`TokenSampler` with Triton kernels."""

from __future__ import annotations

import torch

from torch_backend.kernels.sample import greedy, sample
from torch_backend.sampler import SamplerInputs


class TritonSampler:
    """`TokenSampler` with Triton kernels. Filters by searching instead of sorting, and reads nothing on the host."""

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return greedy(logits)

    def sample(self, logits: torch.Tensor, parameters: SamplerInputs) -> torch.Tensor:
        return sample(
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.seed,
            parameters.position,
            parameters.cut,
        )
