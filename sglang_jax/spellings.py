"""Names of other engines' options: aliases, options without effect, and options that are refused with a reason. Flags,
keys of a configuration file and keyword arguments of `Engine` are all looked up here, with underscores.
`docs/migration.md` shows the same tables; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIASES: Mapping[str, Sequence[str]] = {
    "model_path": ("model",),
    "tokenizer_path": ("tokenizer",),
    "tp_size": ("tp", "tensor_parallel_size"),
    "dp_size": ("dp", "data_parallel_size"),
    "context_length": ("max_model_len", "max_seq_len"),
    "max_running_requests": ("max_num_seqs", "max_batch_size"),
    "chunked_prefill_size": ("max_num_batched_tokens",),
    "page_size": ("block_size",),
    "schedule_policy": ("scheduling_policy",),
    "disable_radix_cache": ("no_enable_prefix_caching",),
    "disable_cuda_graph": ("enforce_eager",),
    "random_seed": ("seed",),
    "skip_warmup": ("skip_server_warmup", "disable_precompile"),
    "mamba_ssm_dtype": ("mamba_ssm_cache_dtype",),
    "speculative_num_draft_tokens": ("num_speculative_tokens",),
}
"""Fields of a configuration, and their aliases."""

OTHER_ALIASES: Mapping[str, Sequence[str]] = {
    "backend": ("endpoint",),
    "model_path": ("model",),
    "output_details": ("save_detailed",),
    "output_file": ("result_filename",),
    "random_input_len": ("input_len", "random_input"),
    "random_output_len": ("output_len", "random_output"),
}
"""The same for fields of other commands: a benchmark's load and workload, `convert`."""

SHORT_FLAGS: Mapping[str, str] = {"tp_size": "-tp", "dp_size": "-dp", "quantization": "-q"}
"""Fields, and their flags with one dash."""

OTHER_SHORT_FLAGS: Mapping[str, str] = {"compilation_config": "-O", "pp": "-pp"}
"""Refused options of other engines, and their flags with one dash."""

COMMANDS: Mapping[str, str] = {
    "complete": "generate",
    "launch-server": "serve",
    "offline-throughput": "offline",
    "run-batch": "batch",
    "serve": "serving",
    "throughput": "offline",
}
"""Subcommands of other engines, and their names here; `serve` is a subcommand of `bench`."""


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """An option of other engines that this one does not have. `takes_value`: a value follows it on the command line;
    `note`: what to use or expect instead, as a sentence."""

    note: str
    takes_value: bool = False


NEEDLESS: Mapping[str, OtherFlag] = {
    "allow_credentials": OtherFlag("cookies are never used"),
    "allowed_headers": OtherFlag("pages of --allowed-origins may send any header", takes_value=True),
    "allowed_methods": OtherFlag("pages of --allowed-origins may use any method", takes_value=True),
    "async_scheduling": OtherFlag("scheduling always overlaps with the running step"),
    "chat_template_content_format": OtherFlag("text parts are always joined to one string", takes_value=True),
    "code_revision": OtherFlag("code in a checkpoint is never run", takes_value=True),
    "disable_log_requests": OtherFlag("requests are never logged"),
    "disable_outlines_disk_cache": OtherFlag("outlines is not used"),
    "disable_uvicorn_access_log": OtherFlag("the access log is off unless --log-level is debug"),
    "enable_auto_tool_choice": OtherFlag("tool choice is auto for every request with tools"),
    "enable_cache_report": OtherFlag("usage always includes cached tokens"),
    "enable_chunked_prefill": OtherFlag("chunked prefill is always on; --chunked-prefill-size sets the chunk size"),
    "enable_deterministic_inference": OtherFlag(
        "sampling never depends on the batch; logits may in 16 bits, and do not noticeably with --dtype float32"
    ),
    "enable_metrics": OtherFlag("/metrics is always on"),
    "enable_metrics_for_all_schedulers": OtherFlag("/metrics always covers every replica"),
    "enable_mixed_chunk": OtherFlag("prefill chunks and decode rows always share steps"),
    "enable_nan_detection": OtherFlag("logits are always checked"),
    "enable_p2p_check": OtherFlag("only the collectives of JAX and torch are used"),
    "enable_prefix_caching": OtherFlag("the prefix cache is on by default; --disable-radix-cache turns it off"),
    "enable_prompt_tokens_details": OtherFlag("usage always includes cached tokens"),
    "enable_reasoning": OtherFlag("--reasoning-parser is enough"),
    "enable_request_id_headers": OtherFlag("every response has an X-Request-Id header"),
    "enable_server_load_tracking": OtherFlag("/v1/loads is always on"),
    "enable_streaming_session": OtherFlag("sessions are always available"),
    "language_model_only": OtherFlag("only text input is supported"),
    "max_log_len": OtherFlag("requests are never logged", takes_value=True),
    "nccl_port": OtherFlag("a free port is chosen", takes_value=True),
    "no_enable_log_requests": OtherFlag("requests are never logged"),
    "prefix_caching_hash_algo": OtherFlag("cached prefixes are compared token by token", takes_value=True),
    "sampling_backend": OtherFlag("each backend has one sampler", takes_value=True),
    "sleep_on_idle": OtherFlag("an idle engine always sleeps"),
    "tokenizer_mode": OtherFlag("tokenizers are always of the fast kind", takes_value=True),
    "trust_remote_code": OtherFlag("code in a checkpoint is never run"),
}
"""Options that ask for this engine's behavior: accepted, with a note that they have no effect."""

