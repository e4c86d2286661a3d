"""How many pages, rows and tokens a configuration and a machine give."""

from __future__ import annotations

import logging

import pytest

from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.sizing import GroupMemory, Memory, choose_sizes

GIB = 2**30
CPU = Memory("cpu", available=16 * GIB, weights=GIB, groups=(GroupMemory(2**20),))
TPU = Memory("tpu", available=16 * GIB, weights=GIB, groups=(GroupMemory(2**20),))


def test_defaults_on_a_cpu() -> None:
    sizes = choose_sizes(EngineConfig(), 8192, CPU)
    assert (sizes.num_pages[0], sizes.max_rows) == (1 + 32768 // 16, 32)
    assert (sizes.token_budget, sizes.max_context) == (512, 8192)


def test_an_accelerator_gives_all_its_memory() -> None:
    sizes = choose_sizes(EngineConfig(mem_fraction_static=0.5), 8192, TPU)
    assert sizes.num_pages[0] == 7 * 1024
    assert sizes.max_rows == 256
    assert sizes.token_budget == 512


def test_a_pool_on_a_cpu_is_no_larger_than_its_rows_can_use() -> None:
    assert choose_sizes(EngineConfig(max_running_requests=2), 512, CPU).num_pages[0] == 1 + 2 * 32


def test_a_longer_context_enlarges_the_pool() -> None:
    assert choose_sizes(EngineConfig(context_length=65536), 131072, CPU).max_context == 65536
    assert choose_sizes(EngineConfig(), 131072, CPU).max_context == 32768


def test_the_context_is_what_the_pool_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sizes = choose_sizes(EngineConfig(max_total_tokens=1000), 8192, CPU)
    assert (sizes.num_pages[0], sizes.max_context) == (63, 992)
    assert "context length is 992 instead of 8192: the KV pool holds 992 tokens" in caplog.text


def test_the_budget_has_room_for_prefill_beside_all_decode_rows() -> None:
    sizes = choose_sizes(EngineConfig(max_running_requests=100, chunked_prefill_size=64), 8192, CPU)
    assert sizes.token_budget == 200


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_length 9000 is beyond the 8192 positions"):
        choose_sizes(EngineConfig(context_length=9000), 8192, CPU)


def test_memory_that_holds_no_request_is_refused_with_its_numbers() -> None:
    small = Memory("cpu", available=1200 * 2**20, weights=1000 * 2**20, groups=(GroupMemory(2**20),))
    with pytest.raises(ConfigError, match=r"1,200 MiB .* 0\.85: after 1,000 MiB .* 32 MiB of KV .* 512 tokens"):
        choose_sizes(EngineConfig(), 8192, small)
    assert choose_sizes(EngineConfig(mem_fraction_static=0.99), 8192, small).num_pages[0] == 188


def test_a_pool_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_total_tokens 1000000 needs 63,525 MiB .* 16,384 MiB are available"):
        choose_sizes(EngineConfig(max_total_tokens=1_000_000), 8192, CPU)
