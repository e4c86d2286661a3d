"""Layers with experts on the device against the same layers on the host in float32, and whether the choices of other
tokens change a bit of a token's output; and torch's product of experts in float8 against float64. On a GPU with Triton,
kernels multiply the experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from gpu.bench import Bench, Row, Table
from gpu.checks import Comparison, short
from sglang_jax.architectures.kinds.experts import ClampedGate, ExpertsConfig, ExpertScores
from sglang_jax.architectures.parallelism import ONE_DEVICE
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.expert_products import SortedRows, float8_product_on, float8_works
from torch_backend.layers.experts import Experts
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.layers.shard import ModelShard
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import Operations
from torch_backend.parallel import SINGLE

_PADDING = 2
_SIZES = ((3, 0, 1, 12), (1, 0, 0, 0), (0, 300, 2, 700))
"""Rows of each expert."""

_SHARD = ModelShard(rank=0, over=ONE_DEVICE, vocabulary=range(1), vocabulary_rows=1)


def run(bench: Bench) -> Iterator[Table]:
    """One table, or two. Rows of sizes that are not a multiple of 8 cannot be copied in 16 bytes."""
    rows: list[Row] = []
    for dtype in bench.dtypes:
        for hidden, inner in ((64, 32), (64, 36)) if bench.small else ((2048, 768), (2880, 720), (512, 36)):
            for biases in (False, True):
                for tokens in (5,) if bench.small else (3, 64, 1000):
                    rows += _layer(bench, dtype, hidden, inner, tokens, biases=biases)
    yield Table(f"experts ({bench.kernels.name}) against float32", rows)
    if bench.on_gpu and bench.kernels.name == "triton" and float8_works(bench.device):
        yield Table("experts in float8 against float64", [row for sizes in _SIZES for row in float8_rows(bench, sizes)])


def float8_rows(bench: Bench, sizes: tuple[int, ...]) -> Iterator[Row]:
    """Errors for experts that have `sizes` rows."""
    for outputs, inputs in ((80, 208),) if bench.small else ((1536, 2048), (80, 208)):
        values = (100 * bench.normal(len(sizes), outputs, inputs)).to(torch.float8_e4m3fn)
        scales = (1.0 + torch.arange(values[..., 0].numel(), device=bench.device) % 7).view(len(sizes), outputs)
        x = bench.normal(sum(sizes), inputs, dtype=torch.bfloat16)
        of_experts = torch.tensor(sizes, dtype=torch.int32, device=bench.device)
        chosen = torch.arange(len(sizes), device=bench.device).repeat_interleave(of_experts.long())
        product = float8_product_on(bench.device)
        found = product(x, values, scales, SortedRows(chosen, of_experts))
        rounded = product.rounding.round(x)
        meant = rounded.values.double() * rounded.scales[:, None].double()
        matrices = values.double() * scales[..., None].double()
        parts = zip(meant.split(sizes), matrices, strict=True)
        expected = torch.cat([functional.linear(own, matrix) for own, matrix in parts])
        yield Comparison.of(found, expected, x.dtype).row("experts: float8", f"{sizes} x {inputs} x {outputs}")


def _layer(bench: Bench, dtype: torch.dtype, hidden: int, inner: int, tokens: int, *, biases: bool) -> Iterator[Row]:
    experts = 8 if bench.small else 32
    clamped = ClampedGate(alpha=1.702, limit=7.0) if biases else None
    scores = ExpertScores.CHOSEN_SOFTMAX if biases else ExpertScores.SOFTMAX
    config = ExpertsConfig(
        num_experts=experts,
        chosen=4,
        size=inner,
        scores=scores,
        clamped=clamped,
        bias=biases,
        router_bias=biases,
        renormalised=not biases,
        shared_size=0 if biases else inner,
        shared_gate=not biases,
    )
    own = _build(config, hidden, dtype, bench.kernels.operations)
    wide = _build(config, hidden, torch.float32, NativeOperations())
    for (name, weight), other in zip(own.named_parameters(), wide.parameters(), strict=True):
        values = bench.normal(*weight.shape, dtype=weight.dtype) / weight.shape[-1] ** 0.5
        _give(own, name, values)
        _give(wide, name, values.to("cpu", other.dtype))
    if bench.kernels.name == "triton":
        own.choose_product(bench.device)
    x = bench.normal(tokens, hidden, dtype=dtype)
    case = f"{short(dtype)} {tokens} x {hidden} x {inner}"
    found = own(x, _step(x), LayerMemory())
    expected = wide(x.to("cpu", torch.float32), _step(x.cpu()), LayerMemory())
    real = slice(0, tokens - _PADDING)
    what = "experts with biases" if biases else "experts and a shared one"
    yield Comparison.of(found[real].cpu(), expected[real], dtype).row(what, case)
    others = bench.normal(tokens, hidden, dtype=dtype)
    others[0] = x[0]
    again = own(others, _step(others), LayerMemory())
    yield {"what": f"{what}: beside other tokens", "case": case, "ok": torch.equal(found[0], again[0])}


def _build(config: ExpertsConfig, hidden: int, dtype: torch.dtype, operations: Operations) -> Experts:
    options = PartOptions(hidden_size=hidden, shard=_SHARD, dtype=dtype, operations=operations, parallel=SINGLE)
    return Experts(config, options)


def _give(layer: Experts, name: str, values: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(layer.get_submodule(path), last, torch.nn.Parameter(values, requires_grad=False))


def _step(x: torch.Tensor) -> LayerStep:
    """One sequence, followed by a padding one."""
    tokens = len(x)
    zeros = torch.zeros(tokens, dtype=torch.int32, device=x.device)
    lengths = [tokens - _PADDING, 0]
    batch = ForwardBatch(
        tokens=zeros,
        positions=zeros,
        write_slots=zeros.long(),
        page_table=zeros[:2, None],
        kv_lens=torch.tensor(lengths, dtype=torch.int32, device=x.device),
        query_starts=torch.tensor([0, lengths[0], tokens], dtype=torch.int32, device=x.device),
        num_decode=0,
    )
    return LayerStep(batch, None, None)