_ONE_MACHINE = "not implemented: use --tp-size, and --nnodes for several machines"
_LORA = "not implemented: merge the adapter into the model's weights"
_TLS = "not implemented: terminate TLS in a proxy, see docs/security.md"
_MEMORY = "not implemented: weights and KV cache stay in device memory"
_MEDIA = "not implemented: only text input is supported"
_CONFIG = "not implemented: copy the model's folder and edit its config.json"
_ACCESS_LOG = "not available: --log-level debug has an access log, without prompts or outputs"
_FUSED = "not implemented: models are not compiled by torch.compile; for CUDA graphs see --cuda-graph-max-bs"
_GRAPHS = "not available: use --cuda-graph-max-bs"
_PROGRAMS = "not available: program sizes follow from --max-running-requests and --chunked-prefill-size"
_GUESSES = "not available: use --speculative-num-draft-tokens; drafts are a single sequence"
_GPUS = "not available: set CUDA_VISIBLE_DEVICES"
_RECOMMENDED = "not available: use --sampling-defaults model or openai, or set the values in requests"
_SLEEP = "not implemented: stop the server to free the device's memory"
_STEPS = "not implemented: steps are always overlapped, one token at a time"
_WEIGHTS = "not available: use --quantization int8 or fp8, or a checkpoint that is quantised so"
_GRAMMARS = "not available: use --grammar-backend; llguidance supports all kinds of grammars"

_EXPERTS = "not implemented: --tp-size shares every expert among devices"
_EXPERT_COUNTS = "not available: --enable-expert-distribution-metrics counts the tokens of each expert"
_ONE_ENGINE = "not implemented: each engine runs both prefill and decode"
_TEXT = "not implemented: models can only generate text"
_SERVERS = "not available: start a server on each machine, and one with --connect in front of them"
_ATTENTION = "not available: --attention-backend applies to both prefill and decode"
_USAGE = "not available: clients ask for usage with stream_options.include_usage"
_COLLECTIVES = "not implemented: only the collectives of JAX and torch are used"
_TRACES = "not implemented: use /metrics, and X-Request-Id in the log"
_INCREMENTAL = "not available: set incremental_output in requests to /generate"
_PARTIAL = "not available: prompts always share chunks, up to --chunked-prefill-size"
_MEETING = "not available: use --dist-init-addr HOST:PORT"

