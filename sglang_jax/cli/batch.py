"""`batch`: files of requests, answered without a server."""

from __future__ import annotations

import importlib.util

import click

from sglang_jax.batch.options import BatchConfig, RayOptions, Runner
from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import flag_name, options_of, with_model
from sglang_jax.config import EngineConfig
from sglang_jax.errors import BatchError, how_to_install


@click.command(cls=GroupedCommand, short_help="Answer a file of requests, or resume it.")
@click.argument("model", required=False)
@click.option(
    "--engine",
    "runner",
    type=click.Choice([runner.value for runner in Runner]),
    default=Runner.LOCAL.value,
    show_default=True,
    help="run on this machine or on a Ray cluster; with Ray, input and output may be folders and URLs",
)
@options_of(batch=BatchConfig, ray=RayOptions, engine=EngineConfig)
def batch(batch: BatchConfig, ray: RayOptions, engine: EngineConfig, runner: str, model: str | None) -> int:
    """Answer every line of a file of requests with MODEL (as for --model-path).

    The same command resumes an interrupted run.

    A line is in OpenAI's batch format (custom_id, method, url, body) or plain: {"prompt": ...} or {"messages": ...} and
    further fields of the route. The exit status is 0, or 1 if some lines are in the error file.
    """
    engine = with_model(engine, model)
    if runner == Runner.RAY:
        return _run_on_ray(batch, ray, engine)
    if ray != RayOptions():
        given = ", ".join(flag_name(name) for name in RayOptions.model_fields if name in ray.model_fields_set)
        raise click.UsageError(f"{given}: these options need --engine ray")
    from sglang_jax.batch.run import run_batch  # imported late: --help must be fast

    return run_batch(batch, engine)


def _run_on_ray(batch: BatchConfig, ray: RayOptions, engine: EngineConfig) -> int:
    if importlib.util.find_spec("ray") is None:
        raise BatchError(f"--engine ray needs Ray: {how_to_install('ray')}")
    from sglang_jax.batch.ray.run import run_ray_batch

    return run_ray_batch(batch, ray, engine)
