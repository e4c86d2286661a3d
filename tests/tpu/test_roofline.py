"""FLOPs and bytes of a step, against independently computed numbers."""

from __future__ import annotations

import pytest
from helpers.small_configs import small_config

from tpu.roofline import Bound, Device, Work, roofline, step_flops
from tpu.shapes import SHAPES, load_shape

V6E = Device(flops=918e12, hbm_bandwidth=1638e9, ici_bandwidth=400e9)
LLAMA = load_shape("llama-3.1-8b")
LLAMA_WEIGHTS = 16_060_522_496  # bytes of the released checkpoint, in bfloat16
LLAMA_TABLE = 128256 * 4096 * 2
LLAMA_KV = 32 * 2 * 8 * 128 * 2


def test_a_prompt_token_costs_two_flops_for_each_weight() -> None:
    without_attention = step_flops(LLAMA, Work(tokens=1, rows=1, keys_seen=0, keys_read=0))
    assert without_attention == pytest.approx(LLAMA_WEIGHTS - LLAMA_TABLE, rel=1e-4)


def test_attention_of_a_small_model_by_hand() -> None:
    config = small_config()
    both = step_flops(config, Work(3, 1, 6, 3)) - step_flops(config, Work(3, 1, 0, 3))
    # two layers, six pairs of query and key, 4 heads of 16: a product of 16 for the score, another for the value
    assert both == 2 * 6 * 4 * (2 * 16 + 2 * 16)
    assert Work.prefill(3) == Work(3, 1, 6, 3)


def test_a_decode_step_is_memory_bound() -> None:
    bounds = roofline(LLAMA, Work.decode(64, 1000), V6E, tp=1, weight_bytes=LLAMA_WEIGHTS, kv_bytes_per_token=LLAMA_KV)
    logits = 2 * 4 * 64 * 128256
    assert bounds.hbm_bytes == pytest.approx(LLAMA_WEIGHTS - LLAMA_TABLE + LLAMA_KV * 64 * 1001 + logits, rel=1e-6)
    assert bounds.bound is Bound.MEMORY
    assert bounds.seconds == bounds.memory == pytest.approx(bounds.hbm_bytes / 1638e9)


def test_tables_are_not_quantised() -> None:
    """Of a model in groups of 4 bits, the embeddings that are not looked up have two bytes a number."""
    weights = LLAMA_TABLE * 2 + (LLAMA_WEIGHTS - 2 * LLAMA_TABLE) // 4
    bounds = roofline(LLAMA, Work.decode(1, 0), V6E, tp=1, weight_bytes=weights, kv_bytes_per_token=0)
    assert bounds.hbm_bytes == weights - LLAMA_TABLE + 2 * 4 * 128256


def test_recurrent_states_are_read_and_written_once_for_each_row() -> None:
    def read(states: int) -> float:
        sizes = {"weight_bytes": LLAMA_WEIGHTS, "kv_bytes_per_token": LLAMA_KV, "state_bytes_per_row": states}
        return roofline(LLAMA, Work.decode(64, 1000), V6E, tp=1, **sizes).hbm_bytes

    assert read(1000) - read(0) == 2 * 1000 * 64


def test_a_long_prompt_is_compute_bound() -> None:
    bounds = roofline(LLAMA, Work.prefill(4096), V6E, tp=1, weight_bytes=LLAMA_WEIGHTS, kv_bytes_per_token=LLAMA_KV)
    assert bounds.bound is Bound.COMPUTE
    assert bounds.exchange == 0


def test_devices_share_the_work_and_exchange_the_sums_of_layers() -> None:
    def bounds(tp: int, exchanged: float | None = None):
        return roofline(
            LLAMA,
            Work.decode(64, 1000),
            V6E,
            tp=tp,
            weight_bytes=LLAMA_WEIGHTS // tp,
            kv_bytes_per_token=LLAMA_KV // tp,
            exchanged=exchanged,
        )

    assert bounds(4).flops == pytest.approx(bounds(1).flops / 4)
    assert bounds(4).hbm_bytes == pytest.approx(bounds(1).hbm_bytes / 4, rel=1e-3)
    sums = 65 * 2 * (3 / 4) * 64 * 4096 * 2
    assert bounds(4).exchanged_bytes == pytest.approx(sums + 3 * 4 * 64 * 3)
    assert bounds(4, exchanged=1e6).exchange == pytest.approx(1e6 / V6E.ici_bandwidth)


def test_ranks_read_the_keys_of_their_own_rows() -> None:
    """Latent vectors have no heads to divide: without ranks, each device reads those of all rows."""
    config = load_shape("deepseek-v3")
    kv = config.num_layers * 576 * 2

    def keys(work: Work, ranks: int) -> float:
        sizes = [
            roofline(config, work, V6E, tp=64, ranks=ranks, weight_bytes=2**34, kv_bytes_per_token=each).hbm_bytes
            for each in (kv, 0)
        ]
        return sizes[0] - sizes[1]

    assert keys(Work.decode(64, 4096), 1) == 64 * 4097 * kv
    assert keys(Work.decode(64, 4096), 64) == 4097 * kv
    assert keys(Work.prefill(2048, 4), 4) == 2 * 512 * kv
    assert Work.prefill(2048, 4).keys_seen == 4 * 512 * 513 // 2


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-32b", 32.8), ("gemma-3-27b", 27.0)])
def test_parameter_counts_are_the_published_ones(name: str, billions: float) -> None:
    config = load_shape(name)
    embeddings = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert (step_flops(config, Work(1, 1, 0, 0)) / 2 + embeddings) / 1e9 == pytest.approx(billions, rel=0.003)
    assert name in SHAPES


def test_layers_with_a_window_read_only_the_window() -> None:
    """In Gemma 3 every sixth layer reads all 4,096 keys of a row, the others 1,024."""
    work = Work.decode(8, 4096)
    assert work.within(1024) == Work.decode(8, 1024)
    assert work.within(None) == work.within(5000) == work
    chunk = Work.prefill(6)
    assert chunk.within(4) == Work(6, 1, 1 + 2 + 3 + 4 + 4 + 4, 6)
    config = load_shape("gemma-3-27b")
    seen = step_flops(config, work) - step_flops(config, Work(8, 8, 0, 0))
    assert seen == 4.0 * 32 * 128 * 8 * (10 * 4096 + 52 * 1024)
