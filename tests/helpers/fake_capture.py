"""CUDA-graph capture without CUDA: a function's operations are traced once, and a replay repeats exactly these.

As in a CUDA graph, tensors that the function reads from outside stay the same memory, whose current contents a replay
reads, and every number that the host knew while capturing is a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_backend.graphs import Replay


class FakeCapture:
    """`Capture` by tracing the function's ATen operations. `replays` counts."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, function: Callable[[], torch.Tensor]) -> Replay:
        # The trace runs the operations as well, as the first run of a CUDA capture does.
        graph = make_fx(function, tracing_mode="real")()

        def replay() -> torch.Tensor:
            self.replays += 1
            result: torch.Tensor = graph()
            return result

        return replay

    def memory(self) -> int:
        return 0
