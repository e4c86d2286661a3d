"""The number of pages, rows and tokens for a configuration and a machine."""

from __future__ import annotations

import logging

import pytest

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.draft_model import with_draft
from sglang_jax.runner.sizing import GroupMemory, Memory, choose_sizes, describe_pools, pool_specs

GIB = 2**30
CPU = Memory("cpu", available=16 * GIB, weights=GIB, groups=(GroupMemory("full", 2**20),))
TPU = Memory("tpu", available=16 * GIB, weights=GIB, groups=(GroupMemory("full", 2**20),))


def test_defaults_on_a_cpu() -> None:
    sizes = choose_sizes(EngineConfig(), 8192, CPU)
    assert (sizes.num_pages[0], sizes.max_rows) == (1 + 32768 // 16, 32)
    assert (sizes.token_budget, sizes.max_context) == (512, 8192)


def test_all_memory_of_an_accelerator_is_used() -> None:
    sizes = choose_sizes(EngineConfig(mem_fraction_static=0.5), 8192, TPU)
    assert sizes.num_pages[0] == 7 * 1024
    assert sizes.max_rows == 256
    assert sizes.token_budget == 512


def test_a_pool_on_a_cpu_is_limited_to_what_its_rows_can_use() -> None:
    assert choose_sizes(EngineConfig(max_running_requests=2), 512, CPU).num_pages[0] == 1 + 2 * 32


def test_a_longer_context_enlarges_the_pool() -> None:
    assert choose_sizes(EngineConfig(context_length=65536), 131072, CPU).max_context == 65536
    assert choose_sizes(EngineConfig(), 131072, CPU).max_context == 32768


def test_the_context_is_limited_by_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sizes = choose_sizes(EngineConfig(max_total_tokens=1000), 8192, CPU)
    assert (sizes.num_pages[0], sizes.max_context) == (63, 992)
    assert "context length is 992 instead of 8192: the KV pool holds 992 tokens" in caplog.text


def test_the_budget_has_room_for_prefill_with_all_decode_rows() -> None:
    sizes = choose_sizes(EngineConfig(max_running_requests=100, chunked_prefill_size=64), 8192, CPU)
    assert sizes.token_budget == 200


@pytest.mark.parametrize(("gib", "tokens"), [(16, 1024), (22, 2048), (45, 4096), (78, 8192), (139, 8192)])
def test_the_prompt_tokens_of_a_step_on_a_gpu_follow_its_memory(gib: int, tokens: int) -> None:
    gpu = Memory("cuda", gib * GIB, GIB, (GroupMemory("full", 2**20),))
    sizes = choose_sizes(EngineConfig(), 8192, gpu)
    assert (sizes.prompt_tokens, sizes.token_budget) == (tokens, tokens)
    sizes = choose_sizes(EngineConfig(chunked_prefill_size=96), 8192, gpu)
    assert (sizes.prompt_tokens, sizes.token_budget) == (96, 512)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_length 9000 exceeds the model's maximum of 8192 positions"):
        choose_sizes(EngineConfig(context_length=9000), 8192, CPU)


def test_a_context_may_be_as_long_as_rope_scaling_reaches() -> None:
    assert choose_sizes(EngineConfig(max_total_tokens=65536), 8192, CPU, 16384).max_context == 8192
    asked = EngineConfig(context_length=16384, max_total_tokens=65536)
    assert choose_sizes(asked, 8192, CPU, 16384).max_context == 16384
    with pytest.raises(ConfigError, match="context_length 16385 exceeds the model's maximum of 16384 positions"):
        choose_sizes(EngineConfig(context_length=16385), 8192, CPU, 16384)


def test_memory_for_less_than_one_request_is_refused_with_the_numbers() -> None:
    small = Memory("cpu", available=1200 * 2**20, weights=1000 * 2**20, groups=(GroupMemory("full", 2**20),))
    with pytest.raises(ConfigError, match=r"1,200 MiB .* 0\.85: after 1,000 MiB .* 32 MiB of KV .* 512 tokens"):
        choose_sizes(EngineConfig(), 8192, small)
    assert choose_sizes(EngineConfig(mem_fraction_static=0.99), 8192, small).num_pages[0] == 188


def test_a_pool_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"max_total_tokens 1000000 needs 63,525 MiB .* only 16,384 MiB are available"
    ):
        choose_sizes(EngineConfig(max_total_tokens=1_000_000), 8192, CPU)


