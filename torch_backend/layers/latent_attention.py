"""Latent attention over paged latent vectors, in the form with fewer products: see `attention/latent.py`."""

from __future__ import annotations

import torch

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.tensor_names import Part
from torch_backend.attention.interface import AttentionOptions, LatentHeads
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.linear import Linear
from torch_backend.layers.norm import Norm
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.layers.row_tiles import TILE_ROWS
from torch_backend.native_operations import rotate
from torch_backend.rounded_rows import Rounding, Rows, rounding_for


class LatentAttention(Loadable):
    """Projections to latent vectors, cache write, attention, values, output projection. Every rank has all latent
    vectors, and queries, keys and values of its heads."""

    def __init__(self, config: LatentAttentionConfig, options: PartOptions) -> None:
        super().__init__()
        hidden, dtype, self._heads = options.hidden_size, options.dtype, len(options.shard.heads(config.num_heads))
        self.config = config
        # The expanded form rounds otherwise, and the number of a chunk's tokens would choose it.
        self._expands_from = None if options.fixed else config.expands_from
        self._tile = TILE_ROWS[0] if options.fixed else None
        inputs, query = hidden, Part.QUERY
        down: tuple[Part, ...] = (Part.LATENT, Part.KEY_ROTATED)
        self.query_latent_norm = None
        if config.query_latent is not None:
            inputs, query, down = config.query_latent, Part.QUERY_UP, (Part.QUERY_LATENT, *down)
            self.query_latent_norm = Norm(
                inputs, config.norm, Part.QUERY_LATENT_NORM, dtype=dtype, operations=options.operations
            )
        sizes = [config.query_latent or 0, config.latent, config.rotary_dim]
        self.down = Linear(hidden, sizes[-len(down) :], down, options, bias=config.bias)
        self._sizes = sizes
        queries = (self._heads * config.key_dim, self._heads * config.rotary_dim)
        self.query = Linear(inputs, queries, (query, Part.QUERY_ROTATED), options)
        self.latent_norm = Norm(
            config.latent, config.norm, Part.LATENT_NORM, dtype=dtype, operations=options.operations
        )
        self.key_up = self.declare("key_up", (self._heads * config.key_dim, config.latent), dtype, Part.KEY_UP)
        self.value_up = self.declare("value_up", (self._heads * config.value_dim, config.latent), dtype, Part.VALUE_UP)
        # One rank has the bias: the sum over ranks adds it once.
        bias = config.out_bias and options.shard.first
        self.output = Linear(self._heads * config.value_dim, (hidden,), (Part.OUTPUT,), options, bias=bias)

    @property
    def rounding(self) -> Rounding | None:
        return rounding_for(self.down, self.query if self.query_latent_norm is None else None)

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        own, kv, config = step.attention, memory.pages, self.config
        assert own is not None
        assert kv is not None
        query_latent, latent, key = self.down(x).split(self._sizes, dim=-1)
        of_queries = x
        if self.query_latent_norm is not None:
            of_queries = self.query_latent_norm.rows_for(self.query.rounding, query_latent.contiguous())
        tokens, heads = len(x), self._heads
        plain, to_rotate = self.query(of_queries).split([heads * config.key_dim, heads * config.rotary_dim], dim=-1)
        together = torch.cat((to_rotate.reshape(tokens, heads, -1), key[:, None]), dim=1)
        rotated = rotate(together.to(torch.float32, copy=True), own.rotation).to(x.dtype)
        rows = torch.cat((self.latent_norm(latent.contiguous()), rotated[:, heads]), dim=-1)
        slots = (own.write_slots // kv.page_size, own.write_slots % kv.page_size)
        if kv.latent_scales is None:
            kv.keys.transpose(1, 2).index_put_(slots, rows[:, None].to(kv.keys.dtype))
        else:
            kv.latent_scales.write(kv.keys, slots, rows)
        queries = torch.cat((plain.reshape(tokens, heads, -1), rotated[:, :heads]), dim=-1)
        attended = own.attention(queries, kv, self._attention_options())
        output: torch.Tensor = self.output(attended.reshape(tokens, -1))
        return output

    def _attention_options(self) -> AttentionOptions:
        config, heads = self.config, self._heads
        key_up, value_up = self.key_up.view(heads, config.key_dim, -1), self.value_up.view(heads, config.value_dim, -1)
        return AttentionOptions(
            scale=config.scale, latents=LatentHeads(key_up, value_up, self._expands_from, self._tile)
        )
