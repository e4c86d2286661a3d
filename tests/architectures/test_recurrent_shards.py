"""Which channels of a recurrent layer each device has, and which layers cannot be sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest

from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import GatedDeltaNetConfig, Mamba2Config, RecurrentConfig, ShortConvConfig
from sglang_jax.architectures.kinds.sections import rows_by_device, rows_of_device
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.errors import ConfigError

NORM = NormConfig(eps=1e-5)


def delta_net(keys: int, values: int) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig(num_key_heads=keys, num_value_heads=values, key_dim=3, value_dim=2, width=4, norm=NORM)


def mamba(heads: int, groups: int, norm_groups: int = 1, norm: NormConfig | None = NORM) -> Mamba2Config:
    return Mamba2Config(
        num_heads=heads, head_dim=2, state_size=3, num_groups=groups, width=4, norm=norm, norm_groups=norm_groups
    )


def short(channels: int) -> ShortConvConfig:
    return ShortConvConfig(channels=channels, width=3)


LAYERS = [
    (short(8), 4),
    (delta_net(4, 8), 2),
    (delta_net(2, 8), 8),
    (delta_net(4, 4), 4),
    (mamba(8, 4, 4), 2),
    (mamba(8, 1), 4),
    (mamba(8, 2, 2), 8),
]


@pytest.mark.parametrize(("layer", "size"), LAYERS, ids=str)
def test_a_device_has_the_channels_that_its_heads_read(layer: RecurrentConfig, size: int) -> None:
    """The convolution and the projection each have the channels that the head of that number reads."""
    for read in (attrgetter("convolution_sections"), attrgetter("input_sections")):
        sections = read(layer)
        stored = [
            [(number, unit, row) for row in range(section.rows)]
            for number, section in enumerate(sections)
            for unit in range(section.units)
        ]
        rows = [row for unit in stored for row in unit]
        found = [rows[number] for number in rows_by_device(sections, size)]
        heads = max(section.units for section in sections)
        wanted = []
        for device in range(size):
            own = range(device * heads // size, (device + 1) * heads // size)
            for number, section in enumerate(sections):
                units = dict.fromkeys(head * section.units // heads for head in own)
                wanted += [(number, unit, row) for unit in units for row in range(section.rows)]
        assert found == wanted
        for device in range(size):
            parts = rows_of_device(sections, device, size)
            built = read(layer.sharded(Parallelism(size)).of_one_device())
            assert [len(part) for part in parts] == [section.units * section.rows for section in built]


@pytest.mark.parametrize(("layer", "size"), LAYERS, ids=str)
def test_devices_shard_states_and_replicate_shared_inputs(layer: RecurrentConfig, size: int) -> None:
    built = layer.sharded(Parallelism(size))
    for whole, mine in zip(built.state, built.of_one_device().state, strict=True):
        shape = list(whole.shape)
        shape[whole.sharded_axis] //= size
        assert mine.shape == tuple(shape)
        assert math.prod(mine.shape) * size == math.prod(whole.shape)
    assert built.state[-1].shape[-2:] == layer.state[-1].shape[-2:] or isinstance(layer, ShortConvConfig)
    assert layer.sharded(Parallelism(1)) is layer
    assert np.prod(built.state[0].shape) >= np.prod(layer.state[0].shape)


@pytest.mark.parametrize(
    ("layer", "size", "message"),
    [
        (lambda: short(6), 4, "a short convolution of 6 channels cannot be spread over 4 devices: choose a tp_size"),
        (lambda: delta_net(2, 4), 8, "a delta net of 4 value heads and 2 key heads cannot be spread over 8 devices"),
        (lambda: delta_net(3, 6), 2, "6 value heads and 3 key heads cannot be spread over 2 devices"),
        (lambda: mamba(6, 2), 4, "Mamba-2 of 6 heads in 2 groups with a norm over 1 parts cannot be spread over 4"),
        (lambda: mamba(12, 3, norm=None), 2, "Mamba-2 of 12 heads in 3 groups cannot be spread over 2 devices"),
        (lambda: mamba(12, 2, norm_groups=3), 2, "with a norm over 3 parts cannot be spread over 2 devices"),
    ],
)
def test_layers_that_cannot_be_sharded_are_refused_with_their_sizes(
    layer: Callable[[], RecurrentConfig], size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layer().sharded(Parallelism(size))