REFUSED: Mapping[str, OtherFlag] = {
    "additional_config": OtherFlag("not implemented", takes_value=True),
    "all2all_backend": OtherFlag(_EXPERTS, takes_value=True),
    "allow_auto_truncate": OtherFlag("not implemented: truncate prompts in the client; too long ones get 400"),
    "allowed_local_media_path": OtherFlag(_MEDIA, takes_value=True),
    "api_server_count": OtherFlag(
        "not available: one front end serves all engines; for more engines use --dp-size", takes_value=True
    ),
    "base_gpu_id": OtherFlag(_GPUS, takes_value=True),
    "calculate_kv_scales": OtherFlag(
        "not available: scales are read from the checkpoint; those of int8 are calibrated"
    ),
    "collect_detailed_traces": OtherFlag(_TRACES, takes_value=True),
    "compilation_config": OtherFlag(_FUSED, takes_value=True),
    "completion_template": OtherFlag("not implemented: render prompts in the client", takes_value=True),
    "config_format": OtherFlag(_CONFIG, takes_value=True),
    "constrained_json_disable_any_whitespace": OtherFlag(
        "not available: set structured_outputs.disable_any_whitespace in requests"
    ),
    "constrained_json_whitespace_pattern": OtherFlag(
        "not available: set guided_whitespace_pattern in requests", takes_value=True
    ),
    "convert": OtherFlag(_TEXT, takes_value=True),
    "cpu_offload_gb": OtherFlag(_MEMORY, takes_value=True),
    "crash_dump_folder": OtherFlag("not available: errors and stacks are in the log", takes_value=True),
    "ctx_size": OtherFlag("not available: use --context-length, the maximum tokens of each request", takes_value=True),
    "cuda_graph_bs": OtherFlag(_GRAPHS, takes_value=True),
    "cudagraph_capture_sizes": OtherFlag(_GRAPHS, takes_value=True),
    "data_parallel_address": OtherFlag(_SERVERS, takes_value=True),
    "data_parallel_backend": OtherFlag(_SERVERS, takes_value=True),
    "data_parallel_rank": OtherFlag(_SERVERS, takes_value=True),
    "data_parallel_rpc_port": OtherFlag(_SERVERS, takes_value=True),
    "data_parallel_size_local": OtherFlag(_SERVERS, takes_value=True),
    "decode_attention_backend": OtherFlag(_ATTENTION, takes_value=True),
    "decode_context_parallel_size": OtherFlag("not implemented", takes_value=True),
    "deepep_mode": OtherFlag(_EXPERTS, takes_value=True),
    "default_chat_template_kwargs": OtherFlag("not available: set chat_template_kwargs in requests", takes_value=True),
    "disable_cuda_graph_padding": OtherFlag(_GRAPHS),
    "disable_fastapi_docs": OtherFlag("not available: /docs is always there and lists routes only"),
    "disable_frontend_multiprocessing": OtherFlag("not implemented: each engine runs in a separate process"),
    "disable_hybrid_swa_memory": OtherFlag(
        "not available: --swa-full-tokens-ratio sizes the KV cache of sliding-window layers"
    ),
    "disable_log_stats": OtherFlag("not available: --log-level warning hides the statistics"),
    "disable_overlap_schedule": OtherFlag(_STEPS),
    "disable_sliding_window": OtherFlag("not implemented: the window is part of the model"),
    "disaggregation_bootstrap_port": OtherFlag(_ONE_ENGINE, takes_value=True),
    "disaggregation_ib_device": OtherFlag(_ONE_ENGINE, takes_value=True),
    "disaggregation_mode": OtherFlag(_ONE_ENGINE, takes_value=True),
    "disaggregation_transfer_backend": OtherFlag(_ONE_ENGINE, takes_value=True),
    "dist_backend": OtherFlag(_COLLECTIVES, takes_value=True),
    "dist_timeout": OtherFlag("not available: use --engine-start-timeout and --watchdog-timeout", takes_value=True),
    "distributed_executor_backend": OtherFlag(
        "not available: ranks are always separate processes; use --tp-size and --nnodes", takes_value=True
    ),
    "download_dir": OtherFlag("not available: set the environment variable HF_HOME", takes_value=True),
    "enable_custom_logit_processor": OtherFlag("not implemented: requests have logit_bias, penalties and grammars"),
    "enable_dbo": OtherFlag("not implemented"),
    "enable_dp_attention": OtherFlag("not implemented: use --dp-size for replicas"),
    "enable_dynamic_chunking": OtherFlag("not available: --target-itl-ms adapts the chunk size"),
    "enable_ep_moe": OtherFlag(_EXPERTS),
    "enable_eplb": OtherFlag(_EXPERTS),
    "enable_expert_parallel": OtherFlag(_EXPERTS),
    "enable_force_include_usage": OtherFlag(_USAGE),
    "enable_hierarchical_cache": OtherFlag(_MEMORY),
    "enable_lmcache": OtherFlag(_MEMORY),
    "enable_log_outputs": OtherFlag(_ACCESS_LOG),
    "enable_log_requests": OtherFlag(_ACCESS_LOG),
    "enable_lora": OtherFlag(_LORA),
    "enable_memory_saver": OtherFlag(_SLEEP),
    "enable_mscclpp": OtherFlag(_COLLECTIVES),
    "enable_multimodal": OtherFlag(_MEDIA),
    "enable_nccl_nvls": OtherFlag(_COLLECTIVES),
    "enable_piecewise_cuda_graph": OtherFlag(_GRAPHS),
    "enable_priority_scheduling": OtherFlag("not available: use --schedule-policy priority"),
    "enable_prompt_embeds": OtherFlag(_MEDIA),
    "enable_return_hidden_states": OtherFlag("not implemented: requests can ask for logprobs"),
    "enable_single_batch_overlap": OtherFlag("not implemented"),
    "enable_sleep_mode": OtherFlag(_SLEEP),
    "enable_ssl_refresh": OtherFlag(_TLS),
    "enable_symm_mem": OtherFlag(_COLLECTIVES),
    "enable_torch_compile": OtherFlag(_FUSED),
    "enable_torch_symm_mem": OtherFlag(_COLLECTIVES),
    "enable_trace": OtherFlag(_TRACES),
    "enable_two_batch_overlap": OtherFlag("not implemented"),
    "ep": OtherFlag(_EXPERTS, takes_value=True),
    "ep_num_redundant_experts": OtherFlag(_EXPERTS, takes_value=True),
    "ep_size": OtherFlag(_EXPERTS, takes_value=True),
    "expert_distribution_recorder_buffer_size": OtherFlag(_EXPERT_COUNTS, takes_value=True),
    "expert_distribution_recorder_mode": OtherFlag(_EXPERT_COUNTS, takes_value=True),
    "expert_parallel_size": OtherFlag(_EXPERTS, takes_value=True),
    "export_metrics_to_file": OtherFlag("not implemented: scrape /metrics"),
    "fastapi_root_path": OtherFlag("not implemented: strip the prefix in your proxy", takes_value=True),
    "generation_config": OtherFlag(_RECOMMENDED, takes_value=True),
    "gpu_id_step": OtherFlag(_GPUS, takes_value=True),
    "gpu_memory_utilization": OtherFlag(
        "not available: use --mem-fraction-static, the fraction of free memory for weights and KV cache; vLLM's is a "
        "fraction of total memory and includes activations, so start with a value 0.05 lower",
        takes_value=True,
    ),
    "grpc_mode": OtherFlag("not implemented: the server speaks HTTP only"),
    "guided_decoding_backend": OtherFlag(_GRAMMARS, takes_value=True),
    "headless": OtherFlag(_SERVERS),
    "hf_chat_template_name": OtherFlag("not available: give the template with --chat-template", takes_value=True),
    "hf_config_path": OtherFlag(_CONFIG, takes_value=True),
    "hf_overrides": OtherFlag(_CONFIG, takes_value=True),
    "hf_token": OtherFlag("not available: set the environment variable HF_TOKEN", takes_value=True),
    "hicache_io_backend": OtherFlag(_MEMORY, takes_value=True),
    "hicache_ratio": OtherFlag(_MEMORY, takes_value=True),
    "hicache_size": OtherFlag(_MEMORY, takes_value=True),
    "hicache_storage_backend": OtherFlag(_MEMORY, takes_value=True),
    "hicache_write_policy": OtherFlag(_MEMORY, takes_value=True),
    "incremental_streaming_output": OtherFlag(_INCREMENTAL),
    "is_embedding": OtherFlag(_TEXT),
    "json_model_override_args": OtherFlag(_CONFIG, takes_value=True),
    "kv_cache_memory_bytes": OtherFlag("not available: use --max-total-tokens, in tokens", takes_value=True),
    "kv_offloading_backend": OtherFlag(_MEMORY, takes_value=True),
    "kv_offloading_size": OtherFlag(_MEMORY, takes_value=True),
    "kv_transfer_config": OtherFlag(_ONE_ENGINE, takes_value=True),
    "limit_mm_data_per_request": OtherFlag(_MEDIA, takes_value=True),
    "limit_mm_per_prompt": OtherFlag(_MEDIA, takes_value=True),
    "log_config_file": OtherFlag("not implemented: use --log-level and --log-format", takes_value=True),
    "log_level_http": OtherFlag("not available: --log-level applies to the whole server", takes_value=True),
    "log_requests": OtherFlag(_ACCESS_LOG),
    "log_requests_level": OtherFlag(_ACCESS_LOG, takes_value=True),
    "logits_processors": OtherFlag("not implemented: requests have logit_bias and grammars", takes_value=True),
    "logprobs_mode": OtherFlag("not available: logprobs are always those of the raw logits", takes_value=True),
    "long_prefill_token_threshold": OtherFlag(_PARTIAL, takes_value=True),
    "lora_backend": OtherFlag(_LORA, takes_value=True),
    "lora_modules": OtherFlag(_LORA, takes_value=True),
    "lora_path": OtherFlag(_LORA, takes_value=True),
    "lora_paths": OtherFlag(_LORA, takes_value=True),
    "lora_target_modules": OtherFlag(_LORA, takes_value=True),
    "master_addr": OtherFlag(_MEETING, takes_value=True),
    "master_port": OtherFlag(_MEETING, takes_value=True),
    "max_cpu_loras": OtherFlag(_LORA, takes_value=True),
    "max_cudagraph_capture_size": OtherFlag(_GRAPHS, takes_value=True),
    "max_logprobs": OtherFlag("not available: the limit is always 20", takes_value=True),
    "max_long_partial_prefills": OtherFlag(_PARTIAL, takes_value=True),
    "max_lora_rank": OtherFlag(_LORA, takes_value=True),
    "max_loras": OtherFlag(_LORA, takes_value=True),
    "max_loras_per_batch": OtherFlag(_LORA, takes_value=True),
    "max_num_partial_prefills": OtherFlag(_PARTIAL, takes_value=True),
    "max_prefill_tokens": OtherFlag(
        "not available: --chunked-prefill-size is the maximum number of prompt tokens per step", takes_value=True
    ),
    "max_seq_len_to_capture": OtherFlag(_GRAPHS, takes_value=True),
    "middleware": OtherFlag("not implemented: use a proxy in front of the server", takes_value=True),
    "mm_attention_backend": OtherFlag(_MEDIA, takes_value=True),
    "mm_encoder_tp_mode": OtherFlag(_MEDIA, takes_value=True),
    "mm_processor_cache_gb": OtherFlag(_MEDIA, takes_value=True),
    "mm_processor_kwargs": OtherFlag(_MEDIA, takes_value=True),
    "model_loader_extra_config": OtherFlag("not implemented", takes_value=True),
    "moe_a2a_backend": OtherFlag(_EXPERTS, takes_value=True),
    "moe_backend": OtherFlag(_EXPERTS, takes_value=True),
    "moe_dense_tp_size": OtherFlag(_EXPERTS, takes_value=True),
    "moe_runner_backend": OtherFlag(_EXPERTS, takes_value=True),
    "no_enable_chunked_prefill": OtherFlag("not implemented: set --chunked-prefill-size to --context-length instead"),
    "num_continuous_decode_steps": OtherFlag(_STEPS, takes_value=True),
    "num_gpu_blocks_override": OtherFlag("not available: use --max-total-tokens, in tokens", takes_value=True),
    "num_gpus": OtherFlag("not available: use --tp-size, or --dp-size for replicas", takes_value=True),
    "num_scheduler_steps": OtherFlag(_STEPS, takes_value=True),
    "oltp_traces_endpoint": OtherFlag(_TRACES, takes_value=True),
    "otlp_traces_endpoint": OtherFlag(_TRACES, takes_value=True),
    "override_generation_config": OtherFlag(_RECOMMENDED, takes_value=True),
    "pipeline_parallel_size": OtherFlag(_ONE_MACHINE, takes_value=True),
    "pooler_config": OtherFlag(_TEXT, takes_value=True),
    "pp": OtherFlag(_ONE_MACHINE, takes_value=True),
    "pp_size": OtherFlag(_ONE_MACHINE, takes_value=True),
    "precompile_bs_paddings": OtherFlag(_PROGRAMS, takes_value=True),
    "precompile_token_paddings": OtherFlag(_PROGRAMS, takes_value=True),
    "preemption_mode": OtherFlag("not available: preempted requests are always recomputed", takes_value=True),
    "preferred_sampling_params": OtherFlag(_RECOMMENDED, takes_value=True),
    "prefill_attention_backend": OtherFlag(_ATTENTION, takes_value=True),
    "prefill_max_requests": OtherFlag(_PARTIAL, takes_value=True),
    "priority_scheduling_preemption_threshold": OtherFlag(
        "not implemented: running requests are not preempted for priority", takes_value=True
    ),
    "quantization_param_path": OtherFlag("not available: scales are read from the checkpoint", takes_value=True),
    "reasoning_parser_plugin": OtherFlag(
        "not implemented: --reasoning-parser has the supported formats", takes_value=True
    ),
    "root_path": OtherFlag("not implemented: strip the prefix in your proxy", takes_value=True),
    "rope_scaling": OtherFlag(_CONFIG, takes_value=True),
    "rope_theta": OtherFlag(_CONFIG, takes_value=True),
    "runner": OtherFlag(_TEXT, takes_value=True),
    "schedule_low_priority_values_first": OtherFlag("not implemented: higher values always go first"),
    "shutdown_timeout": OtherFlag("not available: use --drain-timeout", takes_value=True),
    "skip_tokenizer_init": OtherFlag("not implemented: the tokenizer is always loaded; /generate accepts input_ids"),
    "soft_watchdog_timeout": OtherFlag("not available: use --watchdog-timeout", takes_value=True),
    "speculative_config": OtherFlag(
        "not available: use --speculative-algorithm, --speculative-draft-model-path and --speculative-num-draft-tokens",
        takes_value=True,
    ),
    "speculative_draft_model_revision": OtherFlag(
        "not available: download the revision and give its folder", takes_value=True
    ),
    "speculative_eagle_topk": OtherFlag(_GUESSES, takes_value=True),
    "speculative_model": OtherFlag(
        "not available: use --speculative-algorithm draft and --speculative-draft-model-path", takes_value=True
    ),
    "speculative_num_steps": OtherFlag(_GUESSES, takes_value=True),
    "ssl_ca_certs": OtherFlag(_TLS, takes_value=True),
    "ssl_cert_reqs": OtherFlag(_TLS, takes_value=True),
    "ssl_certfile": OtherFlag(_TLS, takes_value=True),
    "ssl_keyfile": OtherFlag(_TLS, takes_value=True),
    "stream_interval": OtherFlag("not implemented: each token is streamed immediately", takes_value=True),
    "stream_output": OtherFlag(_INCREMENTAL),
    "stream_response_default_include_usage": OtherFlag(_USAGE),
    "structured_outputs_config": OtherFlag(_GRAMMARS, takes_value=True),
    "swap_space": OtherFlag(_MEMORY, takes_value=True),
    "task": OtherFlag(_TEXT, takes_value=True),
    "tokenizer_worker_num": OtherFlag("not available: the front end tokenizes in threads", takes_value=True),
    "tool_parser_plugin": OtherFlag("not implemented: --tool-call-parser has the supported formats", takes_value=True),
    "torch_compile_max_bs": OtherFlag(_FUSED, takes_value=True),
    "torchao_config": OtherFlag(_WEIGHTS, takes_value=True),
    "uds": OtherFlag("not implemented: the server listens on a TCP port", takes_value=True),
    "uvicorn_log_level": OtherFlag("not available: --log-level applies to the whole server", takes_value=True),
    "warmups": OtherFlag("not available: --warmup says which programs are compiled at the start", takes_value=True),
}
"""Options for features that this engine does not have."""

