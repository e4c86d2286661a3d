"""Grouped-query attention over cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import HIDDEN, CachedArray, Declared, HeadOrder, linear, side_by_side
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.kinds.sections import can_share
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.errors import ConfigError

_HEADS, _KV_HEADS = (Axis.HEADS, Axis.HEAD_DIM), (Axis.KV_HEADS, Axis.HEAD_DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """Norms of queries and keys before the rotation.

    - `whole`: over all heads together (OLMo-2); otherwise over each head (Qwen3), with one weight for all.
    - `weight`: False for norms without weights (Llama 4).
    """

    norm: NormConfig
    whole: bool = False
    weight: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query self-attention.

    - `head_dim` may differ from hidden size / heads; all three numbers may differ between layers.
    - `scale` multiplies scores; `soft_cap` makes them `soft_cap * tanh(score / soft_cap)`.
    - `rope`: None for a layer without positions.
    - `interleaved_rope`: the checkpoint's rotary pairs are adjacent; rows are rearranged into halves when loaded.
    - `window`: maximum keys that a query attends to, its own included; None for all.
    - `causal`: a query attends to keys up to its own. Otherwise it attends to all keys of its text, which is computed
      in one step; `window` is then None.
    - `sinks`: each head has a learnt score that is added to the softmax's denominator, without a value.
    - `value_norm`: each head's value is divided by its root mean square; the norm has no weight.
    - `output_gate`: each head's output is multiplied by the sigmoid of a projection of the input; in a checkpoint,
      its rows follow those of the head's query.
    - `input_multiplier`, `key_multiplier`, `output_multiplier`: multipliers of the input, of keys, and of the output.
    - `values_are_keys`: values have no separate projection; they are the keys before norm and rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    interleaved_rope: bool = False
    window: int | None = None
    causal: bool = True
    soft_cap: float | None = None
    sinks: bool = False
    qk_norm: QKNorm | None = None
    value_norm: NormConfig | None = None
    values_are_keys: bool = False
    output_gate: bool = False
    bias: bool = False
    out_bias: bool = False
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head for which tables of rotations are made."""
        return self.head_dim

    @property
    def products_per_key(self) -> int:
        """Multiply-adds of all heads for each pair of a query and a key, for scores and values."""
        return 2 * self.num_heads * self.head_dim

    @property
    def cached(self) -> tuple[CachedArray, ...]:
        """The arrays that are cached of each token: keys and values."""
        return tuple(CachedArray(name, self.num_kv_heads, self.head_dim) for name in ("keys", "values"))

    def parameters(self, hidden: int) -> Iterator[Declared]:
        queries, keys = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        order, scale = self._order(), self.input_multiplier
        of_query, of_gate = side_by_side(self.head_dim, self.head_dim)
        of_queries = (queries, (hidden,)), (_HEADS, HIDDEN), self.bias
        for parameter in linear(Part.QUERY, *of_queries, order=order, input_scale=scale):
            yield replace(parameter, fused_heads=of_query if self.output_gate else None)
        if self.output_gate:
            gate = linear(Part.OUTPUT_GATE, *of_queries, stored_as=Part.QUERY, input_scale=scale)
            yield from (replace(each, fused_heads=of_gate) for each in gate)
        of_keys = (keys, (hidden,)), (_KV_HEADS, HIDDEN), self.bias
        yield from linear(Part.KEY, *of_keys, order=order, input_scale=scale, output_scale=self.key_multiplier)
        stored_as = Part.KEY if self.values_are_keys else None
        yield from linear(Part.VALUE, *of_keys, stored_as=stored_as, input_scale=scale)
        outputs = ((hidden,), queries), (HIDDEN, _HEADS), self.out_bias
        yield from linear(Part.OUTPUT, *outputs, output_scale=self.output_multiplier)
        if self.qk_norm is not None and self.qk_norm.weight:
            first, offset = 0 if self.qk_norm.whole else 1, self.qk_norm.norm.offset
            for part, sizes, axes in ((Part.QUERY_NORM, queries, _HEADS), (Part.KEY_NORM, keys, _KV_HEADS)):
                norm = Declared(part, ParameterKind.WEIGHT, (axes[first:],), (sizes[first:],), offset)
                yield replace(norm, interleaved=order.interleaved, rotated_rows=order.rotated_rows)
        if self.sinks:
            yield Declared(Part.SINKS, ParameterKind.WEIGHT, ((Axis.HEADS,),), ((self.num_heads,),))

    def optional(self) -> Iterator[Declared]:
        """Optional parameters, for 8-bit caches: scales of keys and of values, and means of keys."""
        axes, sizes = ((Axis.KV_HEADS,), (Axis.HEAD_DIM,)), ((self.num_kv_heads,), (self.head_dim,))
        for part in (Part.KEY, Part.VALUE):
            yield Declared(part, ParameterKind.SCALE, axes[:1], sizes[:1], default=1.0)
        yield Declared(Part.KEY, ParameterKind.MEAN, axes, sizes, default=0.0)

    def _order(self) -> HeadOrder:
        rope = self.rope
        rotated_rows = 0 if rope is None or rope.partial_rotary_factor == 1.0 else rope.rotated_numbers(self.head_dim)
        return HeadOrder(self.interleaved_rope, rotated_rows)

    def sharded(self, over: Parallelism) -> AttentionConfig:
        """See `LayerPart`. With fewer kv heads than devices, kv heads are replicated on adjacent devices; each copy
        serves the query heads of its device."""
        size = over.devices
        if self.num_heads % size or not can_share(self.num_kv_heads, size):
            raise ConfigError(
                f"{self.num_heads} heads and {self.num_kv_heads} kv heads cannot be spread over {size} devices: choose "
                "a tp_size that divides the heads, and that divides or is a multiple of the kv heads"
            )
        return replace(self, num_kv_heads=self.num_kv_heads * max(size // self.num_kv_heads, 1))
