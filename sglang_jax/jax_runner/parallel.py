"""How a model is spread over devices: what must divide, and what is copied where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A model over `size` devices.

    - `config`: the model as it is built. With more devices than kv heads it has a kv head for each device, of which
      `kv_copies` neighbours are the same head of the checkpoint: each serves the query heads of its own device.
    """

    config: ModelConfig
    size: int
    kv_copies: int

    @classmethod
    def of(cls, config: ModelConfig, size: int) -> TensorParallel:
        """Spreads a checkpoint's model.

        **Raises:** `ConfigError` if it cannot be divided so.
        """
        kv_heads = config.num_kv_heads
        if config.num_heads % size or (kv_heads % size and size % kv_heads):
            raise ConfigError(
                f"{config.num_heads} heads and {kv_heads} kv heads cannot be spread over {size} devices: choose a "
                "tp_size that divides the heads, and that divides or is a multiple of the kv heads"
            )
        for what, length in (("intermediate", config.intermediate_size), ("vocabulary", config.vocab_size)):
            if length % size:
                raise ConfigError(
                    f"the {what} size {length} cannot be spread over {size} devices: choose a tp_size that divides it"
                )
        copies = max(size // kv_heads, 1)
        return cls(replace(config, num_kv_heads=kv_heads * copies), size, copies)
