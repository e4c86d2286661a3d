"""`python -m tpu.check`: checks whether a model runs on a TPU slice, by compiling ahead of time, without a TPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from pydantic import ValidationError

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint import ParameterReader, TensorReader
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.cli.main import run
from sglang_jax.cli.options import one_model, option_by_all_names
from sglang_jax.cli.result_file import check_result_file, writing
from sglang_jax.config import (
    AttentionBackend,
    Deterministic,
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    SpeculativeAlgorithm,
    Task,
    TpuActivations,
    WeightQuantization,
)
from sglang_jax.errors import ConfigError
from sglang_jax.runner.quantization import quantization_of, quantization_wanted
from tpu.alternatives import Setup, shortage_in, suggest_fitting, suggest_remedies
from tpu.choices import PAGE_SIZE, memory_fraction
from tpu.figures import CacheEntries, Deployment, Notice, ProgramFailure, ProgramFigures, Refusal, Request, Selection
from tpu.report import Report, heading, render
from tpu.shapes import SHAPES, load_shape, stored_quantization
from tpu.topologies import parse_topology
from tpu.worker import compile_in_child, require_compiler

DOES_NOT_FIT = 1


@click.command()
@click.argument("model", required=False)
@option_by_all_names(
    "model_path",
    help=f"a folder (config.json is enough), a .gguf file, demo, a hub id, or a built-in shape: {', '.join(SHAPES)}; "
    "also without a flag",
)
@click.option("--topology", required=True, help="TPU slice, such as v6e:2x2, v6e-4, v5litepod-16, v5p-8, tpu7x:2x2x1")
@option_by_all_names("tp_size", default=1, show_default=True, type=click.IntRange(min=1), help="devices per replica")
@option_by_all_names(
    "ep_size",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="into how many parts the experts are divided among these devices",
)
@click.option("--enable-expert-parallel", is_flag=True, help="as --ep-size with the number of --tp-size")
@click.option(
    "--enable-dp-attention", is_flag=True, help="each of these devices computes the attention of separate rows"
)
@option_by_all_names(
    "context_length", type=click.IntRange(min=1), help="maximum tokens of a request; default: the model's"
)
@option_by_all_names(
    "page_size", default=PAGE_SIZE, show_default=True, type=click.IntRange(min=1), help="tokens per KV cache page"
)
@option_by_all_names(
    "max_total_tokens",
    type=click.IntRange(min=1),
    help="tokens of the KV cache; default: as many as fit",
)
@option_by_all_names(
    "max_running_requests", type=click.IntRange(min=1), help="maximum concurrent requests  [default: 256]"
)
@option_by_all_names(
    "chunked_prefill_size", type=click.IntRange(min=1), help="maximum prompt tokens per step  [default: 512]"
)
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "bfloat16", "float32"]),
    help="dtype of weights",
)
@click.option(
    "--quantization",
    default=WeightQuantization.AUTO.value,
    show_default=True,
    type=click.Choice([kind.value for kind in WeightQuantization]),
    help="dtype of the matrices of layers; auto: as the checkpoint stores them",
)
@click.option(
    "--tpu-activations",
    default=TpuActivations.AUTO.value,
    show_default=True,
    type=click.Choice([kind.value for kind in TpuActivations]),
    help="activations in products with 8-bit matrices; auto: the server's choice",
)
@click.option(
    "--kv-cache-dtype",
    default=KVCacheDtype.AUTO.value,
    show_default=True,
    type=click.Choice([kind.value for kind in KVCacheDtype]),
    help="dtype of the KV cache",
)
@click.option(
    "--mem-fraction-static", type=float, help="fraction of HBM for weights and KV cache; default: depends on the chip"
)
@click.option(
    "--attention-backend",
    default=AttentionBackend.AUTO.value,
    show_default=True,
    type=click.Choice([backend.value for backend in AttentionBackend]),
    help="attention implementation; auto: the server's choice on a TPU",
)
@click.option(
    "--speculative-algorithm",
    default=SpeculativeAlgorithm.NONE.value,
    show_default=True,
    type=click.Choice([algorithm.value for algorithm in SpeculativeAlgorithm]),
    help="how the server drafts tokens ahead; draft: not supported here yet",
)
@option_by_all_names(
    "speculative_num_draft_tokens", type=click.IntRange(min=1), help="maximum drafts per request and step"
)
@click.option(
    "--enable-deterministic-inference", is_flag=True, help="compile for results that do not depend on the step"
)
@click.option(
    "--deterministic",
    default=Deterministic.NONE.value,
    show_default=True,
    type=click.Choice([level.value for level in Deterministic]),
    help="tp: compile for results that do not depend on the number of devices either",
)
@click.option(
    "--all", "everything", is_flag=True, help="compile every program, not only the largest and smallest steps"
)
@click.option(
    "--roofline-context",
    type=click.IntRange(min=1),
    help="context length of each decode row in the roofline estimate; default: an equal share of the KV cache",
)
@click.option("--quick", is_flag=True, help="compile only the largest decode and the largest mixed step")
@click.option(
    "--write-cache",
    "compilation_cache_dir",
    help="folder (or gs://...) to write compiled programs to, for a server's --compilation-cache-dir",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write the results to"
)
def check(
    *,
    model: str | None,
    model_path: str | None,
    topology: str,
    tp_size: int,
    everything: bool,
    quick: bool,
    json_file: Path | None,
    roofline_context: int | None,
    **given: object,
) -> int:
    """Compile the programs that would serve MODEL on a TPU slice, and report whether they fit.

    Needs jax and libtpu, but no TPU. The exit status is 0 if everything fits, 1 if something does not compile or fit.
    """
    model, tp = one_model(model, model_path), tp_size
    if model is None:
        raise click.UsageError("no model is given: name one, as in `check qwen3-8b --topology v6e-1`")
    check_result_file(json_file, "--json")
    require_compiler()
    if everything and quick:
        raise click.UsageError("give only one of --all and --quick")
    slice_ = parse_topology(topology)
    given = {name: value for name, value in given.items() if value is not None}
    options = _options(model, tp, {"mem_fraction_static": memory_fraction(slice_.chip), **given})
    config, encodings = _model_and_encodings(model, options)
    request = Request(
        model=config,
        options=options,
        topology=slice_,
        selection=Selection.ALL if everything else Selection.QUICK if quick else Selection.ENDS,
        encodings=encodings,
    )
    found = _compile(request, partial(heading, model, slice_, tp, compiler=_compiler()))
    if isinstance(found, Refusal):
        remedy = suggest_fitting(Setup(request.model, slice_, request.options, request.encodings))
        click.echo(f"DOES NOT FIT: {found.reason}" + ("" if remedy is None else f". Would fit: {remedy}"))
        return DOES_NOT_FIT
    report = Report(
        model, slice_, tp, found.deployment, found.programs, found.failures, found.notices, roofline_context
    )
    if (shortage := _shortage(report)) is not None:
        report = replace(
            report, remedy=suggest_remedies(Setup(request.model, slice_, request.options, request.encodings), shortage)
        )
    click.echo("\n".join(render(report)))
    if json_file is not None:
        with writing(json_file, "--json"):
            json_file.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    kept = request.options.compilation_cache_dir is None or _report_cache(request.options, found)
    return 0 if report.problem is None and kept else DOES_NOT_FIT


def _shortage(report: Report) -> int | None:
    """Missing bytes of HBM; None if none are missing or the number is unknown."""
    if report.failures:
        return shortage_in(report.failures[0].reason)
    return -report.headroom if report.headroom < 0 else None


@dataclass(slots=True)
class _Found:
    """The compiling process's messages about a deployment."""

    deployment: Deployment
    programs: list[ProgramFigures] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failures: list[ProgramFailure] = field(default_factory=list)
    kept: CacheEntries = field(default_factory=lambda: CacheEntries(0, 0))


