"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_jax.architectures.kinds.attention import AttentionConfig, QKNorm
from sglang_jax.architectures.tensor_names import Part
from torch_backend.attention.interface import AttentionOptions
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.linear import Linear
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.native_operations import divide_by_rms, normalise
from torch_backend.operations import HeadNorms
from torch_backend.rounded_rows import Rounding, Rows, rounding_for


class Attention(Loadable):
    """Projections, optional norms of queries, keys and values, rotation, cache write, attention, output projection. The
    fused projection returns all queries, all keys, all values."""

    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None

    def __init__(self, config: AttentionConfig, options: PartOptions) -> None:
        super().__init__()
        shard, dtype, hidden_size = options.shard, options.dtype, options.hidden_size
        head_dim = config.head_dim
        heads, kv_heads = len(shard.heads(config.num_heads)), len(shard.kv_heads(config.num_kv_heads))
        self._queries, self._keys = heads * head_dim, kv_heads * head_dim
        sizes = (self._queries, self._keys, self._keys)
        parts = (Part.QUERY, Part.KEY, Part.VALUE)
        self.qkv = Linear(hidden_size, sizes, parts, options, bias=config.bias)
        self.gate = None
        if config.output_gate:
            self.gate = Linear(hidden_size, (self._queries,), (Part.OUTPUT_GATE,), options, bias=config.bias)
        # One rank has the bias: the sum over ranks adds it once.
        bias = config.out_bias and shard.first
        self.output = Linear(self._queries, (hidden_size,), (Part.OUTPUT,), options, bias=bias)
        self._declare_norms(config.qk_norm, head_dim, dtype)
        self.sinks = self.declare("sinks", (heads,), torch.float32, Part.SINKS) if config.sinks else None
        self.config = config
        self._options = AttentionOptions(scale=config.scale, window=config.window, soft_cap=config.soft_cap)
        self._operations = options.operations
        self._parallel = options.parallel
        self._each = options.each

    def _declare_norms(self, norms: QKNorm | None, head_dim: int, dtype: torch.dtype) -> None:
        """Sets the weights of norms of queries and keys: ones for norms without weights."""
        if norms is None:
            self.query_norm = self.key_norm = None
            return
        kept = torch.float32 if norms.norm.weight_in_float32 else dtype
        for name, size, part in (
            ("query_norm", self._queries, Part.QUERY_NORM),
            ("key_norm", self._keys, Part.KEY_NORM),
        ):
            shape = (size if norms.whole else head_dim,)
            if norms.weight:
                setattr(self, name, self.declare(name, shape, kept, part))
            else:
                self.register_buffer(name, torch.ones(shape, dtype=kept), persistent=False)

    @property
    def rounding(self) -> Rounding | None:
        return rounding_for(self.qkv, self.gate)

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        own, kv = step.attention, memory.pages
        assert own is not None
        assert kv is not None
        qkv = self.qkv(x)
        queries = self._operations.rotate_and_write(qkv, own.rotation, self._norms(qkv), kv, own.write_slots)
        attended = own.attention(queries, kv, self._attention_options()).view(len(x), -1)
        if self.gate is not None:
            attended = (attended.float() * self._each(torch.sigmoid, self.gate(x).float())).to(x.dtype)
        output: torch.Tensor = self.output(attended)
        return output

    def _attention_options(self) -> AttentionOptions:
        return self._options if self.sinks is None else replace(self._options, sinks=self.sinks)

    def _norms(self, qkv: torch.Tensor) -> HeadNorms | None:
        """The norms of each head, for the operation that rotates. Other norms are applied here, in place."""
        value_norm, qk_norm = self.config.value_norm, self.config.qk_norm
        if value_norm is not None:
            head_dim = self.config.head_dim
            values = qkv.view(len(qkv), -1, head_dim)[:, -(self._keys // head_dim) :]
            values.copy_(divide_by_rms(values.to(torch.float32, copy=True), value_norm.eps))
        if qk_norm is None or self.query_norm is None or self.key_norm is None:
            return None
        if not qk_norm.whole:
            return HeadNorms(self.query_norm, self.key_norm, qk_norm.norm.eps)
        parts = qkv[:, : self._queries], qkv[:, self._queries : self._queries + self._keys]
        weights = self.query_norm, self.key_norm
        if self._parallel.size == 1:
            for part, weight in zip(parts, weights, strict=True):
                part.copy_(normalise(part.to(torch.float32, copy=True), weight, qk_norm.norm.eps))
            return None
        # Every rank has an equal share of the heads; kv heads on several ranks count several times, all equally.
        wide = [part.float() for part in parts]
        means = torch.stack([part.square().mean(-1) for part in wide]) / self._parallel.size
        scales = self._parallel.all_reduce(means).add_(qk_norm.norm.eps).rsqrt_()
        for part, values, scale, weight in zip(parts, wide, scales, weights, strict=True):
            part.copy_(values * scale[:, None] * weight)
        return None
