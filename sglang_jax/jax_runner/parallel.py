"""How a model is spread over devices: what must divide, and what is copied where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.architectures.model_config import AttentionConfig, LayerConfig, Mixer, ModelConfig, SideBySide
from sglang_jax.architectures.recurrent_shards import spread
from sglang_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over `size` devices.

    - `config`: the model as it is built. A layer with fewer kv heads than there are devices has a kv head for each
      device, neighbours being the same head of the checkpoint: each serves the query heads of its own device. So it is
      with what heads of a recurrent layer share (`recurrent_shards`). Its vocabulary is a multiple of the devices: what
      lies past the checkpoint's is padding that nothing uses.
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

        def shared(mixer: Mixer) -> Mixer:
            match mixer:
                case AttentionConfig():
                    kv_heads = mixer.num_kv_heads
                    return replace(mixer, num_kv_heads=kv_heads * max(size // kv_heads, 1))
                case SideBySide():
                    attention, recurrent = shared(mixer.attention), spread(mixer.recurrent, size)
                    assert isinstance(attention, AttentionConfig)
                    return SideBySide(attention=attention, recurrent=recurrent)
            return spread(mixer, size)

        def shared_layer(layer: LayerConfig) -> LayerConfig:
            return layer if layer.mixer is None else replace(layer, mixer=shared(layer.mixer))

        built = replace(config.with_layers(shared_layer), vocab_size=-(-config.vocab_size // size) * size)
        return cls(built, size, config.vocab_size)
