"""How a model is spread over devices: what must divide, and what is copied where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.architectures.model_config import LayerConfig, ModelConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.sizing import refuse_spread_states


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over `size` devices.

    - `config`: the model as it is built. A layer with fewer kv heads than there are devices has a kv head for each
      device, neighbours being the same head of the checkpoint: each serves the query heads of its own device. Its
      vocabulary is a multiple of the devices: what lies past the checkpoint's is padding that nothing uses.
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
        if size > 1:
            refuse_spread_states(config, size)
        for mixer in config.attention:
            heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
            if heads % size or (kv_heads % size and size % kv_heads):
                raise ConfigError(
                    f"{heads} heads and {kv_heads} kv heads cannot be spread over {size} devices: choose a tp_size "
                    "that divides the heads, and that divides or is a multiple of the kv heads"
                )
        indivisible = [part.size for part in config.feed_forward if part.size % size]
        if indivisible:
            raise ConfigError(
                f"the intermediate size {indivisible[0]} cannot be spread over {size} devices: choose a "
                "tp_size that divides it"
            )

        def copied(layer: LayerConfig) -> LayerConfig:
            if (attention := layer.attention) is None or layer.recurrent is not None:
                return layer  # layers that keep a state are on one device
            kv_heads = attention.num_kv_heads
            return replace(layer, mixer=replace(attention, num_kv_heads=kv_heads * max(size // kv_heads, 1)))

        built = replace(config.with_layers(copied), vocab_size=-(-config.vocab_size // size) * size)
        return cls(built, size, config.vocab_size)
