"""Mixtures of experts: a router, experts, and an optional shared expert."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.experts import ClampedGate, ExpertsConfig, ExpertScores
from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from torch_backend.elementwise import Apply, directly
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.expert_matrices import expert_matrices
from torch_backend.layers.expert_products import SortedRows
from torch_backend.layers.fixed_rows import FixedRows
from torch_backend.layers.linear import Linear
from torch_backend.layers.matrix_by_size import Product
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.layers.plain_products import FusedProduct, SortedChoices, fused_product_for
from torch_backend.layers.row_tiles import RowTiles
from torch_backend.rounded_rows import Rounding, Rows

_FIXED_TILE = 16
"""Rows of a tile if results must not depend on the number of rows."""

_LARGEST_TILE = 64
_DOUBLED = (2, 8)
"""Tiles with this many rows, from the first to the last, get twice as many, because half of the experts have more rows
than the average. 8 layers of 32 experts of 512 x 224 in float32, on 2 cores of an EPYC without AVX-512, then take 119
ms instead of 145 at 4 rows, and 120 instead of 129 at 8; at 16 they would take 149 instead of 145."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts that each token chose, int64 `[T, chosen]`, and the factors of their outputs, float32 `[T, chosen]`.
    Padding has the nonexistent expert `experts`, and scores of 0."""

    experts: torch.Tensor
    scores: torch.Tensor

    def among(self, own: range) -> ExpertChoice:
        """The choice among some adjacent experts, numbered from 0; others become padding."""
        numbers = self.experts - own.start
        others = (numbers < 0) | (numbers >= len(own))
        return ExpertChoice(numbers.masked_fill(others, len(own)), self.scores.masked_fill(others, 0.0))

    def unweighted(self) -> ExpertChoice:
        """The same choice with a score of 1 for each expert."""
        return ExpertChoice(self.experts, (self.scores != 0).float())

    def tokens_of(self, experts: int) -> torch.Tensor:
        """The number of tokens of each expert: int32 `[experts]`."""
        flat = self.experts.reshape(-1)
        sizes = torch.zeros(experts + 1, dtype=torch.int32, device=flat.device)
        return sizes.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:-1]


Multiply = Callable[[Rows, torch.Tensor, SortedRows], torch.Tensor]
"""Maps x `[T, hidden]` and the tokens of rows sorted by expert, int64 `[M]`, to outputs `[M, hidden]`, or fewer: the
last rows, padding, need none."""


class Experts(Loadable):
    """See `ExpertsConfig`. The router is float32. A rank has a shard of the columns of some experts, and computes their
    part of the outputs."""

    def __init__(self, config: ExpertsConfig, options: PartOptions) -> None:
        super().__init__()
        experts, hidden, dtype = config.num_experts, options.hidden_size, options.dtype
        width = config.latent or hidden
        shard = options.shard
        inner = len(shard.of_axis(Axis.EXPERT_INTERMEDIATE, config.size))
        self._own = own = shard.of_axis(Axis.EXPERTS, experts)
        self._parts = shard.over.parts(Axis.EXPERTS)
        self.config, self.dtype = config, dtype
        self.router = self.declare("router", (experts, hidden), torch.float32, Part.ROUTER)
        self.router_bias = self._bias("router_bias", (experts,), Part.ROUTER, wanted=config.router_bias)
        self.correction = self._bias("correction", (experts,), Part.ROUTER_CORRECTION, wanted=config.correction)
        parts = config.inner_parts
        self.gate_up = expert_matrices((len(own), len(parts) * inner, width), parts, options, bias=config.bias)
        # One rank has the bias: the sum over ranks adds it once.
        once = config.bias and shard.first_of_experts
        self.down = expert_matrices((len(own), width, inner), (Part.EXPERT_DOWN,), options, bias=once)
        self.shared = SharedExpert(config, options) if config.shared_size else None
        self.input = Linear(hidden, (width,), (Part.EXPERTS_INPUT,), options) if config.latent else None
        self.output = Linear(width, (hidden,), (Part.EXPERTS_OUTPUT,), options) if config.latent else None
        self._gated = _gate(config, options)
        self._each = options.each
        self._tile = _FIXED_TILE if options.fixed else None
        self._fixed_route: Product | None = None
        self._fused: FusedProduct | None = None

    def choose_product(self, device: torch.device) -> None:
        """Chooses the product of plain and widened matrices on a device, after matrices have chosen their own."""
        if not all(each.has_product for each in (self.gate_up, self.down)):
            activation = None if self.config.squared_relu else self.config.activation
            self._fused = fused_product_for(device, self.dtype, activation, self.config.clamped)

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """Router logits `[T, experts]` of float32 x."""
        if self._fixed_route is not None:
            return self._fixed_route(x)
        return functional.linear(x, self.router, self.router_bias)

    def fix_rows(self, fixed: FixedRows) -> None:
        """See `Linear.fix_rows`."""
        inputs = self.router.shape[1]
        route = partial(functional.linear, weight=self.router, bias=self.router_bias)
        self._fixed_route = fixed.in_tiles(route, inputs, torch.float32, (Experts, *self.router.shape))
        stacks = [each for each in (self.gate_up, self.down) if not each.any_rows]
        tiles = [
            fixed.in_tiles(each.of(0), each.shape[2], self.dtype, (Experts, *each.shape, self.dtype)) for each in stacks
        ]
        if any(isinstance(each, RowTiles) and each.sizes == (1,) for each in tiles):
            self._tile = 1

    def _bias(self, name: str, shape: tuple[int, ...], *parts: Part, wanted: bool) -> nn.Parameter | None:
        return self.declare(name, shape, torch.float32, *parts, kind=ParameterKind.BIAS) if wanted else None

    @property
    def rounding(self) -> None:
        """See `Reader`. The router reads plain numbers."""
        return None

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """See `LayerPart`. Padding chooses no expert."""
        assert isinstance(x, torch.Tensor), "the router reads plain numbers"
        logits = self._route(x.float())
        choice = choose_experts(self.config, logits, self.correction, step.padding, self._each)
        if memory.expert_tokens is not None:
            memory.expert_tokens.add_(choice.tokens_of(len(self.router)))
        inputs = x if self.input is None else self.input(x)
        if self.config.scores_of_inputs:
            inputs, choice = (inputs.float() * choice.scores).to(inputs.dtype), choice.unweighted()
        found = self._outputs(inputs, choice.among(self._own))
        if self.output is not None:
            # The projection of this rank's part: the sum over ranks follows.
            found = self.output(found.to(self.dtype)).float()
        if self.shared is not None:
            found = found + self.shared(x)
        return found.to(x.dtype)

    def _outputs(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """This rank's part of the outputs of the experts of `x [T, width]`: `[T, width]`, in float32 if others are
        added."""
        own = [each.has_product for each in (self.gate_up, self.down)]
        if self._fused is not None and not any(own):
            return self._fused_with_gate(x, choice, self._fused)
        if all(own) or self._fused is not None:
            rounding = self.gate_up.rounding
            # A token is rounded once for all of its experts.
            return self._sorted(x if rounding is None else rounding.round(x), choice, self._grouped)
        if x.device.type == "cpu":
            return self._sorted(x, choice, self._one_by_one)
        return self._by_all(x, choice)

    def _sorted(self, x: Rows, choice: ExpertChoice, multiply: Multiply) -> torch.Tensor:
        """Returns float32 `[T, hidden]`; `multiply` computes rows sorted by expert. Sums are in the order of
        `choice`."""
        tokens, chosen = choice.experts.shape
        experts, order = choice.experts.reshape(-1).sort(stable=True)
        of_experts = SortedRows(experts, choice.tokens_of(len(self._own)), self._parts)
        found = multiply(x, order // chosen, of_experts)
        outputs = found.new_empty((len(order), found.shape[1]))
        outputs[order[: len(found)]] = found
        scores = choice.scores[..., None]
        weighted = outputs.view(tokens, chosen, -1).float() * scores
        # Outputs of padding are undefined.
        return torch.where(scores != 0, weighted, 0.0).sum(1)

    def _fused_with_gate(self, x: torch.Tensor, choice: ExpertChoice, multiply: FusedProduct) -> torch.Tensor:
        """Returns `[T, hidden]`: float32 if the output of a shared expert is added."""
        experts, order = choice.experts.reshape(-1).sort(stable=True)
        rows = SortedRows(experts, choice.tokens_of(len(self._own)), self._parts)
        dtype = x.dtype if self.shared is None else torch.float32
        return multiply(x, self.gate_up.stack, self.down.stack, SortedChoices(rows, order, choice.scores), dtype)

    def _one_by_one(self, x: Rows, tokens: torch.Tensor, of_experts: SortedRows) -> torch.Tensor:
        """Computes the rows of one expert after the other, and none of padding: at once, if no row's product depends on
        their number. Otherwise in tiles with the same number of rows for any choice, so that each chosen expert is read
        once per tile. The last rows of a tile may belong to the next expert, whose own tile then overwrites them."""
        assert isinstance(x, torch.Tensor), "products one by one take plain numbers"
        sizes = of_experts.sizes.tolist()
        rows = sum(sizes)
        x = x[tokens[:rows]]
        any_rows = self.gate_up.any_rows and self.down.any_rows
        tile = 0 if any_rows else self._tile or _tile_of(of_experts.expected / len(self._own))
        x = functional.pad(x, (0, 0, 0, tile)) if tile else x
        outputs = x.new_empty((rows + tile, self.down.shape[1]))
        first = 0
        for expert, size in enumerate(sizes):
            if not size:
                continue
            gate_up, down = self.gate_up.of(expert), self.down.of(expert)
            for start in range(first, first + size, tile or size):
                some = slice(start, start + (tile or size))
                outputs[some] = down(self._gated(gate_up(x[some])))
            first += size
        return outputs[:rows]

    def _grouped(self, x: Rows, tokens: torch.Tensor, of_experts: SortedRows) -> torch.Tensor:
        """Computes all experts in two products, without reading on the host which rows each has."""
        rows = x[tokens] if isinstance(x, torch.Tensor) else x.take(tokens)
        inner = self._gated.rows_for(self.down.rounding, self.gate_up.multiply_sorted(rows, of_experts))
        return self.down.multiply_sorted(inner, of_experts)

    def _by_all(self, x: torch.Tensor, choice: ExpertChoice) -> torch.Tensor:
        """Computes every token with every expert, and gives those that it did not choose weight 0."""
        experts, tokens = len(self._own), len(x)
        gate_up = torch.einsum("th,eih->tei", x, self.gate_up.widened())
        if self.gate_up.bias is not None:
            gate_up = gate_up + self.gate_up.bias
        inner = self._gated(gate_up.view(tokens * experts, -1)).view(tokens, experts, -1)
        outputs = torch.einsum("tei,eoi->teo", inner, self.down.widened()).float()
        if self.down.bias is not None:
            outputs = outputs + self.down.bias
        scores = x.new_zeros((tokens, experts + 1), dtype=torch.float32)
        scores = scores.scatter(1, choice.experts, choice.scores)[:, :experts, None]
        return torch.where(scores != 0, outputs * scores, 0.0).sum(1)


class SharedExpert(Loadable):
    """A feed-forward layer for every token, as one of the experts, with a gate for its output if the config has one."""

    def __init__(self, config: ExpertsConfig, options: PartOptions) -> None:
        super().__init__()
        inner, hidden = len(options.shard.intermediate(config.shared_size)), options.hidden_size
        parts = config.shared_parts
        self.gate_up = Linear(hidden, (inner,) * len(parts), parts, options)
        self.down = Linear(inner, (hidden,), (Part.SHARED_DOWN,), options)
        self.router = None
        if config.shared_gate:
            self.router = self.declare("router", (1, hidden), torch.float32, Part.SHARED_ROUTER)
        self._gated = _gate(replace(config, clamped=None), options)
        self._fixed_route: Product | None = None
        self._each = options.each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of float32 `[T, hidden]`."""
        found: torch.Tensor = self.down(self._gated.rows_for(self.down.rounding, self.gate_up(x))).float()
        return found if self.router is None else found * self._each(torch.sigmoid, self._route(x.float()))

    def _route(self, x: torch.Tensor) -> torch.Tensor:
        """The logit `[T, 1]` of float32 x."""
        assert self.router is not None
        return functional.linear(x, self.router) if self._fixed_route is None else self._fixed_route(x)

    def fix_rows(self, fixed: FixedRows) -> None:
        """See `Linear.fix_rows`."""
        if self.router is not None:
            inputs = self.router.shape[1]
            route = partial(functional.linear, weight=self.router)
            self._fixed_route = fixed.in_tiles(route, inputs, torch.float32, (SharedExpert, inputs))


