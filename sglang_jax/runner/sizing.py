"""Chooses how many requests, tokens and pages fit into memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from sglang_jax.architectures import CacheKind, ModelConfig
from sglang_jax.architectures.model_config import num_paged_groups
from sglang_jax.config import EngineConfig, KVCacheDtype
from sglang_jax.errors import ConfigError, NoRoomError
from sglang_jax.runner.plan import PoolSpec

logger = logging.getLogger(__name__)

_MAX_RUNNING_ON_CPU = 32
_MAX_RUNNING = 256
_KV_TOKENS_ON_CPU = 32768
"""Maximum tokens of the pool on a CPU, where other programs need memory, unless the options ask for more."""
_MIN_TOKENS = 512
"""A pool chosen by memory holds at least one request of this length, or of the context length if shorter."""
_ROWS_PER_BUDGET = 2

_PROMPT_TOKENS = 512
"""Default prompt tokens of a step. A CPU computes more no faster; a TPU compiles a program for each size up to it."""
_PROMPT_TOKENS_OF_GPUS = ((70, 8192), (40, 4096), (20, 2048), (0, 1024))
"""Default prompt tokens of a step by GiB of free memory: for cards of 80, 48 and 24 GB, and for smaller ones. More keep
the matrix units busier and read the weights less often; their activations must fit into the memory that
`mem_fraction_static` leaves."""

_MOST_RANKS_OF_PROMPTS = 8
"""With data-parallel attention, a step has the default prompt tokens of up to this many ranks, each of which computes
an equal part: a single prompt has only that of its rank."""

_MAX_DRAFT_SLOTS = 32
"""Maximum slots for states after drafts: a state is 20 to 80 MiB for models of 1 to 80 billion parameters."""

_USUAL_CONTEXT = 8192
_MIN_RATIO = 0.25
"""Minimum default of the fraction of tokens that layers with a window keep, since some requests are shorter than the
window, and each shared prefix is worth a window."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The memory of a cache group. `page`: bytes of one page, or slot, over all of its layers; the rest: as in
    `PoolSpec`."""

    name: str
    page: int
    kind: CacheKind = CacheKind.FULL
    window: int | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a device, in bytes. `available`: before weights are loaded; `weights`: of all weights; `groups`: of
    the model, in order, and then of a draft model."""

    platform: str
    available: int
    weights: int
    groups: tuple[GroupMemory, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a runner. `num_pages`: of each group, with the pad page (slot); `max_context`: at most the tokens
    that the pools hold; `prompt_tokens`: maximum of a step; `draft_slots`: slots after those of the pool of states, one
    for the state after each draft of a step, so they limit its drafts."""

    num_pages: tuple[int, ...]
    max_rows: int
    token_budget: int
    max_context: int
    prompt_tokens: int
    draft_slots: int = 0


def choose_sizes(
    config: EngineConfig,
    model_context: int,
    memory: Memory,
    longest_context: int | None = None,
    *,
    whole_prompts: bool = False,
) -> Sizes:
    """Chooses the sizes of pools, page tables and steps. `model_context`: the context length if the config sets none;
    `longest_context`: the maximum that it may set, `model_context` if None; `whole_prompts`: a step has room for
    the longest prompt. Raises `ConfigError` if `context_length` is
    beyond the model's, or memory cannot hold the weights and one request."""
    context = config.context_length or model_context
    longest = longest_context or model_context
    if context > longest:
        raise ConfigError(f"context_length {context} exceeds the model's maximum of {longest} positions")
    default_rows = _MAX_RUNNING_ON_CPU if memory.platform == "cpu" else _MAX_RUNNING
    ranks = config.dp_ranks
    max_rows = _multiple_of(ranks, config.max_running_requests or default_rows)
    prompt_tokens = config.chunked_prefill_size or _default_prompt_tokens(memory) * min(ranks, _MOST_RANKS_OF_PROMPTS)
    if whole_prompts:
        prompt_tokens = max(prompt_tokens, context)
    draft_slots = _draft_slots(config, memory, max_rows)
    draft_bytes = _bytes_of_texts(config, max_rows, context) + draft_slots * _slot_bytes(memory)
    memory = replace(memory, available=memory.available - draft_bytes)
    pools = _Pools(config, memory, context, max_rows, prompt_tokens)
    if config.swa_full_tokens_ratio is not None and (pools.all_windows or not pools.has_windows):
        logger.warning(
            "--swa-full-tokens-ratio %g has no effect: %s",
            config.swa_full_tokens_ratio,
            "all layers have sliding windows" if pools.has_windows else "no layer of the model has a sliding window",
        )
    pages = _pages_requested(config, memory, pools) or _pages_that_fit(config, memory, pools, max_rows, context)
    max_rows = _rows_with_slots(config, pools.slots(pages), max_rows)
    tokens = pages * config.page_size
    if pools.all_windows:
        tokens = context
    elif tokens < context:
        logger.warning("context length is %d instead of %d: the KV pool holds %d tokens", tokens, context, tokens)
    return Sizes(
        num_pages=tuple(1 + count for count in pools.pages(pages)),
        max_rows=max_rows,
        token_budget=_multiple_of(ranks, max(prompt_tokens, _ROWS_PER_BUDGET * max_rows)),
        max_context=min(context, tokens),
        prompt_tokens=prompt_tokens,
        draft_slots=draft_slots,
    )


def _multiple_of(ranks: int, number: int) -> int:
    """The smallest multiple of `ranks` from `number` on."""
    return -(-number // ranks) * ranks


def _default_prompt_tokens(memory: Memory) -> int:
    if memory.platform != "cuda":
        return _PROMPT_TOKENS
    return next(tokens for least, tokens in _PROMPT_TOKENS_OF_GPUS if memory.available >= least * 2**30)


def _bytes_of_texts(config: EngineConfig, rows: int, context: int) -> int:
    """Bytes that speculation takes: the text of each row, and three times that while it is searched."""
    return 0 if config.max_samples == 1 else 4 * 4 * (rows + 1) * (context + 1)


def _slot_bytes(memory: Memory) -> int:
    return sum(group.page for group in memory.groups if group.kind.keeps_states)


def _draft_slots(config: EngineConfig, memory: Memory, rows: int) -> int:
    """Fewer than rows, since rows and drafts of a step are at most `rows`."""
    if config.max_samples == 1 or not _slot_bytes(memory):
        return 0
    return min(rows - 1, _MAX_DRAFT_SLOTS)


def _rows_with_slots(config: EngineConfig, slots: int | None, rows: int) -> int:
    """The rows for which there are `slots`, one each; unless `max_running_requests` is set, as many are left for cached
    prefixes."""
    if slots is None:
        return rows
    room = slots if config.max_running_requests or config.disable_radix_cache else max(slots // 2, 1)
    if room < rows:
        logger.warning(
            "At most %d requests run at once instead of %d: there are %d slots for recurrent states", room, rows, slots
        )
    return min(rows, room)


class _Pools:
    """Derives the sizes of all pools from one number: the pages of a pool without a window, or the slots of a model
    whose layers all keep states."""

    def __init__(self, config: EngineConfig, memory: Memory, context: int, rows: int, prompt_tokens: int) -> None:
        self._config = config
        self._groups = memory.groups
        self._context = context
        self._rows = rows
        self._prompt_tokens = prompt_tokens
        self._page_bytes = sum(group.page for group in memory.groups if not group.kind.keeps_states)
        self.has_pages = self._page_bytes > 0
        self.all_windows = all(group.kind is not CacheKind.FULL for group in memory.groups)
        self.has_windows = any(group.kind is CacheKind.WINDOW for group in memory.groups)

    def pages(self, full: int) -> tuple[int, ...]:
        """Pages, or slots, of each pool, without the pad page, if a pool without a window has `full`."""
        return tuple(self._pages_of(group, full) for group in self._groups)

    def slots(self, full: int) -> int | None:
        """Slots for states; None for a model without states."""
        kept = [group for group in self._groups if group.kind.keeps_states]
        return self._pages_of(kept[0], full) if kept else None

    def _pages_of(self, group: GroupMemory, full: int) -> int:
        if group.kind.keeps_states:
            return self._num_slots(group.page, full)
        return self._window_pages(group.window, full) if group.window else full

    def _num_slots(self, slot_bytes: int, full: int) -> int:
        """The slots that the options set, or a fraction of the memory for pages; without the prefix cache, one per
        row."""
        config = self._config
        if config.disable_radix_cache:
            return self._rows
        if config.max_mamba_cache_size is not None:
            return config.max_mamba_cache_size
        if not self.has_pages:
            return full
        share = int(config.mamba_full_memory_ratio * full * self._page_bytes) // slot_bytes
        return max(min(share, full + 2 * self._rows), 1)  # more states than ends of pages are of no use

    def bytes(self, full: int) -> int:
        return sum((1 + pages) * group.page for pages, group in zip(self.pages(full), self._groups, strict=True))

    def most(self, usable: int) -> int:
        """The largest number of pages with which all pools fit into `usable` bytes; -1 if none does."""
        first, last = -1, usable // min(group.page for group in self._groups)
        while first < last:
            middle = (first + last + 1) // 2
            if self.bytes(middle) <= usable:
                first = middle
            else:
                last = middle - 1
        return first

    def _window_pages(self, window: int, full: int) -> int:
        """A fraction of `full`, plus a window and the tokens of two steps for one request."""
        if self.all_windows:
            return full
        page_size, ratio = self._config.page_size, self._config.swa_full_tokens_ratio
        if ratio is None:
            ratio = max(_MIN_RATIO, window / min(self._context, _USUAL_CONTEXT))
        one_request = window + 2 * (self._prompt_tokens + page_size)
        return min(math.ceil(min(ratio, 1.0) * full) + -(-one_request // page_size), full)


def _pages_requested(config: EngineConfig, memory: Memory, pools: _Pools) -> int | None:
    if config.max_total_tokens is None:
        return None
    pages = config.max_total_tokens // config.page_size
    needed = memory.weights + pools.bytes(pages)
    if needed > memory.available:
        raise NoRoomError(
            f"max_total_tokens {config.max_total_tokens} needs {_mib(needed)} for weights and KV, "
            f"but only {_mib(memory.available)} are available: lower max_total_tokens"
        )
    return pages


def _pages_that_fit(config: EngineConfig, memory: Memory, pools: _Pools, max_rows: int, context: int) -> int:
    pages = pools.most(int(memory.available * config.mem_fraction_static) - memory.weights)
    least = min(context, _MIN_TOKENS) if pools.has_pages else config.page_size
    if pages * config.page_size < least:
        raise NoRoomError(
            f"{_mib(memory.available)} of memory are available and mem_fraction_static is "
            f"{config.mem_fraction_static:g}: after {_mib(memory.weights)} of weights that leaves no room for the "
            f"{_mib(pools.bytes(-(-least // config.page_size) - 1))} of KV that a request of {least} tokens takes. "
            "Free memory, raise mem_fraction_static, or choose a smaller model or dtype"
        )
    if memory.platform == "cpu":
        pages_per_row = -(-context // config.page_size)
        tokens = max(_KV_TOKENS_ON_CPU, config.context_length or 0)
        pages = min(pages, max_rows * pages_per_row, -(-tokens // config.page_size))
    return pages


def pages_in_memory(memory: Memory, sizes: Sizes) -> tuple[int, ...]:
    """Pages, or slots, of each group's arrays: those of its pool, and for states also those for drafts."""
    return tuple(
        pages + (sizes.draft_slots if group.kind.keeps_states else 0)
        for group, pages in zip(memory.groups, sizes.num_pages, strict=True)
    )


def pool_specs(memory: Memory, sizes: Sizes, page_size: int) -> tuple[PoolSpec, ...]:
    return tuple(
        PoolSpec(group.name, group.kind, pages, page_size, group.window, group.draft)
        for group, pages in zip(memory.groups, sizes.num_pages, strict=True)
    )


def describe_pools(memory: Memory, sizes: Sizes, page_size: int) -> str:
    parts = [
        f"{_contents(group, pages - 1, page_size)} in {_mib(pages * group.page)}"
        for group, pages in zip(memory.groups, sizes.num_pages, strict=True)
    ]
    if sizes.draft_slots:
        parts.append(f"{sizes.draft_slots} states after drafts in {_mib(sizes.draft_slots * _slot_bytes(memory))}")
    return ", ".join(parts)


def _contents(group: GroupMemory, pages: int, page_size: int) -> str:
    if group.kind.keeps_states:
        return f"{pages} recurrent states"
    window = f" with a window of {group.window}" if group.window else ""
    of_draft = f" ({group.name})" if group.draft else ""
    return f"{pages * page_size} KV tokens{window}{of_draft}"


def refuse_with_states(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for a KV cache dtype if the layers keep only recurrent states."""
    if config.kv_cache_dtype is not KVCacheDtype.AUTO and model.keeps_states and not num_paged_groups(model):
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype.value}: the model has only recurrent states, no keys and values: "
            "choose auto; --mamba-ssm-dtype bfloat16 makes states smaller"
        )


def refuse_with_latents(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for latent vectors in 8 bits, which kernels for TPUs do not support yet."""
    if model.keeps_latents and config.kv_cache_dtype is not KVCacheDtype.AUTO:
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype.value}: latent attention caches one short vector of a token, which "
            "is not stored in 8 bits yet on TPUs: choose auto"
        )


def refuse_ranks(config: EngineConfig, model: ModelConfig) -> None:
    """Raises `ConfigError` for data-parallel attention of a model that has other layers than with latent attention, and
    with options that it does not support."""
    if not config.enable_dp_attention:
        return
    if config.max_samples > 1:
        name = config.speculative_algorithm.value
        raise ConfigError(
            f"enable_dp_attention does not support speculative_algorithm {name} yet: remove one of the two"
        )
    if config.batch_invariant:
        raise ConfigError(
            f"enable_dp_attention does not support {config.determinism_option} yet: remove one of the two"
        )
    if not (model.attention and model.keeps_only_latents):
        raise ConfigError(
            "enable_dp_attention needs a model whose layers all have latent attention (MLA), such as DeepSeek's: with "
            "other attention, tp_size divides the heads"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