def _compile(request: Request, heading_of: Callable[[Deployment], list[str]]) -> _Found | Refusal:
    """Compiles, and prints the deployment as soon as it is known. Returns a `Refusal` for a model that leaves no room.
    Raises `ConfigError` for invalid options, or if nothing was compiled."""
    found: _Found | None = None
    early: list[str] = []
    for message in compile_in_child(request):
        match message:
            case Refusal(reason=reason, of_options=True):
                raise ConfigError(reason)
            case Refusal():
                return message
            case Notice(text=text):
                (early if found is None else found.notices).append(text)
            case Deployment():
                found = _Found(message, notices=early)
                click.echo("\n".join(heading_of(message)))
            case ProgramFigures() if found is not None:
                found.programs.append(message)
            case ProgramFailure() if found is not None:
                found.failures.append(message)
            case CacheEntries() if found is not None:
                found.kept = message
        if found is not None:
            _show_progress(found.deployment, len(found.programs) + len(found.failures))
    if found is None:
        raise ConfigError("the compiling process ended without a result")
    return found


def _report_cache(options: EngineConfig, found: _Found) -> bool:
    """Prints where the programs are, and the options with which a server finds them. Returns False if none was written.
    A server that measures its memory may choose another number of pages, which is part of every program."""
    folder, kept = options.compilation_cache_dir, found.kept
    if not kept.entries:
        click.echo(f"No compiled program was written to {folder}", err=True)
        return False
    click.echo(f"{kept.entries} compiled programs are in {folder}, {kept.written} of them new", err=True)
    tokens, ranks = found.deployment.kv_tokens, found.deployment.ranks
    pages = "" if tokens is None else f" --max-total-tokens {tokens // ranks}"
    flags = f"--compilation-cache-dir {folder} --page-size {options.page_size}{pages}"
    click.echo(f"Start the server with {flags} and the options given here", err=True)
    return True


