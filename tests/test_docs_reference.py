"""The reference pages match the code: flags, routes, fields, limits, metrics, log lines, messages, names."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from fastapi import FastAPI
from helpers.engine_fakes import MODEL_INFO
from helpers.scheduling import Bench
from prometheus_client.metrics_core import Metric

from sglang_jax import Engine, SamplingParams, errors
from sglang_jax.architectures import CacheKind
from sglang_jax.batch.served import record as batch_record
from sglang_jax.batch.served.routes import serve_batches
from sglang_jax.cli.main import cli
from sglang_jax.cli.options import flag_name
from sglang_jax.config import EngineConfig, OptionGroup, ServerConfig
from sglang_jax.config.groups import FIELDS, SUMMARIES
from sglang_jax.engine.engine import RequestOptions
from sglang_jax.engine.types import FinishKind, GenerateOutput, ReplicaLoad, ReplicaState, TokenLogprob
from sglang_jax.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from sglang_jax.scheduler.messages import ExpertBalance, SchedulerStats
from sglang_jax.server import errors as server_errors
from sglang_jax.server.anthropic_schema import MessagesBody
from sglang_jax.server.app import create_app, create_context
from sglang_jax.server.auth import ROUTES_PATH
from sglang_jax.server.context import ServerContext
from sglang_jax.server.control import AbortBody
from sglang_jax.server.fields import IGNORED_FIELDS, MAX_STOP_STRINGS, NEUTRAL_VALUES, Body
from sglang_jax.server.file_store import FileStore
from sglang_jax.server.management import DetokenizeBody, TokenizeBody
from sglang_jax.server.native_schema import GenerateBody
from sglang_jax.server.ollama_schema import OllamaChatBody, OllamaOptions, OllamaPromptBody
from sglang_jax.server.openai_schema import ChatBody, CompletionBody, StreamOptions
from sglang_jax.server.responses_schema import ResponsesBody
from sglang_jax.server.sampling import NativeSampling, SamplingFields

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglang_jax"
TORCH_BACKEND = ROOT / "torch_backend"
OPERATIONS = (ROOT / "docs/operations.md").read_text()
API = (ROOT / "docs/api.md").read_text()
ARCHITECTURE = "".join(
    path.read_text() for path in (ROOT / "docs/architecture.md", *sorted((ROOT / "docs/architecture").glob("*.md")))
)
DEFAULTS_IN_WORDS = frozenset(
    {
        "revision",
        "tokenizer_path",
        "tokenizer_revision",
        "speculative_draft_model_path",
        "context_length",
        "max_total_tokens",
        "swa_full_tokens_ratio",
        "max_mamba_cache_size",
        "max_running_requests",
        "max_queued_requests",
        "chunked_prefill_size",
        "cuda_graph_max_bs",
        "dist_init_addr",
        "response_store",
        "dist_bind_host",
        "group_secret_file",
        "target_itl_ms",
        "compilation_cache_dir",
        "dump_graphs",
        "profile_dir",
        "test_retract",
        "test_evict",
        "debug_memory",
        "served_model_name",
        "connect",
        "allowed_hosts",
        "allowed_origins",
        "api_key",
        "api_key_file",
        "api_keys",
        "admin_api_key",
        "admin_api_key_file",
        "chat_template",
        "files_dir",
        "otlp_traces_endpoint",
    }
)
"""Options whose default depends on the model, the device or the environment, or is None."""


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ServerContext:
    load = ReplicaLoad(
        index=0,
        state=ReplicaState.SERVING,
        max_running_requests=1,
        max_total_tokens=1,
        stats=SchedulerStats(experts=[ExpertBalance(0, 1, 1.0)]),
    )
    client = SimpleNamespace(model_info=MODEL_INFO, loads=lambda: [load], alive=True)
    files = FileStore(tmp_path_factory.mktemp("files"), max_file_bytes=1, max_bytes=1)
    return create_context(client, ServerConfig(), files=files)


@pytest.fixture(scope="module")
def app(context: ServerContext) -> FastAPI:
    assert context.files is not None
    return create_app(context, serve_batches(context, context.files))


def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next heading of its level or above."""
    level = heading.split()[0]
    found = re.search(rf"^{re.escape(heading)}$(.*?)(?=^#{{1,{len(level)}}} |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {heading!r}"
    return found[1]


def table_rows(text: str) -> list[list[str]]:
    """Cells of the body of every table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {index - 1 for index, row in enumerate(rows) if set("".join(row)) <= {"-"}}
    return [row for index, row in enumerate(rows) if index not in heads and index - 1 not in heads]


def code_words(text: str) -> set[str]:
    """Every word within backticks."""
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", span)}


def test_the_flags_are_those_of_the_server_in_the_groups_of_help() -> None:
    parts = re.split(r"^\*\*`(\w+)`\*\*: (.*)$", section(OPERATIONS, "## Flags"), flags=re.MULTILINE)[1:]
    described = [
        (group, summary, [row[0].strip("`") for row in table_rows(table)])
        for group, summary, table in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]
    assert described == [
        (group, SUMMARIES[group], [flag_name(field) for field in fields]) for group, fields in FIELDS.items()
    ]


def test_the_engine_has_the_groups_up_to_development() -> None:
    groups = list(FIELDS)
    engine = groups[: groups.index(OptionGroup.DEVELOPMENT) + 1]
    assert {field for group in engine for field in FIELDS[group]} == set(EngineConfig.model_fields)


@pytest.mark.parametrize("row", table_rows(section(OPERATIONS, "## Flags")), ids=lambda row: row[0].strip("`"))
def test_defaults_and_choices_of_a_flag(row: list[str]) -> None:
    flag, default, meaning = row
    name = flag.strip("`-").replace("-", "_")
    option = ServerConfig.model_fields[name]
    if name not in DEFAULTS_IN_WORDS:
        assert default == ("off" if option.default is False else f"`{option.default}`")
    if isinstance(option.annotation, type) and issubclass(option.annotation, StrEnum):
        assert {member.value for member in option.annotation} <= code_words(meaning)


def test_every_route_is_described(app: FastAPI) -> None:
    paths = app.openapi()["paths"]
    assert "/v1/chat/completions" in paths
    described = set(re.findall(r"`(?:(?:GET|POST|DELETE) )?(/[a-z0-9_/{}]+)`", API))
    assert described == {*paths, ROUTES_PATH}
    for path, operations in paths.items():
        for method in operations:
            assert re.search(rf"`?{method.upper()}`?[^\n]*`?{re.escape(path)}`", API), f"{method} {path}"


@pytest.mark.parametrize(
    ("heading", "body"),
    [
        ("## `POST /v1/chat/completions`", ChatBody),
        ("## `POST /v1/responses`", ResponsesBody),
        ("## `POST /v1/messages`", MessagesBody),
        ("## `POST /api/chat`", OllamaChatBody),
        ("## `POST /v1/completions`", CompletionBody),
        ("## `POST /generate`", GenerateBody),
    ],
)
def test_the_fields_of_a_body_are_in_its_tables(heading: str, body: type[Body]) -> None:
    """Each in the table of its route or in that of both OpenAI routes, and the tables have no other fields."""
    own = {name for row in table_rows(section(API, heading)) for name in code_words(row[0])}
    shared = {name for row in table_rows(section(API, "## Common rules")) for name in code_words(row[0])}
    assert own <= set(body.model_fields)
    if body is not GenerateBody:
        own |= shared | set(SamplingFields.model_fields) | {"model"}
    assert not set(body.model_fields) - own


@pytest.mark.parametrize("body", [SamplingFields, StreamOptions])
def test_shared_fields_are_described(body: type[Body]) -> None:
    assert set(body.model_fields) <= code_words(section(API, "## Common rules"))


@pytest.mark.parametrize(
    ("heading", "body"),
    [
        ("## `POST /generate`", NativeSampling),
        ("## `POST /api/chat`", OllamaOptions),
        ("## `POST /api/chat`", OllamaPromptBody),
        ("## Control", AbortBody),
        ("## Tokenizer", TokenizeBody),
        ("## Tokenizer", DetokenizeBody),
    ],
)
def test_fields_described_in_passing(heading: str, body: type[Body]) -> None:
    assert set(body.model_fields) - set(SamplingFields.model_fields) <= code_words(section(API, heading))


def test_ignored_fields_are_listed() -> None:
    rules = code_words(section(API, "## Common rules"))
    assert set(IGNORED_FIELDS) | set(NEUTRAL_VALUES) <= rules


def error_codes() -> Iterator[tuple[int, str]]:
    """Status and code of every error class, and codes given where an error is raised."""
    for module in (errors, server_errors, batch_record):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, errors.RequestError):
                yield value.status, value.code
    yield from ((400, "missing_field"), (400, "malformed_json"), (400, "engine_busy"), (500, "internal_error"))
    yield from ((404, "not_found"), (405, "method_not_allowed"), (400, "malformed_http"), (431, "head_too_large"))


def test_every_error_code_is_described_with_its_status() -> None:
    described = {
        (int(status), code)
        for status, codes, _ in table_rows(section(API, "## Errors"))
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert described == set(error_codes())


def test_codes_given_where_an_error_is_raised_are_described() -> None:
    source = "\n".join(path.read_text() for path in (PACKAGE / "server").glob("*.py"))
    assert set(re.findall(r'code="(\w+)"', source)) <= code_words(section(API, "## Errors"))


def test_sampling_params_are_described_with_their_defaults() -> None:
    rows = table_rows(section(API, "# SamplingParams"))
    described = {row[0].strip("`"): row[1].strip("`") for row in rows}
    defaults = {
        field.name: {} if field.name == "logit_bias" else field.default for field in dataclasses.fields(SamplingParams)
    }
    assert described == {name: str(default) for name, default in defaults.items()}


def test_limits() -> None:
    limits = {row[0]: row[1] for row in table_rows(section(API, "# Limits"))}
    assert limits["stop strings of an HTTP request"] == str(MAX_STOP_STRINGS)
    assert limits["token ids that end a request"] == str(MAX_STOP_TOKEN_IDS)
    assert limits["entries of `logit_bias`"] == str(MAX_LOGIT_BIAS)
    assert limits["alternatives for each position"] == str(MAX_TOP_LOGPROBS)
    SamplingParams(n=int(limits["completions of a prompt (`n`)"]))
    with pytest.raises(errors.ParameterError):
        SamplingParams(n=int(limits["completions of a prompt (`n`)"]) + 1)


def test_the_error_of_the_example_is_real() -> None:
    with pytest.raises(errors.ParameterError) as raised:
        SamplingParams(temperature=-1.0)
    assert f'"message": "{raised.value.message}"' in API


@pytest.mark.parametrize("output", [GenerateOutput, TokenLogprob])
def test_every_field_of_an_output_is_described(output: Any) -> None:
    assert {field.name for field in dataclasses.fields(output)} <= code_words(section(API, "## Outputs"))
    assert {kind.value for kind in FinishKind} - {"error"} <= code_words(section(API, "## Outputs"))


def test_every_public_member_of_the_engine_is_described() -> None:
    members = {name for name in vars(Engine) if not name.startswith("_")}
    words = code_words(section(API, "## Engine"))
    assert members <= words
    assert set(RequestOptions.__annotations__) <= words


def exposed_name(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def test_the_metrics_are_those_of_the_server(context: ServerContext) -> None:
    collected = {(exposed_name(metric), metric.type) for metric in context.metrics.registry.collect()}
    described = {(name.strip("`"), kind) for name, kind, _ in table_rows(section(OPERATIONS, "## Metrics"))}
    assert described == collected


def test_the_log_lines_are_those_of_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(pages=4, rows=2, options={"decode_log_interval": 1, "schedule_conservativeness": 0.01})
    bench.add([1, 2, 3], 8)
    bench.add([2, 2, 3], 8)
    bench.run()
    slots = Bench(pages=40, more=((CacheKind.STATE, 1),), rows=2)
    slots.add([1, 2, 3], 1)
    slots.add([2, 2, 3], 1)
    slots.scheduler.step()  # the last line is of a prefill step, and names its two pools

    def shape(line: str) -> str:
        return re.sub(r"[\d.]+|True|False", "N", line)

    shown = re.findall(r"^(?:Prefill batch|Decode batch|KV cache pool|State slots).*$", OPERATIONS, re.MULTILINE)
    assert {shape(line) for line in shown} == {shape(line) for line in caplog.messages[:-1]}
    words = r"(#[a-z_-]+|(?<!full )token usage|mamba num|cuda graph|gen throughput)"
    figures = set(re.findall(words, "\n".join(shown)))
    described = {
        name for row in table_rows(section(OPERATIONS, "## Logs")) for name in re.findall(r"`([^`]+)`", row[0])
    }
    assert described == figures


@cache
def texts_in_the_code() -> str:
    """Every text constant of the packages and the Makefile, placeholders as `…`."""
    texts = [(ROOT / "Makefile").read_text()]
    for path in (*PACKAGE.rglob("*.py"), *TORCH_BACKEND.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[\d.]*[sdf]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(_literal(part) for part in node.values))
    return "\n".join(texts)


def _literal(part: ast.expr) -> str:
    if not isinstance(part, ast.FormattedValue):
        return str(ast.literal_eval(part))
    known = isinstance(part.value, ast.Name) and part.value.id == "TOKENIZER_FILE"
    return "tokenizer.json" if known else "…"


@pytest.mark.parametrize("message", [row[0] for row in table_rows(section(OPERATIONS, "## Troubleshooting"))])
def test_messages_in_the_docs_exist_in_the_code(message: str) -> None:
    pattern = r"\S*".join(re.escape(part) for part in message.strip("`").split("…"))
    assert re.search(pattern, texts_in_the_code()), message


@cache
def words_in_the_code() -> set[str]:
    """Words of the packages and of their build files, and the names of tests and benchmarks."""
    sources = [*PACKAGE.rglob("*.py"), *TORCH_BACKEND.rglob("*.py"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    words = {word for path in sources for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", path.read_text())}
    scripts = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return words | {part for path in scripts for part in (path.stem, path.parent.name)}


def test_files_to_change_exist() -> None:
    section = ARCHITECTURE.partition("## To add something")[2].partition("\n## ")[0]
    paths = re.findall(r"`((?:sglang_jax|torch_backend)/[\w./]+)`", section)
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_names_in_the_architecture_exist_in_the_code() -> None:
    assert not code_words(ARCHITECTURE) - words_in_the_code()


@cache
def known_flags() -> set[str]:
    """Flags of all commands, including those of `tpu`, and of benchmarks."""
    commands: list[click.Command] = [cli]
    flags: set[str] = {"--help"}
    while commands:
        command = commands.pop()
        commands += command.commands.values() if isinstance(command, click.Group) else []
        flags |= {name for parameter in command.params for name in parameter.opts}
    for script in (*(ROOT / "benchmarks").glob("*.py"), ROOT / "tests/on_other_cpus.py"):
        flags |= set(re.findall(r'add_argument\("(--[a-z-]+)"', script.read_text()))
    for script in (ROOT / "tpu").glob("*.py"):
        flags |= set(re.findall(r'^    "(--[a-z-]+)",$', script.read_text(), re.MULTILINE))
    return flags


@pytest.mark.parametrize(
    "text",
    [*((ROOT / page).read_text() for page in ("README.md", "CHANGELOG.md")), API, ARCHITECTURE],
    ids=["README", "CHANGELOG", "api", "architecture"],
)
def test_flags_named_elsewhere_exist(text: str) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known_flags()


def test_flags_named_in_operations_exist() -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", OPERATIONS)) <= known_flags()
