"""The groups of options in help and documentation. Each field of a config is in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum


class OptionGroup(StrEnum):
    """A group of options, by the name that `--help=GROUP` takes."""

    COMMAND = "command"
    RAY = "ray"
    WORKLOAD = "workload"
    MODEL = "model"
    PRECISION = "precision"
    DEVICE = "device"
    PARALLELISM = "parallelism"
    MEMORY = "memory"
    SCHEDULING = "scheduling"
    SESSIONS = "sessions"
    GENERATION = "generation"
    SPECULATION = "speculation"
    STARTUP = "startup"
    PROFILING = "profiling"
    DEVELOPMENT = "development"
    HTTP = "http"
    SECURITY = "security"
    CHAT = "chat"
    LIMITS = "limits"
    STORAGE = "storage"
    MONITORING = "monitoring"


SUMMARIES: Mapping[OptionGroup, str] = {
    OptionGroup.COMMAND: "options of this command only",
    OptionGroup.RAY: "a Ray cluster",
    OptionGroup.WORKLOAD: "prompts and lengths of the measured requests",
    OptionGroup.MODEL: "model, tokenizer, context length",
    OptionGroup.PRECISION: "dtypes, quantisation, deterministic results",
    OptionGroup.DEVICE: "framework, device, attention, CUDA graphs",
    OptionGroup.PARALLELISM: "several devices, replicas and nodes",
    OptionGroup.MEMORY: "KV cache, recurrent states, prefix cache",
    OptionGroup.SCHEDULING: "concurrency, queue, chunks, order of requests",
    OptionGroup.SESSIONS: "sessions and the memory that they pin",
    OptionGroup.GENERATION: "seeds, sampling defaults, grammars, prompts",
    OptionGroup.SPECULATION: "tokens guessed ahead",
    OptionGroup.STARTUP: "warm-up, compiled programs, restarts",
    OptionGroup.PROFILING: "log lines of steps, load of experts, profiles",
    OptionGroup.DEVELOPMENT: "tests of the engine, passes of compilers",
    OptionGroup.HTTP: "address, model names, other servers, shutdown",
    OptionGroup.SECURITY: "keys, allowed hosts and web pages",
    OptionGroup.CHAT: "chat template, tool calls, reasoning",
    OptionGroup.LIMITS: "maximum sizes of requests, connections",
    OptionGroup.STORAGE: "stored responses, files and batches of clients",
    OptionGroup.MONITORING: "logs and traces",
}
"""One line about each group."""

FIELDS: Mapping[OptionGroup, Sequence[str]] = {
    OptionGroup.MODEL: (
        "model_path",
        "revision",
        "tokenizer_path",
        "tokenizer_revision",
        "load_format",
        "model_impl",
        "model_task",
        "pooling",
        "context_length",
        "weight_version",
    ),
    OptionGroup.PRECISION: (
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "mamba_ssm_dtype",
        "keep_gguf_blocks",
        "cpu_activations",
        "tpu_activations",
        "enable_deterministic_inference",
        "deterministic",
    ),
    OptionGroup.DEVICE: (
        "backend",
        "device",
        "attention_backend",
        "disable_cuda_graph",
        "cuda_graph_max_bs",
        "disable_custom_all_reduce",
    ),
    OptionGroup.PARALLELISM: (
        "tp_size",
        "ep_size",
        "enable_expert_parallel",
        "dp_size",
        "enable_dp_attention",
        "load_balance_method",
        "nnodes",
        "node_rank",
        "dist_init_addr",
        "dist_bind_host",
        "group_secret_file",
    ),
    OptionGroup.MEMORY: (
        "mem_fraction_static",
        "max_total_tokens",
        "page_size",
        "swa_full_tokens_ratio",
        "max_mamba_cache_size",
        "mamba_full_memory_ratio",
        "mamba_track_interval",
        "disable_radix_cache",
        "radix_eviction_policy",
    ),
    OptionGroup.SCHEDULING: (
        "max_running_requests",
        "max_queued_requests",
        "chunked_prefill_size",
        "target_itl_ms",
        "schedule_policy",
        "schedule_conservativeness",
        "max_unread_bytes",
    ),
    OptionGroup.SESSIONS: ("max_sessions", "session_timeout", "session_memory_fraction"),
    OptionGroup.GENERATION: (
        "random_seed",
        "sampling_defaults",
        "grammar_backend",
        "grammar_timeout",
        "template_timeout",
        "allow_special_tokens_in_content",
    ),
    OptionGroup.SPECULATION: (
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_num_draft_tokens",
    ),
    OptionGroup.STARTUP: (
        "warmup",
        "skip_warmup",
        "compilation_cache_dir",
        "engine_start_timeout",
        "watchdog_timeout",
        "max_engine_restarts",
    ),
    OptionGroup.PROFILING: ("decode_log_interval", "enable_expert_distribution_metrics", "profile_dir"),
    OptionGroup.DEVELOPMENT: ("compile_passes", "dump_graphs", "test_retract", "test_evict", "debug_memory"),
    OptionGroup.HTTP: ("host", "port", "served_model_name", "connect", "drain_timeout"),
    OptionGroup.SECURITY: (
        "api_key",
        "api_key_file",
        "api_keys",
        "admin_api_key",
        "admin_api_key_file",
        "allowed_hosts",
        "allowed_origins",
        "disable_web_ui",
    ),
    OptionGroup.CHAT: ("chat_template", "tool_call_parser", "reasoning_parser", "max_tools_per_request"),
    OptionGroup.LIMITS: (
        "max_completions_per_request",
        "max_logprobs_per_response",
        "max_stop_characters",
        "max_grammar_characters",
        "max_json_depth",
        "max_body_bytes",
        "max_connections",
        "client_timeout",
    ),
    OptionGroup.STORAGE: (
        "response_store",
        "max_stored_responses",
        "max_response_store_bytes",
        "response_store_days",
        "files_dir",
        "max_file_bytes",
        "max_files_bytes",
        "max_batch_lines",
    ),
    OptionGroup.MONITORING: ("log_level", "log_format", "otlp_traces_endpoint"),
}
"""The fields of `EngineConfig` and `ServerConfig` by group, in the order of help and documentation. Groups up to
`DEVELOPMENT` are the engine's, the others the server's."""

COMMON: Mapping[str, str] = {
    "model_path": "`demo`, a folder, a .gguf file, a hub id, or gs://...",
    "context_length": "maximum tokens of a request, prompt plus output",
    "dtype": "dtype of weights and activations",
    "quantization": "quantise weights while loading them",
    "tp_size": "number of devices that share each layer",
    "dp_size": "number of replicas, each on separate devices",
    "mem_fraction_static": "memory for weights and KV cache, as a fraction",
    "max_running_requests": "maximum concurrent requests",
    "host": "address to listen on; 0.0.0.0: all interfaces",
    "port": "port to listen on",
    "served_model_name": "model names that clients may send",
    "api_key_file": "file with the key that clients must send",
    "tool_call_parser": "format of the model's tool calls",
    "reasoning_parser": "format of the model's reasoning",
    "log_level": "minimum log level",
}
"""The fields that most people need, which `--help` shows, with less text than elsewhere."""

_GROUP_OF = {field: group for group, fields in FIELDS.items() for field in fields}


def group_of(field: str) -> OptionGroup:
    """Returns the group of a field of `EngineConfig` or `ServerConfig`. Raises `ValueError` if it has none."""
    if field not in _GROUP_OF:
        raise ValueError(f"the option {field} has no group: add it to FIELDS in config/groups.py")
    return _GROUP_OF[field]


def group_of_keyword(keyword: str) -> OptionGroup:
    """Returns the group of another config's fields: the one with the name of the config's keyword, or else
    `OptionGroup.COMMAND`."""
    return OptionGroup(keyword) if keyword in list(OptionGroup) else OptionGroup.COMMAND