GEMMA = Memory(
    "tpu",
    available=16 * GIB,
    weights=GIB,
    groups=(GroupMemory("full", 2**20), GroupMemory("swa", 5 * 2**20, CacheKind.WINDOW, 1024)),
)
"""One layer in six sees all tokens."""


def test_a_pool_for_windows_is_a_share_of_the_other() -> None:
    """A quarter; and for a single request a window and two steps of 512 tokens: 1,024 + 2 * (512 + 16), with pages of
    16."""
    full, window = choose_sizes(EngineConfig(mem_fraction_static=0.5), 32768, GEMMA).num_pages
    assert window - 1 == -(-(full - 1) // 4) + 130
    assert 0 <= 7 * 1024 - (full + 5 * window) < 7
    full, window = choose_sizes(EngineConfig(max_total_tokens=16000, swa_full_tokens_ratio=0.5), 32768, GEMMA).num_pages
    assert (full, window) == (1001, 1 + 500 + 130)
    full, window = choose_sizes(EngineConfig(max_total_tokens=16000, swa_full_tokens_ratio=1.0), 32768, GEMMA).num_pages
    assert (full, window) == (1001, 1001), "no more than the other has"


def test_by_default_a_long_window_has_a_larger_share() -> None:
    half = Memory("tpu", 16 * GIB, GIB, (GroupMemory("full", 2**20), GroupMemory("swa", 2**20, CacheKind.WINDOW, 4096)))
    full, window = choose_sizes(EngineConfig(max_total_tokens=160_000), 32768, half).num_pages
    assert (full - 1, window - 1) == (10_000, 5_000 + (4096 + 2 * 528) // 16)


def test_where_all_layers_have_windows_the_context_may_be_longer_than_the_pool() -> None:
    alone = Memory("cpu", 16 * GIB, GIB, (GroupMemory("swa", 2**20, CacheKind.WINDOW, 4096),))
    sizes = choose_sizes(EngineConfig(max_total_tokens=8000), 32768, alone)
    assert (sizes.num_pages, sizes.max_context) == ((501,), 32768)
    (pool,) = pool_specs(alone, sizes, 16)
    assert (pool.kind, pool.num_pages, pool.window) == (CacheKind.WINDOW, 501, 4096)


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (
            Memory("tpu", 16 * GIB, GIB, (GroupMemory("swa", 2**20, CacheKind.WINDOW, 4096),)),
            "all layers have sliding windows",
        ),
        (TPU, "no layer of the model has a sliding window"),
        (
            Memory("tpu", 16 * GIB, GIB, (GroupMemory("mamba", 2**20, CacheKind.STATE),)),
            "no layer of the model has a sliding",
        ),
    ],
)
def test_a_ratio_without_effect_is_logged(memory: Memory, why: str, caplog: pytest.LogCaptureFixture) -> None:
    choose_sizes(EngineConfig(), 8192, memory)
    choose_sizes(EngineConfig(swa_full_tokens_ratio=0.5), 8192, GEMMA)
    assert "--swa-full-tokens-ratio" not in caplog.text
    choose_sizes(EngineConfig(swa_full_tokens_ratio=0.5), 8192, memory)
    assert f"--swa-full-tokens-ratio 0.5 has no effect: {why}" in caplog.text


def test_all_pools_count_against_memory() -> None:
    config = EngineConfig(max_total_tokens=16 * 3000, swa_full_tokens_ratio=1.0)
    with pytest.raises(
        ConfigError, match=r"max_total_tokens 48000 needs 19,030 MiB for weights and KV, but only 16,384 MiB"
    ):
        choose_sizes(config, 65536, GEMMA)


