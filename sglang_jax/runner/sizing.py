"""How many requests, tokens and pages fit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_RUNNING_ON_CPU = 32
_MAX_RUNNING = 256
_KV_TOKENS_ON_CPU = 32768
"""Pool on a CPU, unless a longer context or a larger pool is asked for: memory there belongs to others as well."""
_LEAST_TOKENS = 512
"""A pool chosen by memory holds at least one request of this many tokens, or as many as the context has."""
_ROWS_PER_BUDGET = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """What the device has. Bytes.

    - `available`: before weights are loaded.
    - `weights`, `page`: what the weights, and one KV page over all layers, take.
    """

    platform: str
    available: int
    weights: int
    page: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """`num_pages` counts the pad page; `max_context` is at most what the pool holds."""

    num_pages: int
    max_rows: int
    token_budget: int
    max_context: int


def choose_sizes(config: EngineConfig, model_context: int, memory: Memory) -> Sizes:
    """Sizes of pool, page table and steps.

    **Raises:** `ConfigError` if `context_length` is beyond the model's, or memory cannot hold the weights and one
    request.
    """
    context = config.context_length or model_context
    if context > model_context:
        raise ConfigError(f"context_length {context} is beyond the {model_context} positions that the model declares")
    default_rows = _MAX_RUNNING_ON_CPU if memory.platform == "cpu" else _MAX_RUNNING
    max_rows = config.max_running_requests or default_rows
    num_pages = 1 + (_pages_asked_for(config, memory) or _pages_that_fit(config, memory, max_rows, context))
    tokens = (num_pages - 1) * config.page_size
    if tokens < context:
        logger.warning("context length is %d instead of %d: the KV pool holds %d tokens", tokens, context, tokens)
    return Sizes(
        num_pages=num_pages,
        max_rows=max_rows,
        token_budget=max(config.chunked_prefill_size, _ROWS_PER_BUDGET * max_rows),
        max_context=min(context, tokens),
    )


def _pages_asked_for(config: EngineConfig, memory: Memory) -> int | None:
    if config.max_total_tokens is None:
        return None
    pages = config.max_total_tokens // config.page_size
    needed = memory.weights + (pages + 1) * memory.page
    if needed > memory.available:
        raise ConfigError(
            f"max_total_tokens {config.max_total_tokens} needs {_mib(needed)} for weights and KV, "
            f"{_mib(memory.available)} are available: lower max_total_tokens"
        )
    return pages


def _pages_that_fit(config: EngineConfig, memory: Memory, max_rows: int, context: int) -> int:
    usable = int(memory.available * config.mem_fraction_static) - memory.weights
    pages = usable // memory.page - 1
    least = min(context, _LEAST_TOKENS)
    if pages * config.page_size < least:
        raise ConfigError(
            f"{_mib(memory.available)} of memory are available and mem_fraction_static is "
            f"{config.mem_fraction_static:g}: after {_mib(memory.weights)} of weights that leaves no room for the "
            f"{_mib(-(-least // config.page_size) * memory.page)} of KV that a request of {least} tokens takes. "
            "Free memory, raise mem_fraction_static, or choose a smaller model or dtype"
        )
    if memory.platform == "cpu":
        pages_per_row = -(-context // config.page_size)
        tokens = max(_KV_TOKENS_ON_CPU, config.context_length or 0)
        pages = min(pages, max_rows * pages_per_row, -(-tokens // config.page_size))
    return pages


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
