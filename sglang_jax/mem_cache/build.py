"""Builds the cache group, with its component of the tree, of each pool."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.group import FullGroup, Group, WindowGroup
from sglang_jax.mem_cache.ledger import PageLedger
from sglang_jax.mem_cache.lengths import RowLengths
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.state import States
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.mem_cache.window_kv import WindowKV
from sglang_jax.runner.plan import PoolSpec


def build_groups(
    pools: Sequence[PoolSpec],
    lengths: RowLengths,
    tables: Sequence[PageTable],
    *,
    eviction: EvictionPolicy,
    step_tokens: int,
    state_interval: int,
    ledger: bool,
) -> tuple[Group, ...]:
    """The groups of `pools`, whose pages are in `tables`. `state_interval`: see `StateGroup`; `ledger`: record page
    owners. Raises `ValueError` for two pools of states."""

    def build(number: int, spec: PoolSpec) -> Group:
        pool = PagePool(spec.num_pages, spec.page_size, PageLedger(spec.num_pages) if ledger else None)
        if spec.kind.keeps_states:
            return StateGroup(spec, States(pool, eviction), lengths, tables[number], number, state_interval)
        order = EvictionOrder(eviction)
        if spec.window is not None:
            return WindowGroup(spec, WindowKV(pool, order, spec.window), lengths, tables[number], step_tokens)
        return FullGroup(spec, FullKV(pool, order), lengths, tables[number])

    kept = [spec.name for spec in pools if spec.kind.keeps_states]
    if len(kept) > 1:
        raise ValueError(f"pools of states {', '.join(kept)}: layers that keep states share the slots of one pool")
    return tuple(build(number, spec) for number, spec in enumerate(pools))


def page_tables(pools: Sequence[PoolSpec], rows: int, max_context: int) -> tuple[PageTable, ...]:
    """An empty page table for each pool, of `rows` rows of up to `max_context` tokens."""
    return tuple(PageTable(rows, pool.columns(max_context)) for pool in pools)
