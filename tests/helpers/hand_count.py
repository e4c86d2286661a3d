"""Bytes of a model with latent attention on one device, counted from the fields of config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hand:
    """A count for one device of `tp`. A matrix has two bytes a number, or, with `fp8`, one, and four for the scale
    of each row; or with `blocks`, one, and two for the scale of each 128 inputs of a row, or of each 64 or 32 where a
    device has no whole 128. What has no heads or columns
    to shard is on every device."""

    fields: dict[str, Any]
    tp: int
    fp8: bool = False
    blocks: bool = False

    def row(self, columns: int, group: int = 128) -> int:
        """Bytes of the values of a row, with the scales of its groups."""
        if self.blocks:
            return columns + columns // group * 2
        return columns * (1 if self.fp8 else 2)

    @property
    def scale(self) -> int:
        return 4 if self.fp8 else 0

    def matrix(self, rows: int, columns: int, *, shared: bool) -> int:
        """`shared`: every device has the whole matrix; otherwise each has a shard of the rows."""
        return rows * (self.row(columns) + self.scale) // (1 if shared else self.tp)

    def sums(self, rows: int, columns: int) -> int:
        """A matrix whose outputs are summed over devices: each has a shard of the columns, and the scale of each
        row."""
        return rows * (self.row(columns, self.group(columns // self.tp)) // self.tp + self.scale)

    def group(self, own: int) -> int:
        """Of a device's columns."""
        return next(size for size in (128, 64, 32) if own % size == 0) if self.blocks else own

    def gated(self, columns: int) -> int:
        hidden = self.fields["hidden_size"]
        return 2 * self.matrix(columns, hidden, shared=False) + self.sums(hidden, columns)

    def attention(self) -> int:
        fields = self.fields
        hidden, heads, latent = (fields[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
        plain, rotated, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        inputs, of_queries = hidden, 0
        if fields["q_lora_rank"]:
            inputs = fields["q_lora_rank"]
            of_queries = self.matrix(inputs, hidden, shared=True) + 2 * inputs  # and a norm
        queries = of_queries + self.matrix(heads * (plain + rotated), inputs, shared=False)
        cached = self.matrix(latent + rotated, hidden, shared=True) + 2 * latent
        absorbed = 2 * heads * (plain + value) * latent // self.tp  # never in 8 bits
        return queries + cached + absorbed + self.sums(hidden, heads * value)

    def of_expert(self, inputs: int, outputs: int) -> int:
        """A matrix of an expert in groups, on one device, with scales for 16, 32... groups. Of 64 or 32 outputs, two or
        four parts of the inputs are side by side."""
        parts = max(128 // outputs, 1)
        groups = inputs // parts // self.group(inputs)
        return outputs * parts * (inputs // parts + 2 * -(-groups // 16) * 16)

    def experts(self) -> int:
        fields = self.fields
        hidden, experts, columns = (
            fields[name] for name in ("hidden_size", "n_routed_experts", "moe_intermediate_size")
        )
        correction = 4 * experts if fields["topk_method"] == "noaux_tc" else 0
        router = 4 * hidden * experts + correction
        own = columns // self.tp
        if self.blocks:
            routed = experts * (2 * self.of_expert(hidden, own) + self.of_expert(own, hidden))
        else:
            routed = experts * self.gated(columns)
        return router + routed + self.gated(fields["n_shared_experts"] * columns)

    def weights(self) -> int:
        fields = self.fields
        layers, dense, hidden = (fields[name] for name in ("num_hidden_layers", "first_k_dense_replace", "hidden_size"))
        of_all = layers * (self.attention() + 2 * 2 * hidden)
        tables = 2 * 2 * fields["vocab_size"] * hidden // self.tp
        feed_forward = dense * self.gated(fields["intermediate_size"]) + (layers - dense) * self.experts()
        return of_all + feed_forward + tables + 2 * hidden

    def cached_token(self, *, on_tpu: bool) -> int:
        """A latent vector and a rotated key in each layer, on a TPU in whole registers of 128 lanes."""
        width = self.fields["kv_lora_rank"] + self.fields["qk_rope_head_dim"]
        return self.fields["num_hidden_layers"] * 2 * (-(-width // 128) * 128 if on_tpu else width)
