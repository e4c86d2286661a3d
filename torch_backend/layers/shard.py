"""The shard of a model that a process holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.part import CachedArray
from sglang_jax.architectures.kinds.recurrent import RecurrentConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from torch_backend.attention.interface import HeadForm, LatentForm


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The heads, columns of feed-forward layers, experts, and rows of the vocabulary of one rank of several. With more
    ranks than kv heads, neighbouring ranks hold the same kv head. `vocabulary_rows` is the same on every rank,
    ceil(vocab / size): rows past the vocabulary's end are padding, which no token and no logit uses."""

    rank: int
    over: Parallelism
    vocabulary: range
    vocabulary_rows: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.over.devices

    @property
    def first(self) -> bool:
        """Whether this rank adds values that must be added once."""
        return self.rank == 0

    @property
    def first_of_experts(self) -> bool:
        """The same for values of the experts that this rank has."""
        return self.over.place(Axis.EXPERT_INTERMEDIATE, self.rank) == 0

    def heads(self, count: int) -> range:
        return _part(count, self.rank, self.size)

    def kv_heads(self, count: int) -> range:
        """The rank's kv heads, of `count` of a layer: one, shared with neighbours, if there are fewer than ranks."""
        if self.size <= count:
            return _part(count, self.rank, self.size)
        head = self.rank * count // self.size
        return range(head, head + 1)

    def cached(self, arrays: Iterable[CachedArray]) -> tuple[CachedArray, ...]:
        """The rank's cached arrays of a layer: its kv heads, and all of the arrays without heads."""
        return tuple(
            array if array.heads is None else replace(array, heads=len(self.kv_heads(array.heads))) for array in arrays
        )

    def heads_of_pages(self, arrays: Iterable[CachedArray]) -> tuple[range | None, ...]:
        """Whose heads' cached arrays the shard has; shards with the same ones have pages of equal content."""
        return tuple(None if array.heads is None else self.kv_heads(array.heads) for array in arrays)

    def intermediate(self, length: int) -> range:
        return self.of_axis(Axis.INTERMEDIATE, length)

    def recurrent(self, config: RecurrentConfig) -> RecurrentConfig:
        return config.sharded(self.over).of_one_device()

    def head_forms(self, config: ModelConfig) -> tuple[HeadForm, ...]:
        """The distinct forms of heads of all layers, for kernels."""
        forms = (
            HeadForm(mixer.head_dim, len(self.heads(mixer.num_heads)) // len(self.kv_heads(mixer.num_kv_heads)))
            for mixer in config.kv_attention
        )
        return tuple(dict.fromkeys(forms))

    def latent_forms(self, config: ModelConfig) -> tuple[LatentForm, ...]:
        """The distinct forms of latent attention of all layers."""
        forms = (
            LatentForm(len(self.heads(mixer.num_heads)), mixer.latent, mixer.rotary_dim)
            for mixer in config.attention
            if isinstance(mixer, LatentAttentionConfig)
        )
        return tuple(dict.fromkeys(forms))

    def of_axis(self, axis: Axis, length: int) -> range:
        """The rank's part of an axis; all of an axis that is not sharded."""
        match axis:
            case Axis.KV_HEADS:
                return self.kv_heads(length)
            case Axis.VOCABULARY:
                return self.vocabulary
        return _part(length, self.over.place(axis, self.rank), self.over.parts(axis))

    @classmethod
    def of_rank(
        cls, config: ModelConfig, rank: int, over: Parallelism, shards: int | None = None
    ) -> tuple[ModelShard, ...]:
        """The shards of one of several processes: one, or an equal number of adjacent ones, of `shards` in all."""
        own = 1 if shards is None else shards // over.devices
        of_all = replace(over, devices=over.devices * own)
        return tuple(cls.of(config, rank * own + number, of_all) for number in range(own))

    @classmethod
    def of(cls, config: ModelConfig, rank: int, over: Parallelism) -> ModelShard:
        """The shard of `rank`. Raises `ConfigError` if a layer cannot be divided this way."""
        for layer in config.layers:
            layer.sharded(over)
        size = over.devices
        rows = -(-config.vocab_size // size)
        first_row = min(rank * rows, config.vocab_size)
        return cls(
            rank=rank,
            over=over,
            vocabulary=range(first_row, min(first_row + rows, config.vocab_size)),
            vocabulary_rows=rows,
        )


def _part(length: int, rank: int, size: int) -> range:
    share = length // size
    return range(rank * share, (rank + 1) * share)
