"""What `tpu.check` suggests where a model leaves no room."""

from __future__ import annotations

import pytest
from helpers.small_configs import small_config

from tpu.alternatives import what_would_fit
from tpu.shapes import load_shape
from tpu.topologies import parse_topology


@pytest.mark.parametrize(
    ("topology", "tp", "expected"),
    [
        ("v6e:2x4", 1, "--tp 4 (15.3 GiB of weights on each device)"),
        ("v6e:1x1", 1, "--tp 4 --topology v6e:2x2 (15.3 GiB of weights on each device)"),
        ("v5e:2x4", 4, "--tp 8 (7.6 GiB of weights on each device)"),
        ("v5p:2x2x1", 1, "--tp 2 (30.5 GiB of weights on each device)"),
    ],
)
def test_the_next_step_up_that_leaves_room(topology: str, tp: int, expected: str) -> None:
    assert what_would_fit(load_shape("qwen3-32b"), parse_topology(topology), tp) == expected


def test_nothing_fits_a_model_that_cannot_be_spread() -> None:
    """Five heads, so that more devices than one are five, which no slice has."""
    model = small_config(num_heads=5, num_kv_heads=1, hidden_size=80, intermediate_size=96)
    assert what_would_fit(model, parse_topology("v6e:2x2"), 1) is None
