"""An engine that serves large language models, on JAX and other backends."""

import sglang_jax.advice  # noqa: F401  # first: it is about what the others import
from sglang_jax.engine.engine import Engine
from sglang_jax.sampling.grammar import choice_grammar, ebnf_grammar, json_grammar, regex_grammar, tag_grammar
from sglang_jax.sampling.params import SamplingParams

__version__ = "0.2.0.dev0"

__all__ = [
    "Engine",
    "SamplingParams",
    "__version__",
    "choice_grammar",
    "ebnf_grammar",
    "json_grammar",
    "regex_grammar",
    "tag_grammar",
]
