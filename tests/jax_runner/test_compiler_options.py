"""Which steps are compiled with a remedy, and that the page of them is true."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.compiler_options import REMEDIES, options_of_step

BUCKETS = Buckets.ladder(8, 64, 16)
DECODE, MIXED = BUCKETS.decode[-1], BUCKETS.mixed[-1]
NO_OFFLOAD = {"xla_tpu_offload_gather_to_sparsecore": "false"}


def test_decode_steps_of_a_tpu7x_send_no_gathers_away() -> None:
    assert options_of_step("tpu", "TPU7x", DECODE, (0, 11, 1)) == NO_OFFLOAD
    assert options_of_step("tpu", "TPU7x", DECODE, (0, 12, 0)) == NO_OFFLOAD


@pytest.mark.parametrize(
    ("kind", "bucket", "version"),
    [
        ("TPU7x", MIXED, (0, 11, 1)),
        ("TPU7x", DECODE, (0, 11, 0)),
        ("TPU7x", DECODE, (0, 10, 2)),
        ("TPU v6 lite", DECODE, (0, 11, 1)),
    ],
)
def test_others_are_compiled_as_the_compiler_likes(kind: str, bucket: object, version: tuple[int, ...]) -> None:
    assert options_of_step("tpu", kind, bucket, version) == {}


def test_the_option_is_for_tpus_alone() -> None:
    assert options_of_step("cpu", "cpu", DECODE) == {}
    with pytest.raises(ConfigError, match="TPU v99"):
        options_of_step("tpu", "TPU v99", DECODE)


def test_the_page_has_every_remedy() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text()
    for remedy in REMEDIES:
        for name, value in remedy.options.items():
            assert f"`{name}={value}`" in page
        assert f"| {remedy.chip} |" in page
