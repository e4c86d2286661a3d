"""Flags and config fields correspond one to one, and errors are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from pydantic import BaseModel, Field

from sglang_jax.cli.main import run
from sglang_jax.cli.options import fields_as_flags, flag_name, options_of
from sglang_jax.cli.serve import serve
from sglang_jax.config import CompilePass, EngineConfig, ServerConfig
from sglang_jax.errors import CheckpointError, ConfigError, RequestError

# a non-default value for every field
OTHER_VALUES: dict[str, Any] = {
    "model_path": "some/model",
    "revision": "v1.0",
    "tokenizer_path": "some/tokenizer",
    "tokenizer_revision": "v2.0",
    "allow_special_tokens_in_content": True,
    "load_format": "dummy",
    "model_impl": "transformers",
    "model_task": "embed",
    "pooling": "mean",
    "compile_passes": "rope,norm",
    "weight_version": "step-7",
    "dump_graphs": Path("some/graphs"),
    "backend": "jax",
    "device": "cpu",
    "dtype": "float32",
    "kv_cache_dtype": "fp8_e4m3",
    "tp_size": 2,
    "ep_size": 2,
    "enable_expert_parallel": True,
    "enable_dp_attention": True,
    "dp_size": 2,
    "load_balance_method": "least_loaded",
    "nnodes": 2,
    "node_rank": 1,
    "dist_init_addr": "10.0.0.1:1234",
    "dist_bind_host": "10.0.0.7",
    "group_secret_file": Path("some/secret"),
    "context_length": 777,
    "mem_fraction_static": 0.5,
    "target_itl_ms": 40.0,
    "max_total_tokens": 4096,
    "swa_full_tokens_ratio": 0.5,
    "max_mamba_cache_size": 100,
    "mamba_full_memory_ratio": 0.4,
    "quantization": "int8",
    "mamba_ssm_dtype": "bfloat16",
    "mamba_track_interval": 0,
    "max_running_requests": 9,
    "max_queued_requests": 8,
    "chunked_prefill_size": 64,
    "page_size": 32,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.25,
    "disable_radix_cache": True,
    "radix_eviction_policy": "fifo",
    "max_sessions": 12,
    "session_timeout": 60.0,
    "session_memory_fraction": 0.25,
    "attention_backend": "reference",
    "disable_cuda_graph": True,
    "disable_custom_all_reduce": True,
    "cuda_graph_max_bs": 8,
    "random_seed": 42,
    "sampling_defaults": "openai",
    "grammar_backend": "none",
    "grammar_timeout": 3.0,
    "speculative_algorithm": "ngram",
    "speculative_draft_model_path": "some/smaller-model",
    "speculative_num_draft_tokens": 3,
    "warmup": "full",
    "skip_warmup": True,
    "keep_gguf_blocks": True,
    "cpu_activations": "int8",
    "tpu_activations": "exact",
    "watchdog_timeout": 30.0,
    "engine_start_timeout": 60.0,
    "max_engine_restarts": 2,
    "max_unread_bytes": 123456,
    "template_timeout": 4.0,
    "compilation_cache_dir": "some/cache",
    "decode_log_interval": 7,
    "enable_expert_distribution_metrics": True,
    "enable_deterministic_inference": True,
    "deterministic": "batch",
    "profile_dir": "profiles",
    "test_retract": 5,
    "test_evict": 6,
    "debug_memory": True,
    "host": "0.0.0.0",
    "port": 30007,
    "served_model_name": "name",
    "connect": "10.0.0.1:30000,10.0.0.2:30000",
    "drain_timeout": 20.0,
    "api_key": "secret",
    "api_key_file": Path("some/key"),
    "api_keys": Path("some/keys.yaml"),
    "admin_api_key": "other secret",
    "admin_api_key_file": Path("some/admin-key"),
    "max_completions_per_request": 100,
    "max_logprobs_per_response": 5000,
    "max_stop_characters": 100,
    "response_store": Path("some/responses.db"),
    "max_stored_responses": 5,
    "max_response_store_bytes": 1000,
    "response_store_days": 0.5,
    "max_grammar_characters": 200,
    "max_json_depth": 20,
    "max_body_bytes": 1000,
    "files_dir": Path("some/files"),
    "max_file_bytes": 2000,
    "max_files_bytes": 3000,
    "max_batch_lines": 40,
    "max_connections": 50,
    "client_timeout": 5.0,
    "allowed_hosts": "a.example,b.example",
    "allowed_origins": "https://a.example,http://localhost:3000",
    "disable_web_ui": True,
    "chat_template": "template.jinja",
    "tool_call_parser": "mistral",
    "reasoning_parser": "qwen3",
    "max_tools_per_request": 5,
    "log_level": "debug",
    "log_format": "json",
    "otlp_traces_endpoint": "http://collector:4318/v1/traces",
}


def parse(*arguments: str, model: type[BaseModel] = ServerConfig) -> BaseModel:
    """The config that a command line gives."""
    built: list[BaseModel] = []

    @click.command()
    @options_of(config=model)
    def command(config: BaseModel) -> None:
        built.append(config)

    command.main(list(arguments), standalone_mode=False)
    return built[0]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line for a command line of the server."""
    assert run(serve, "serve", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    options = [option for option in serve.params if isinstance(option, click.Option) and not option.hidden]
    flags = {option.opts[0] for option in options}
    assert flags == {flag_name(field) for field in ServerConfig.model_fields} | {"--config", "--list-passes", "-h"}
    assert set(OTHER_VALUES) == set(ServerConfig.model_fields)


@pytest.mark.parametrize("field", ServerConfig.model_fields)
def test_a_flag_sets_only_its_field(field: str) -> None:
    value = OTHER_VALUES[field]
    needed = {"tp_size": 2} if field == "ep_size" else {}
    arguments = [flag_name(field)] if value is True else [flag_name(field), str(value)]
    config = parse(*arguments, *(word for name, each in needed.items() for word in (flag_name(name), str(each))))
    assert config == ServerConfig(**{field: value, **needed})
    if field != "debug_memory":  # on in the environment of all tests
        assert config != ServerConfig()


@pytest.mark.parametrize(
    ("words", "model", "names"),
    [
        ("m --served-model-name a b --port 1", "m", ("a", "b")),
        ("--served_model_name a b --model-path m", "m", ("a", "b")),
        ("--served-model-name a m", "m", ("a",)),
        ("--port 1 --served-model-name a b m --tp 2", "m", ("a", "b")),
        ("--served-model-name a --model m --served-model-name b", "m", ("a", "b")),
        ("--served-model-name=a m", "m", ("a",)),
    ],
)
def test_the_model_may_have_several_names(
    monkeypatch: pytest.MonkeyPatch, words: str, model: str, names: tuple[str, ...]
) -> None:
    served: list[ServerConfig] = []
    monkeypatch.setattr("sglang_jax.server.serve.run", lambda config, **_: served.append(config) or 0)
    assert run(serve, "serve", words.split()) == 0
    assert (served[0].model_path, served[0].model_names) == (model, names)


def test_help_shows_description_default_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(serve, "serve", ["--help=all"]) == 0
    text = " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # help texts wrap at hyphens too
    for field in ServerConfig.model_fields.values():
        assert fields_as_flags(field.description or "", ServerConfig) in text
    assert "[auto|bfloat16|float16|float32]" in text
    assert "tokens per KV cache page, a power of two [default: 16]" in text
    assert "default: from --mamba-full-memory-ratio" in text
    assert not [name for name in ServerConfig.model_fields if "_" in name and name in text]
    assert "--disable-radix-cache, --no-enable-prefix-caching disable the prefix cache" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "http"], ["--port", "'http'", "integer"]),
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--mem-fraction-static", "1.5"], ["--mem-fraction-static", "1.5", "less than 1"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--log-level", "loud"], ["--log-level", "loud", "warning"]),
        (["--page-size", "12"], ["--page-size", "12", "power of two"]),
        (["--max-total-tokens", "3"], ["--max-total-tokens", "3", "16"]),
        (["--disable-radix-cache=yes"], ["--disable-radix-cache"]),
        (["--prot", "30000"], ["--prot", "--port"]),
        (["--port"], ["--port"]),
    ],
)
def test_refusals_name_flag_value_and_limit(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = refusal(capsys, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({"port": 1234, "page-size": 64, "disable_radix_cache": True}))
    config = parse("--config", str(file), "--port", "4321")
    assert config == ServerConfig(port=4321, page_size=64, disable_radix_cache=True)


def test_the_file_may_be_json_and_hold_every_option(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text(json.dumps({field: str(value) for field, value in OTHER_VALUES.items()}))
    assert parse("--config", str(file)) == ServerConfig(**OTHER_VALUES)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("# nothing yet\n")
    assert parse("--config", str(file)) == ServerConfig()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("pagesize: 16", ["'pagesize'", "page_size"]),
        ("page_size: 0", ["page_size", "options.yaml", "0"]),
        ("dtype: float8", ["dtype", "options.yaml", "float8", "bfloat16"]),
        ("page_size: 16\npage-size: 32", ["page_size", "twice"]),
        ("[1, 2]", ["mapping", "list"]),
        ("{", ["neither YAML nor JSON"]),
    ],
)
def test_errors_in_the_file_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: list[str]
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    message = refusal(capsys, "--config", str(file))
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in refusal(capsys, "--config", "nowhere.yaml")


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Other(BaseModel):
    colour: Colour = Field(Colour.RED, description="of the shed")


