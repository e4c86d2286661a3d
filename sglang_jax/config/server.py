"""The options of a server."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from sglang_jax.config.choices import LogFormat, LogLevel, ReasoningParser, ToolCallParser, Warmup
from sglang_jax.config.engine import WARMUP, EngineConfig, PositiveInt
from sglang_jax.config.environment import Environment
from sglang_jax.config.keys import one_key

MAX_STOP_CHARACTERS = 65_536
MAX_GRAMMAR_CHARACTERS = 2**20
"""Upper limit of --max-stop-characters and --max-grammar-characters: longer texts would take too long to handle."""


class ServerConfig(EngineConfig):
    """Options of a server: those of its engine, and those of HTTP."""

    warmup: Warmup = Field(Warmup.FIRST, description=WARMUP)
    max_queued_requests: PositiveInt | None = Field(
        4096, description="maximum queued completions; more are refused with 503"
    )
    max_completions_per_request: PositiveInt = Field(
        1024, description="maximum completions of an HTTP request (prompts times n); more are refused with 400"
    )
    max_logprobs_per_response: PositiveInt = Field(
        2**21,
        description="maximum logprobs of a response that does not stream, alternatives included; twice as many for all "
        "responses in preparation",
    )
    max_stop_characters: int = Field(
        4096,
        ge=1,
        le=MAX_STOP_CHARACTERS,
        description="maximum characters of a request's stop strings together; more are refused with 400",
    )
    max_grammar_characters: int = Field(
        128 * 2**10,
        ge=1,
        le=MAX_GRAMMAR_CHARACTERS,
        description="maximum characters of a request's grammar or JSON schema; more are refused with 400",
    )
    max_json_depth: int = Field(
        64, ge=8, le=200, description="maximum nesting of objects and lists in a request body; deeper ones get 400"
    )
    response_store: Path | None = Field(
        None,
        description="SQLite file of stored responses (/v1/responses), which then outlive the server; one server at a "
        "time can use it; default: memory",
    )
    max_stored_responses: PositiveInt = Field(
        10_000,
        description="maximum stored responses; then the key with the most loses those not used for longest",
    )
    max_response_store_bytes: PositiveInt = Field(
        256 * 2**20, description="maximum bytes of all stored responses with their input"
    )
    response_store_days: float = Field(
        30.0, gt=0.0, allow_inf_nan=False, description="days after which a stored response is deleted"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all interfaces")
    port: int = Field(30000, ge=0, le=65535, description="port to listen on; 0: any free port")
    served_model_name: tuple[str, ...] = Field(
        (),
        description="NAME...: model names that clients may send, at most 64; answers have the first; default: "
        "model_path",
        max_length=64,
    )
    connect: str | None = Field(
        None,
        description="HOST:PORT,...: route requests to these servers of the same model instead of starting an engine; "
        "local in the list: use local engines too",
    )
    drain_timeout: float = Field(
        300.0,
        ge=0.0,
        allow_inf_nan=False,
        description="maximum seconds to wait for running requests at shutdown",
    )
    api_key: str | None = Field(
        None,
        description="bearer token required by every route except health and /docs; also read from SGLANG_JAX_API_KEY",
    )
    api_key_file: Path | None = Field(None, description="file with the API key, so that process lists do not show it")
    api_keys: Path | None = Field(None, description="YAML or JSON file of named keys with limits: see docs/security.md")
    admin_api_key: str | None = Field(
        None,
        description="bearer token for routes that change the server or show other users' requests; other keys are "
        "refused there; also read from SGLANG_JAX_ADMIN_API_KEY",
    )
    admin_api_key_file: Path | None = Field(None, description="file with the admin API key")
    max_body_bytes: PositiveInt = Field(
        8 * 2**20, description="maximum bytes of a request body; larger ones are refused with 413"
    )
    files_dir: Path | None = Field(
        None,
        description="folder for clients' files and batches, which turns on /v1/files and /v1/batches; one per server",
    )
    max_file_bytes: PositiveInt = Field(
        200 * 2**20, description="maximum bytes of an uploaded file; larger ones are refused with 413"
    )
    max_files_bytes: PositiveInt = Field(
        16 * 2**30,
        description="maximum bytes of all files in files_dir, each counted as at least 256 KiB; more get 413",
    )
    max_batch_lines: PositiveInt = Field(
        50_000, description="maximum lines of a batch; one with more fails before any of its lines runs"
    )
    max_connections: PositiveInt = Field(
        4096, description="maximum open connections; a new one replaces an idle one, or gets 503"
    )
    client_timeout: float = Field(
        30.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds without progress, while a client sends a request or reads a response, after which its "
        "connection is closed",
    )
    allowed_hosts: str | None = Field(
        None,
        description="NAME,...: additional host names that a server without a key accepts on the loopback interface; *: "
        "all",
    )
    allowed_origins: str | None = Field(
        None,
        description="ORIGIN,...: origins of web pages that may call this server from a browser (CORS), such as "
        "https://chat.example.org; *: all; default: none",
    )
    disable_web_ui: bool = Field(False, description="serve no web page at / for browsers")
    chat_template: str | None = Field(None, description="Jinja file, or the template itself; default: the tokenizer's")
    tool_call_parser: ToolCallParser = Field(
        ToolCallParser.AUTO,
        description="format of the model's tool calls; auto: detect it from the chat template; none: refuse requests "
        "with tools",
    )
    reasoning_parser: ReasoningParser = Field(
        ReasoningParser.NONE,
        description="format of the model's reasoning, which is then returned separately; auto: detect it from the chat "
        "template; none: leave it in the text",
    )
    max_tools_per_request: PositiveInt = Field(128, description="maximum tools per request; more are refused with 400")
    log_level: LogLevel = Field(LogLevel.INFO, description="minimum log level")
    log_format: LogFormat = Field(LogFormat.TEXT, description="format of log lines; json: one object per line")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that gets traces of requests, over OTLP with HTTP, such as "
        "http://localhost:4318; default: no traces",
    )

    def client_key(self) -> str | None:
        """The key that clients send, or None. Raises `ConfigError` like `one_key`."""
        return one_key("api_key", self.api_key, self.api_key_file, Environment().api_key)

    def admin_key(self) -> str | None:
        """The key that operators send, or None. Raises `ConfigError` like `one_key`."""
        return one_key("admin_api_key", self.admin_api_key, self.admin_api_key_file, Environment().admin_api_key)

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _are_names(cls, value: object) -> object:
        names: tuple[object, ...] = (value,) if isinstance(value, str) else () if value is None else tuple(value)  # type: ignore[arg-type]
        return names

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, value: str | None) -> str | None:
        for origin in _listed(value):
            if origin != "*" and re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s\"'\[\]]+(:\d+)?", origin) is None:
                raise ValueError(
                    f"{origin!r} is not an origin: give a scheme and a host without a path, as in "
                    "https://chat.example.org or http://localhost:3000; several with commas between"
                )
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r"https?://[^/\s]+(/\S*)?", value) is None:
            raise ValueError(
                "must be a URL with http or https, such as http://localhost:4318: OTLP over gRPC is not supported"
            )
        return value

    def origins(self) -> frozenset[str]:
        """The origins of `allowed_origins`, as browsers send them."""
        return frozenset(_listed(self.allowed_origins))

    @property
    def model_name(self) -> str:
        """The name of the model in answers."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may send as `model`."""
        return self.served_model_name or (self.model_path,)


def _listed(value: str | None) -> list[str]:
    return [] if value is None else [part.strip().lower() for part in value.split(",")]