class _SquaredRelu:
    """`relu(up) ** 2` of `[T, columns]`."""

    def rows_for(self, rounding: Rounding | None, up: torch.Tensor) -> Rows:
        """The same as the matrices that read it want it."""
        found = self(up)
        return found if rounding is None else rounding.round(found)

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        return up.relu().square_()


class _Gated:
    """`activation(gate) * up` of `[T, 2 * columns]`, gate first: `[T, columns]`."""

    def __init__(self, activation: Activation, clamped: ClampedGate | None, options: PartOptions) -> None:
        operations, self._each = options.operations, options.each
        self._plain = {Activation.SILU: operations.silu_mul, Activation.GELU_TANH: operations.gelu_mul}[activation]
        self._clamped, self._activation = clamped, activation

    def rows_for(self, rounding: Rounding | None, gate_up: torch.Tensor) -> Rows:
        """The same as the matrices that read it want it."""
        if rounding is None or self._clamped is not None:
            return self(gate_up)
        return rounding.gated(gate_up, self._activation)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._clamped is None:
            return self._plain(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        limit = self._clamped.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * gate * self._each(torch.sigmoid, self._clamped.alpha * gate)).to(gate_up.dtype)


def _gate(config: ExpertsConfig, options: PartOptions) -> _Gated | _SquaredRelu:
    return _SquaredRelu() if config.squared_relu else _Gated(config.activation, config.clamped, options)


