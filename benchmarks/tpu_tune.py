"""Chooses block sizes of the attention kernels for a model, on a TPU or without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tpu_kernels.tuning_process import estimate_in_child

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.cli.main import run
from sglang_jax.config import KVCacheDtype, LoadFormat
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.runner.this_machine import has_tpu
from tpu.choices import PAGE_SIZE
from tpu.shapes import SHAPES, load_shape
from tpu.tables import table
from tpu.topologies import Generation

if TYPE_CHECKING:
    from tpu_kernels.tuning import Comparison, Heads

    from sglang_jax.kernels.ragged_paged_attention.pallas.table import Entry

_STORAGE = {KVCacheDtype.FLOAT8_E4M3: "float8_e4m3fn", KVCacheDtype.INT8: "int8"}


class CompareBy(StrEnum):
    """How sizes are compared; `AUTO` is on the device if there is a TPU."""

    AUTO = "auto"
    DEVICE = "device"
    SCHEDULE = "schedule"


_NEAR = 0.01
"""Choices that wait for memory are compared as equal within this share of their cost; the one with the fewest
instructions leaves most room for costs that the estimate excludes."""


@click.command()
@click.option(
    "--model",
    required=True,
    help=f"a folder (config.json is enough), a .gguf file, demo, a hub id, or a built-in shape: {', '.join(SHAPES)}",
)
@click.option(
    "--tp", "sizes", default=(1,), show_default=True, multiple=True, type=click.IntRange(min=1), help="devices"
)
@click.option(
    "--page-size",
    "page_sizes",
    default=(PAGE_SIZE,),
    show_default=True,
    multiple=True,
    type=click.IntRange(min=8),
    help="tokens per KV cache page",
)
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float32"]),
    help="dtype of weights",
)
@click.option(
    "--kv-cache-dtype",
    default=KVCacheDtype.AUTO.value,
    show_default=True,
    type=click.Choice([kind.value for kind in KVCacheDtype]),
    help="dtype of the KV cache; auto: --dtype",
)
@click.option(
    "--by",
    default=CompareBy.AUTO.value,
    show_default=True,
    type=click.Choice([way.value for way in CompareBy]),
    help="device: time on this machine's TPU; schedule: the compiler's schedule for --chip; auto: device if there is "
    "a TPU",
)
@click.option(
    "--chip",
    default=None,
    type=click.Choice([generation.value for generation in Generation]),
    help="chip for --by schedule",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="table to extend; default: the one that the kernels read",
)
def tune(
    *,
    model: str,
    sizes: Sequence[int],
    page_sizes: Sequence[int],
    dtype: str,
    kv_cache_dtype: str,
    by: str,
    chip: str | None,
    output: Path | None,
) -> int:
    """Tune attention block sizes for a model. --tp and --page-size may be repeated."""
    on_device = CompareBy(by) is CompareBy.DEVICE or (CompareBy(by) is CompareBy.AUTO and has_tpu())
    if on_device and chip is not None:
        raise click.UsageError("--chip is only for --by schedule: --by device tunes for this machine's chip")
    if not on_device and chip is None:
        raise click.UsageError("--by schedule needs --chip")
    storage = _STORAGE.get(KVCacheDtype(kv_cache_dtype), dtype)
    every = _heads(_model_config(model), sizes, page_sizes, storage)
    # Imported here, because it imports JAX.
    from sglang_jax.kernels.ragged_paged_attention.pallas.table import TABLE, read_table, write_table

    path = output or TABLE
    known = read_table(path) if path.exists() else {}
    _try_to_write(path)
    compared = _on_device(every) if on_device else estimate_in_child(Generation(chip or ""), every)
    for best in _best_of_each(compared, "us" if on_device else "cycles"):
        known[best.shape, best.phase] = best
        write_table(known.values(), path)
    click.echo(f"Written to {path}")
    return 0


def _try_to_write(path: Path) -> None:
    """Raises `ConfigError` if the table cannot be written, before all the timing."""
    new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(
            f"the table {path} cannot be written ({error.strerror}): name another with --output"
        ) from error
    if new:
        path.unlink()


def _model_config(model: str) -> ModelConfig:
    return load_shape(model) if model in SHAPES else open_checkpoint(model, LoadFormat.DUMMY).config


def _heads(config: ModelConfig, sizes: Sequence[int], page_sizes: Sequence[int], storage: str) -> tuple[Heads, ...]:
    """Attention heads of one device for each number of devices, page size and kind of layer.

    **Raises:** `ConfigError` if a page size is not a power of two, or the model cannot be sharded over the devices.
    """
    from tpu_kernels.tuning import Heads

    found = []
    for size in sizes:
        built = TensorParallel.of(config, Parallelism(size)).config
        for page_size in page_sizes:
            if page_size & (page_size - 1):
                raise ConfigError(f"page_size must be a power of two, got {page_size}")
            for mixer in built.kv_attention:
                heads, kv_heads = mixer.num_heads // size, mixer.num_kv_heads // size
                found.append(Heads(heads, kv_heads, mixer.head_dim, page_size, storage))
    return tuple(dict.fromkeys(found))


def _on_device(every: tuple[Heads, ...]) -> Iterator[Comparison]:
    from tpu_kernels.tuning import compare_on_device

    return compare_on_device(every)


def _best_of_each(compared: Iterator[Comparison], unit: str) -> Iterator[Entry]:
    """Yields and prints the cheapest choice of each shape and phase, once all its choices are compared: among those of
    nearly the same cost, the one with the fewest instructions; one that spills only if all do.

    **Raises:** `ConfigError` if none compiles.
    """
    group: list[Comparison] = []
    for comparison in compared:
        if group and (group[0].entry.shape, group[0].entry.phase) != (comparison.entry.shape, comparison.entry.phase):
            yield _best(group, unit)
            group = []
        group.append(comparison)
    if group:
        yield _best(group, unit)


def _best(group: list[Comparison], unit: str) -> Entry:
    shape, phase = group[0].entry.shape, group[0].entry.phase
    what = (
        f"{phase.value} on {shape.chip.value}: {shape.heads} heads, {shape.kv_heads} kv heads of {shape.head_dim}, "
        f"pages of {shape.page_size}, {shape.storage}"
    )
    costs = [(comparison.spills, comparison.cost, comparison) for comparison in group if comparison.cost is not None]
    if not costs:
        raise ConfigError(f"no block sizes compile for {what}")
    least_spills, least, _ = min(costs, key=lambda each: each[:2])
    near = [(cost, each) for spills, cost, each in costs if spills == least_spills and cost <= least * (1 + _NEAR)]
    _, best = min(near, key=lambda each: each[0] if each[1].instructions is None else each[1].instructions)
    factor = 1e6 if unit == "us" else 1.0
    lines = [
        [
            f"{comparison.entry.queries} x {comparison.entry.pages * shape.page_size}",
            "does not compile" if comparison.cost is None else f"{comparison.cost * factor:,.0f}",
            "chosen" if comparison is best else "spills" if comparison.spills else "",
        ]
        for comparison in group
    ]
    click.echo("\n".join([what, *table(["queries x keys", unit, ""], lines)]))
    return best.entry


if __name__ == "__main__":
    sys.exit(run(tune, "python benchmarks/tpu_tune.py"))
