"""A rank on a CPU computes the rows of its own experts, and touches no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.parallelism import Parallelism
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.experts import ExpertChoice, Experts, choose_experts
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.layers.shard import ModelShard
from torch_backend.native_operations import NativeOperations
from torch_backend.parallel import SINGLE

HIDDEN, EXPERTS, INNER, CHOSEN, PARTS, TILE = 24, 8, 16, 3, 4, 16
CONFIG = ExpertsConfig(num_experts=EXPERTS, chosen=CHOSEN, size=INNER, bias=True)


class MovedRows(TorchDispatchMode):
    """Counts the rows that are gathered and scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered, self.scattered = 0, 0

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.index.Tensor and found.shape[-1] == HIDDEN:
            self.gathered += len(found)
        if function is torch.ops.aten.index_put_.default:
            self.scattered += args[2].numel() // HIDDEN
        return found


def rank_with_weights(rank: int) -> Experts:
    shard = ModelShard(rank=rank, over=Parallelism(PARTS, PARTS), vocabulary=range(1), vocabulary_rows=1)
    options = PartOptions(
        hidden_size=HIDDEN,
        shard=shard,
        dtype=torch.float32,
        operations=NativeOperations(),
        parallel=SINGLE,
        fixed=True,
    )
    layer = Experts(CONFIG, options)
    for name, declared in list(layer.named_parameters()):
        # All ranks have the same router.
        random = torch.Generator().manual_seed(PARTS if name == "router" else rank)
        values = torch.randn(declared.shape, generator=random)
        module, _, own = name.rpartition(".")
        setattr(layer.get_submodule(module), own, torch.nn.Parameter(values, requires_grad=False))
    return layer


def row_by_row(layer: Experts, x: torch.Tensor, choice: ExpertChoice, own: range) -> torch.Tensor:
    """Every token with each of its experts that the rank has, in a separate tile."""
    sums = torch.zeros_like(x)
    for token, (experts, scores) in enumerate(zip(choice.experts.tolist(), choice.scores, strict=True)):
        for expert, score in zip(experts, scores, strict=True):
            if expert in own:
                tile = torch.cat([x[token, None], torch.zeros(TILE - 1, HIDDEN)])
                gate, up = layer.gate_up.of(expert - own.start)(tile).chunk(2, dim=-1)
                sums[token] += layer.down.of(expert - own.start)(functional.silu(gate) * up)[0] * score
    return sums


@pytest.mark.parametrize(("tokens", "padding"), [(1, 0), (7, 2), (40, 5)])
@torch.inference_mode()
def test_only_rows_of_own_experts_are_moved(tokens: int, padding: int) -> None:
    """Four ranks have two experts each. Results are the bits of each row in a separate tile."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    real = tokens - padding
    zeros = torch.zeros(tokens, dtype=torch.int32)
    batch = ForwardBatch(
        tokens=zeros,
        positions=zeros,
        write_slots=zeros.long(),
        page_table=torch.zeros((2, 1), dtype=torch.int32),
        kv_lens=torch.tensor([real, 0], dtype=torch.int32),
        query_starts=torch.tensor([0, real, tokens], dtype=torch.int32),
        num_decode=0,
    )
    step, everyones = LayerStep(batch, None, None), 0
    for rank in range(PARTS):
        layer, own = rank_with_weights(rank), range(2 * rank, 2 * rank + 2)
        choice = choose_experts(CONFIG, functional.linear(x, layer.router), None, step.padding)
        with MovedRows() as moved:
            found = layer(x, step, LayerMemory())
        rows = int(sum((choice.experts == expert).sum() for expert in own))
        assert (moved.gathered, moved.scattered) == (rows, rows)
        everyones += rows
        assert torch.equal(found, row_by_row(layer, x, choice, own))
    assert everyones == real * CHOSEN