def test_the_log_names_each_pool() -> None:
    sizes = choose_sizes(EngineConfig(max_total_tokens=16000), 32768, GEMMA)
    assert describe_pools(GEMMA, sizes, 16) == (
        "16000 KV tokens in 1,001 MiB, 6080 KV tokens with a window of 1024 in 1,905 MiB"
    )


HYBRID = Memory("tpu", 16 * GIB, GIB, (GroupMemory("full", 2**20), GroupMemory("mamba", 40 * 2**20, CacheKind.STATE)))
"""A state takes as much memory as keys and values of 640 tokens."""


def test_states_have_a_share_of_the_memory_for_pages() -> None:
    config = EngineConfig(mem_fraction_static=0.5, mamba_full_memory_ratio=0.5)
    full, slots = choose_sizes(config, 32768, HYBRID).num_pages
    assert slots - 1 == (full - 1) // 80
    assert 0 <= 7 * 1024 - (full + 40 * slots) < 41
    sizes = choose_sizes(EngineConfig(max_total_tokens=16 * 4000), 32768, HYBRID)
    assert sizes.num_pages == (4001, 1 + 90)
    assert sizes.max_rows == 45, "as many slots for cached prefixes as for rows"


def test_requested_slots_bound_the_rows() -> None:
    sizes = choose_sizes(EngineConfig(max_mamba_cache_size=30, max_running_requests=25), 32768, HYBRID)
    assert (sizes.num_pages[1], sizes.max_rows) == (31, 25)
    sizes = choose_sizes(EngineConfig(max_mamba_cache_size=20, max_running_requests=25), 32768, HYBRID)
    assert (sizes.num_pages[1], sizes.max_rows) == (21, 20)


def test_with_the_prefix_cache_off_there_are_no_spare_slots() -> None:
    config = EngineConfig(disable_radix_cache=True, max_mamba_cache_size=200, max_running_requests=25)
    sizes = choose_sizes(config, 32768, HYBRID)
    assert (sizes.num_pages[1], sizes.max_rows) == (26, 25)


def test_there_are_no_more_small_states_than_page_boundaries() -> None:
    tiny = Memory("tpu", 16 * GIB, GIB, (GroupMemory("full", 2**20), GroupMemory("mamba", 2**10, CacheKind.STATE)))
    sizes = choose_sizes(EngineConfig(max_total_tokens=1600, max_running_requests=8), 1024, tiny)
    assert sizes.num_pages == (101, 1 + 100 + 16)


def test_a_model_with_only_states_has_slots_and_any_context() -> None:
    alone = Memory("tpu", 16 * GIB, GIB, (GroupMemory("mamba", 40 * 2**20, CacheKind.STATE),))
    sizes = choose_sizes(EngineConfig(mem_fraction_static=0.5), 32768, alone)
    assert sizes.num_pages == (7 * 1024 // 40,)
    assert (sizes.max_context, sizes.max_rows) == (32768, (7 * 1024 // 40 - 1) // 2)
    assert describe_pools(alone, sizes, 16) == "178 recurrent states in 7,160 MiB"


def test_pages_of_a_draft_model_bound_the_context_of_a_model_with_only_states() -> None:
    """States then get a share of the memory for these pages, as for models with attention."""
    states = Memory("tpu", 16 * GIB, GIB, (GroupMemory("mamba", 40 * 2**20, CacheKind.STATE),))
    both = with_draft(states, GIB, (GroupMemory("full", 2**20),))
    sizes = choose_sizes(EngineConfig(max_total_tokens=16 * 1000), 32768, both)
    assert (sizes.num_pages, sizes.max_context) == ((1 + 900 // 40, 1001), 16000)
    assert describe_pools(both, sizes, 16).endswith(", 16000 KV tokens (draft full) in 1,001 MiB")
