"""Recurrent layers over several devices: what must divide, what is copied, and which channels a device has.

Each device has whole heads, as of attention, and the channels of the convolution that these read. Of heads that share
keys (of a delta net), or directions of the state (of Mamba-2), it has what its own heads read; where there are fewer of
those than devices, neighbours have the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from sglang_jax.architectures.model_config import (
    GatedDeltaNetConfig,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
)
from sglang_jax.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Section:
    """A run of channels of `units` (heads, groups, or channels by themselves), each with so many `rows`."""

    units: int
    rows: int

    def part(self, device: int, size: int) -> range:
        """The rows that `device` of `size` has, counted from the section's beginning."""
        share = max(self.units // size, 1)
        first = device * self.units // size
        return range(first * self.rows, (first + share) * self.rows)


Sections = tuple[Section, ...]
"""What lies one behind the other along an axis of channels."""


def rows_of_device(sections: Sections, device: int, size: int) -> list[range]:
    """Rows of all sections that `device` of `size` has, a range of each section."""
    first, found = 0, []
    for section in sections:
        part = section.part(device, size)
        found.append(range(first + part.start, first + part.stop))
        first += section.units * section.rows
    return found


def rows_by_device(sections: Sections, size: int) -> list[int]:
    """The rows of all `size` devices, one device behind the other."""
    return list(chain.from_iterable(chain(*rows_of_device(sections, device, size)) for device in range(size)))


def input_sections(config: RecurrentConfig) -> Sections:
    """Of the projection to what passes the convolution, and to what stands beside it in the same product."""
    match config:
        case ShortConvConfig():
            return (Section(config.channels, 1),) * 3
        case GatedDeltaNetConfig():
            return convolution_sections(config)
        case Mamba2Config():
            gate, heads = Section(config.num_heads, config.head_dim), Section(config.num_heads, 1)
            return (gate, *convolution_sections(config), heads)


def convolution_sections(config: RecurrentConfig) -> Sections:
    """Of the channels of the convolution."""
    match config:
        case ShortConvConfig():
            return (Section(config.channels, 1),)
        case GatedDeltaNetConfig():
            keys = Section(config.num_key_heads, config.key_dim)
            return (keys, keys, Section(config.num_value_heads, config.value_dim))
        case Mamba2Config():
            directions = Section(config.num_groups, config.state_size)
            return (Section(config.num_heads, config.head_dim), directions, directions)


def spread(config: RecurrentConfig, size: int) -> RecurrentConfig:
    """The layer as it is built for `size` devices that share it.

    **Raises:** `ConfigError` if it cannot be divided so.
    """
    if size == 1:
        return config
    match config:
        case ShortConvConfig():
            if config.channels % size:
                raise _indivisible(f"a short convolution of {config.channels} channels", "the channels", size)
            return replace(config, shards=size)
        case GatedDeltaNetConfig():
            keys = config.num_key_heads
            if config.num_value_heads % size or not _shared(keys, size):
                raise _indivisible(
                    f"a delta net of {config.num_value_heads} value heads and {keys} key heads",
                    "the value heads, and that divides or is a multiple of the key heads",
                    size,
                )
            return replace(config, num_key_heads=max(keys, size), shards=size)
        case Mamba2Config():
            groups, parts = config.num_groups, config.norm_groups if config.norm is not None else size
            if config.num_heads % size or not _shared(groups, size) or not _shared(parts, size):
                raise _indivisible(
                    f"Mamba-2 of {config.num_heads} heads in {groups} groups"
                    + (f" with a norm over {parts} parts" if config.norm is not None else ""),
                    "the heads, and that divides or is a multiple of the groups"
                    + (" and the parts" if config.norm is not None else ""),
                    size,
                )
            return replace(config, num_groups=max(groups, size), shards=size)


def of_one_device(config: RecurrentConfig) -> RecurrentConfig:
    """What each of the devices that share the layer computes by itself, which its norms over all heads are not."""
    size = config.shards
    match config:
        case ShortConvConfig():
            return replace(config, channels=config.channels // size, shards=1)
        case GatedDeltaNetConfig():
            keys, values = config.num_key_heads // size, config.num_value_heads // size
            return replace(config, num_key_heads=keys, num_value_heads=values, shards=1)
        case Mamba2Config():
            heads, groups = config.num_heads // size, config.num_groups // size
            return replace(config, num_heads=heads, num_groups=groups, shards=1)


def _shared(count: int, size: int) -> bool:
    """Each of `size` devices has whole ones of so many, or several neighbours the same one."""
    return count % size == 0 or size % count == 0


def _indivisible(what: str, divides: str, size: int) -> ConfigError:
    return ConfigError(f"{what} cannot be spread over {size} devices: choose a tp_size that divides {divides}")
