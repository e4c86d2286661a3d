"""Shards a model over devices: checks divisibility, and copies heads that are fewer than devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over several devices. `config`: the model as it is built. A layer with fewer KV heads than devices gets a
    KV head per device, with neighbours that copy the same head of the checkpoint; each serves the query heads of its
    device. So do inputs that heads of a recurrent layer share (see `LayerPart.sharded`). The vocabulary is padded to a
    multiple of the number of devices; `vocab_size` is that of the checkpoint. `num_shards`: in which the model is
    computed, an equal number on each device; None for one on each device."""

    config: ModelConfig
    over: Parallelism
    vocab_size: int
    num_shards: int | None = None

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.over.devices

    @property
    def shards_on_device(self) -> int:
        return 1 if self.num_shards is None else self.num_shards // self.size

    @classmethod
    def of(cls, config: ModelConfig, over: Parallelism, num_shards: int | None = None) -> TensorParallel:
        """Shards a checkpoint's model over several devices. Raises `ConfigError` if that is not possible."""
        parts = replace(over, devices=num_shards or over.devices)
        vocabulary = -(-config.vocab_size // parts.devices) * parts.devices
        built = replace(config.with_layers(lambda layer: layer.sharded(parts)), vocab_size=vocabulary)
        return cls(built, over, config.vocab_size, num_shards)