def _tile_of(rows: float) -> int:
    """Rows of a tile, a power of two, for the average rows of an expert."""
    tile = min(_LARGEST_TILE, 1 << max(math.ceil(math.log2(rows)), 0))
    return 2 * tile if _DOUBLED[0] <= tile <= _DOUBLED[1] else tile


def choose_experts(
    config: ExpertsConfig,
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    padding: torch.Tensor,
    apply: Apply = directly,
) -> ExpertChoice:
    """Chooses the experts of each token by the router's logits float32 `[T, experts]`. `correction`: float32
    `[experts]`, see `ExpertsConfig`; `padding`: bool `[T]`; `apply`: see `PartOptions`."""
    match config.scores:
        case ExpertScores.SOFTMAX:
            scores = logits.softmax(-1)
        case ExpertScores.SIGMOID:
            scores = apply(torch.sigmoid, logits)
        case ExpertScores.CHOSEN_SOFTMAX:
            scores = logits
    ranked = scores if correction is None else scores + correction
    if config.groups > 1:
        ranked = _in_best_groups(config, ranked)
    experts = _highest(ranked, config.chosen)
    chosen = scores.gather(1, experts)
    if config.scores is ExpertScores.CHOSEN_SOFTMAX:
        chosen = chosen.softmax(-1)
    if config.renormalised:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + config.added_to_sum)
    unused = padding[:, None]
    return ExpertChoice(
        experts.masked_fill(unused, config.num_experts), (chosen * config.scale).masked_fill(unused, 0.0)
    )


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the highest scores along the last axis, the first of equals, which `topk` does not guarantee."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(config: ExpertsConfig, ranked: torch.Tensor) -> torch.Tensor:
    """Sets the scores of experts outside of the best groups to -infinity."""
    by_group = ranked.view(len(ranked), config.groups, -1)
    best = by_group.topk(config.best_of_group, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, _highest(best, config.chosen_groups), True)
    return by_group.masked_fill(~allowed[..., None], -torch.inf).view(ranked.shape)