BENCHMARK_REFUSED: Mapping[str, OtherFlag] = {
    "metric_percentiles": OtherFlag("not available: mean, median, p90, p95 and p99 are printed", takes_value=True),
    "percentile_metrics": OtherFlag("not available: all metrics are printed", takes_value=True),
    "result_dir": OtherFlag("not available: use --output-file FILE", takes_value=True),
    "save_result": OtherFlag("not available: use --output-file FILE, which appends a line of JSON"),
}
"""The same for options of benchmarks that measure a server."""

SAMPLING_FIELDS: Mapping[str, str] = {
    "include_stop_str_in_output": "include_stop",
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "no_stop_trim": "include_stop",
    "sampling_seed": "seed",
}
"""Other engines' names of fields of `SamplingParams`, and their names here."""

_GRAMMAR = "grammar={}_grammar(...)"
SAMPLING_ELSEWHERE: Mapping[str, str] = {
    "best_of": "not implemented",
    "choice": _GRAMMAR.format("choice"),
    "ebnf": _GRAMMAR.format("ebnf"),
    "guided_choice": _GRAMMAR.format("choice"),
    "guided_decoding": _GRAMMAR.format("json"),
    "guided_grammar": _GRAMMAR.format("ebnf"),
    "guided_json": _GRAMMAR.format("json"),
    "guided_regex": _GRAMMAR.format("regex"),
    "json_schema": _GRAMMAR.format("json"),
    "logprobs": "generate(..., return_logprob=True, top_logprobs_num=...)",
    "regex": _GRAMMAR.format("regex"),
    "response_format": _GRAMMAR.format("json"),
    "structural_tag": _GRAMMAR.format("tag"),
    "structured_outputs": _GRAMMAR.format("json"),
    "top_logprobs": "generate(..., return_logprob=True, top_logprobs_num=...)",
}
"""Fields of other engines' sampling parameters that this engine does not have, and their alternatives."""


def canonical(name: str) -> str:
    """Returns the engine's field for an alias, or `name` itself."""
    return _FIELD_OF.get(name, name)


_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
