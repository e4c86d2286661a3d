"""How a model is spread over devices: what must divide, and what is copied where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.architectures.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over `size` devices.

    - `config`: the model as it is built. A layer with fewer kv heads than there are devices has a kv head for each
      device, neighbours being the same head of the checkpoint: each serves the query heads of its own device. So it is
      with what heads of a recurrent layer share (see `LayerPart.sharded`). Its vocabulary is a multiple of the devices:
      what lies past the checkpoint's is padding that nothing uses.
    - `vocab_size`: the checkpoint's.
    """

    config: ModelConfig
    size: int
    vocab_size: int

    @classmethod
    def of(cls, config: ModelConfig, size: int) -> TensorParallel:
        """Spreads a checkpoint's model.

        **Raises:** `ConfigError` if it cannot be divided so.
        """
        vocabulary = -(-config.vocab_size // size) * size
        built = replace(config.with_layers(lambda layer: layer.sharded(size)), vocab_size=vocabulary)
        return cls(built, size, config.vocab_size)