def _model_and_encodings(model: str, options: EngineConfig) -> tuple[ModelConfig, dict[ParameterName, Encoding]]:
    if model in SHAPES:
        config = load_shape(model)
        quantization = quantization_wanted(options.quantization)
        reader: TensorReader = DummyReader(config, seed=0, stored=stored_quantization(model))
    else:
        checkpoint = open_checkpoint(model, LoadFormat.DUMMY, task=Task.GENERATE)
        config, quantization = checkpoint.config, quantization_of(options, checkpoint)
        assert checkpoint.reader is not None, "one of random weights"
        reader = checkpoint.reader
    encoding = ParameterReader(reader, config, quantization).encoding
    encodings = {name: encoding(name) for name in manifest_of(config).specs}
    return config, {name: found for name, found in encodings.items() if found is not None}


def _options(model: str, tp: int, set_: dict[str, object]) -> EngineConfig:
    try:
        return EngineConfig(
            **{
                **set_,
                "model_path": model,
                "tp_size": tp,
                "device": Device.TPU,
                "debug_memory": False,
                "dtype": Dtype(str(set_["dtype"])),
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = f"{problem['loc'][0]}: " if problem["loc"] else ""
        raise ConfigError(where + problem["msg"].removeprefix("Value error, ")) from error


def _compiler() -> str:
    versions = []
    for package in ("libtpu", "jax"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(package)
    return ", ".join(versions)


def _show_progress(deployment: Deployment, done: int) -> None:
    """Prints which program is being compiled, only on a terminal."""
    if sys.stderr.isatty():
        left = deployment.programs[done] if done < len(deployment.programs) else "done"
        click.echo(f"\r\x1b[Kcompiling {done + 1}/{len(deployment.programs)}: {left}", nl=False, err=True)
        if done == len(deployment.programs):
            click.echo("\r\x1b[K", nl=False, err=True)


if __name__ == "__main__":
    sys.exit(run(check, "python -m tpu.check"))