def test_one_command_may_take_several_models() -> None:
    built: dict[str, Any] = {}

    @click.command()
    @options_of(engine=EngineConfig, other=Other)
    def command(**models: Any) -> None:
        built.update(models)

    command.main(["--colour", "blue", "--page-size", "8"], standalone_mode=False)
    assert built == {"engine": EngineConfig(page_size=8), "other": Other(colour=Colour.BLUE)}


def test_models_with_a_field_in_common_are_refused() -> None:
    with pytest.raises(TypeError, match="in common"):
        options_of(engine=EngineConfig, server=ServerConfig)


@pytest.mark.parametrize("error", [ConfigError, CheckpointError, RequestError])
def test_known_errors_end_in_one_line(capsys: pytest.CaptureFixture[str], error: type[Exception]) -> None:
    @click.command()
    def command() -> None:
        raise error("the file is not there")

    assert run(command, "command", []) == 2
    assert capsys.readouterr().err == "Error: the file is not there\n"


def test_other_errors_keep_their_traceback() -> None:
    @click.command()
    def command() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(command, "command", [])


def test_the_nodes_secret_comes_from_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EngineConfig().group_secret() == b""
    monkeypatch.setenv("SGLANG_JAX_GROUP_SECRET", " of the environment\n")
    assert EngineConfig().group_secret() == b"of the environment"
    file = tmp_path / "secret"
    file.write_text("of the file, which wins\n")
    config = EngineConfig(group_secret_file=file)
    assert config.group_secret() == b"of the file, which wins"
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"group_secret_file .*secret must have at least 16 characters, got 0"):
        config.group_secret()
    file.unlink()
    with pytest.raises(ConfigError, match="secret cannot be read"):
        config.group_secret()
    monkeypatch.setenv("SGLANG_JAX_GROUP_SECRET", "short")
    with pytest.raises(ConfigError, match="SGLANG_JAX_GROUP_SECRET must have at least 16 characters, got 5") as refused:
        EngineConfig().group_secret()
    assert "'short'" not in str(refused.value)


def test_list_passes_shows_them_in_their_order_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(serve, "serve", ["--list-passes", "--port", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [each.value for each in CompilePass]


@pytest.mark.parametrize("flags", [["--enable-metrics"], ["--config", "options.yaml"]], ids=["flag", "file"])
def test_notes_on_options_are_logged_as_json(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("enable_metrics: true")
    command = ["serve", "--log-format", "json", *flags, "/no/such/model"]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_jax", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    *log, error = done.stderr.splitlines()
    assert error.startswith("Error: /no/such/model does not exist")
    notes = [line["message"] for line in map(json.loads, log) if line["level"] == "warning"]
    assert len(notes) == 1
    assert "enable_metrics has no effect: " in notes[0].replace("-", "_")


def test_notes_are_shown_although_another_option_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(serve, "serve", ["--enable-metrics", "--page-size", "0"]) == 2
    note, refusal = capsys.readouterr().err.splitlines()
    assert note.startswith("--enable-metrics has no effect")
    assert "page-size" in refusal
