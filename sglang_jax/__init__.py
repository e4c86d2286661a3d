"""An engine that serves large language models, on JAX and other backends."""

from importlib import import_module
from typing import TYPE_CHECKING

import sglang_jax.advice  # noqa: F401  # first: it filters logs of later imports

if TYPE_CHECKING:
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

if not TYPE_CHECKING:

    def __getattr__(name):
        """Imports public names at first use: programs start here, and Ctrl-C must work before slow imports."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        folder = {"Engine": "engine.engine", "SamplingParams": "sampling.params"}.get(name, "sampling.grammar")
        value = globals()[name] = getattr(import_module(f"{__name__}.{folder}"), name)
        return value
