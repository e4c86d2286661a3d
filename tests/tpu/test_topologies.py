"""Names of slices: Google Cloud's accelerator types, grids, and refused names."""

from __future__ import annotations

import pytest

from sglang_jax.errors import ConfigError
from tpu.topologies import CHIPS, GIB, Generation, parse_topology

# Grids, chips and nodes from the page of each generation: docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x.
SLICES = [
    ("v6e-1", "v6e:1x1", 1, 1, 1),
    ("v6e-4", "v6e:2x2", 4, 4, 1),
    ("v6e-8", "v6e:2x4", 8, 8, 1),
    ("v6e-16", "v6e:4x4", 16, 16, 4),
    ("v6e-256", "v6e:16x16", 256, 256, 64),
    ("v5litepod-16", "v5e:4x4", 16, 16, 4),
    ("v5litepod-128", "v5e:8x16", 128, 128, 32),
    ("tpu-v5litepod-4", "v5e:2x2", 4, 4, 1),
    ("v5p-8", "v5p:2x2x1", 4, 4, 1),
    ("v5p-16", "v5p:2x2x2", 8, 8, 2),
    ("v4-32", "v4:2x2x4", 16, 16, 4),
    ("v4-64", "v4:2x4x4", 32, 32, 8),
    ("v4-128", "v4:4x4x4", 64, 64, 16),
    ("v6e:2x2", "v6e:2x2", 4, 4, 1),
    ("V5E:2x4", "v5e:2x4", 8, 8, 1),
    ("tpu7x:2x2x1", "tpu7x:2x2x1", 4, 8, 1),
    ("ironwood:2x2x2", "tpu7x:2x2x2", 8, 16, 2),
]


@pytest.mark.parametrize(("name", "libtpu", "chips", "devices", "nodes"), SLICES)
def test_slice_names_are_parsed(name: str, libtpu: str, chips: int, devices: int, nodes: int) -> None:
    topology = parse_topology(name)
    assert (str(topology), topology.chips, topology.devices, topology.nodes) == (libtpu, chips, devices, nodes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100:8", "unknown topology"),
        ("v6e", "unknown topology"),
        ("v6e:2x2x1", "has 2 dimensions, as in v6e:2x4"),
        ("v5p:2x2", "has 3 dimensions, as in v5p:2x2x1"),
        ("v6e:0x4", "has 2 dimensions"),
        ("v6e-3", "power of two from 1"),
        ("v5p-4", "counts cores, two to a chip, and N is a power of two from 8"),
        ("tpu7x-8", "as in tpu7x:2x2x1"),
    ],
)
def test_an_unknown_name_is_refused_with_valid_ones(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_topology(name)


@pytest.mark.parametrize(
    ("name", "links"),
    [
        ("v6e:2x2", 2 / 4),
        ("v6e:2x4", 2 / 4),  # a corner of a grid has two neighbours
        ("v6e:16x16", 1),
        ("v5e:8x16", 3 / 4),
        ("v5p:2x2x1", 2 / 6),
        ("v5p:4x4x4", 1),
        ("v4:4x4x8", 1),
        ("v4:2x2x4", 3 / 6),  # an axis is closed only if all are of whole cubes
        ("v5p:2x4x4", 3 / 6),
        ("v6e:1x1", 1 / 4),  # no links, and nothing is sent
    ],
)
def test_a_chip_sends_over_its_links_in_the_slice(name: str, links: float) -> None:
    topology = parse_topology(name)
    assert topology.ici_bandwidth == pytest.approx(topology.chip.ici_bandwidth * links)


@pytest.mark.parametrize(
    ("name", "box", "links"),
    [
        ("v6e:2x4", (2, 2), 2 / 4),
        ("v6e:16x16", (4, 2), 2 / 4),  # only the whole axis is closed
        ("v6e:16x16", (16, 2), 3 / 4),
        ("v6e:2x4", (2, 1), 1 / 4),
        ("v5p:4x4x4", (4, 4, 4), 1),
        ("v5p:4x4x8", (4, 4, 4), 5 / 6),
        ("v5p:2x2x4", (2, 2, 1), 2 / 6),
        ("tpu7x:2x2x1", (2, 2, 1), 2 / 6),  # one of a chip's two devices sends to the next chip
        ("tpu7x:2x2x1", (2, 1, 1), 1 / 6),
        ("tpu7x:2x2x1", (1, 1, 1), 1),  # within the chip, as fast as six links
    ],
)
def test_a_group_exchanges_over_the_links_within_it(name: str, box: tuple[int, ...], links: float) -> None:
    topology = parse_topology(name)
    assert topology.exchange_bandwidth(box) == pytest.approx(topology.chip.ici_bandwidth * links)


def test_every_generation_has_a_chip() -> None:
    assert set(CHIPS) == set(Generation)
    assert len({chip.pci_id for chip in CHIPS.values()}) == len(CHIPS)


def test_chips_agree_with_what_jax_says_of_them() -> None:
    """JAX's figures are per core, rounded; programs may use a little less memory than a chip has."""
    from jax._src.pallas.mosaic.tpu_info import ChipVersion, _get_tpu_info_impl

    versions = {
        Generation.V4: ChipVersion.TPU_V4,
        Generation.V5E: ChipVersion.TPU_V5E,
        Generation.V5P: ChipVersion.TPU_V5P,
        Generation.V6E: ChipVersion.TPU_V6E,
        Generation.TPU7X: ChipVersion.TPU_7X,
    }
    for generation, chip in CHIPS.items():
        info = _get_tpu_info_impl(versions[generation], 1)
        assert chip.cores == versions[generation].num_physical_tensor_cores_per_chip
        assert chip.vmem == info.vmem_capacity_bytes
        assert chip.bf16_flops == pytest.approx(info.bf16_ops_per_second * chip.cores, rel=0.01)
        assert chip.hbm_bandwidth == pytest.approx(info.mem_bw_bytes_per_second * chip.cores, rel=0.13)
        assert 0.9 * info.hbm_capacity_bytes * chip.cores < chip.hbm * chip.devices < 96 * 2 * GIB
        assert chip.hbm * chip.devices < info.hbm_capacity_bytes * chip.cores
