"""An engine that serves large language models, on JAX and other backends."""

from sglang_jax.engine.engine import Engine
from sglang_jax.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = ["Engine", "SamplingParams", "__version__"]
