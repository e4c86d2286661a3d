"""What other engines call our options and values: names that are accepted, that change nothing, or that are refused
with the reason.

Flags, keys of a configuration file and keyword arguments of `Engine` are all looked up here, by their names with
underscores. `docs/migration.md` shows the same tables; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIASES: Mapping[str, Sequence[str]] = {
    "model_path": ("model",),
    "tokenizer_path": ("tokenizer",),
    "tp_size": ("tp", "tensor_parallel_size"),
    "dp_size": ("dp", "data_parallel_size"),
    "context_length": ("max_model_len",),
    "max_running_requests": ("max_num_seqs",),
    "chunked_prefill_size": ("max_num_batched_tokens",),
    "page_size": ("block_size",),
    "schedule_policy": ("scheduling_policy",),
    "disable_radix_cache": ("no_enable_prefix_caching",),
    "disable_cuda_graph": ("enforce_eager",),
    "random_seed": ("seed",),
    "skip_warmup": ("skip_server_warmup",),
}
"""Field of a configuration to further names for it that mean the same."""

SHORT_FLAGS: Mapping[str, str] = {"tp_size": "-tp", "dp_size": "-dp"}
"""Field to a flag with one dash."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "Api": {
        "sglang_oai": "openai",
        "sglang_oai_chat": "openai_chat",
        "vllm": "openai",
        "vllm_chat": "openai_chat",
    },
    "Dataset": {"random": "random_ids"},
    "Dtype": {"bf16": "bfloat16", "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32"},
    "KVCacheDtype": {"fp8": "fp8_e4m3", "float8_e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"},
    "ModelImpl": {"auto": "native", "sglang": "native", "vllm": "native", "hf": "transformers"},
    "MambaDtype": {"bf16": "bfloat16", "float": "float32", "fp32": "float32"},
    "Device": {"gpu": "cuda"},
    "GrammarLibrary": {"auto": "llguidance", "guidance": "llguidance"},
    "LoadBalanceMethod": {"auto": "cache_aware", "shortest_queue": "least_loaded", "total_requests": "least_loaded"},
    "LogLevel": {"warn": "warning", "critical": "error", "trace": "debug"},
    "AttentionBackend": {"torch_native": "native"},
    "ToolCallParser": {
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen2.5": "hermes",
        "qwen3_xml": "qwen3_coder",
        "llama3_json": "llama3",
        "deepseekv3": "deepseek",
        "deepseek_v3": "deepseek",
        "deepseekv31": "deepseek",
        "deepseek_v31": "deepseek",
        "openai": "gpt_oss",
    },
    "ReasoningParser": {"qwen3_thinking": "deepseek_r1", "openai_gptoss": "gpt_oss"},
}
"""Enum to further spellings of its values, in lower case and with underscores, as the values are here."""


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """An option of other engines that is none of ours.

    - `takes_value`: a value follows it on the command line.
    - `note`: what holds instead; a sentence.
    """

    note: str
    takes_value: bool = False


NEEDLESS: Mapping[str, OtherFlag] = {
    "async_scheduling": OtherFlag("each step is always planned while the one before it runs"),
    "disable_log_requests": OtherFlag("requests are not logged"),
    "enable_auto_tool_choice": OtherFlag("the model may call the tools of any request that has some"),
    "disable_uvicorn_access_log": OtherFlag("there is an access log only with --log-level debug"),
    "enable_cache_report": OtherFlag("usage always has the cached tokens"),
    "enable_chunked_prefill": OtherFlag("prompts are always computed in chunks, of --chunked-prefill-size"),
    "enable_deterministic_inference": OtherFlag("results never depend on the batch"),
    "enable_metrics": OtherFlag("/metrics is always on"),
    "enable_mixed_chunk": OtherFlag("chunks and decode rows always share steps"),
    "enable_p2p_check": OtherFlag("ranks only use the collectives of JAX and torch"),
    "enable_prefix_caching": OtherFlag("the prefix cache is on unless --disable-radix-cache turns it off"),
    "enable_prompt_tokens_details": OtherFlag("usage always has the cached tokens"),
    "enable_request_id_headers": OtherFlag("every response has X-Request-Id"),
    "enable_streaming_session": OtherFlag("sessions can always be opened"),
    "trust_remote_code": OtherFlag("code of a checkpoint is never run"),
}
"""Options for what is so anyway: accepted, with a line that says so."""

_ONE_MACHINE = "not implemented: layers are spread by --tp-size, over several machines with --nnodes"
_LORA = "not implemented: merge the adapter into the model's weights"
_TLS = "not implemented: let a proxy in front of the server end TLS, see docs/security.md"
_MEMORY = "not implemented: the KV cache lives in device memory only"
_MEDIA = "not implemented: models only take text"
_CONFIG = "not implemented: the model's config.json holds; copy the model's folder and edit it"
_ACCESS_LOG = "not an option here: --log-level debug has an access log, without texts"
_FUSED = "not implemented: kernels are fused by hand; for CUDA graphs see --disable-cuda-graph and --cuda-graph-max-bs"
_GRAPHS = "not an option here: --cuda-graph-max-bs is the largest step that runs as a CUDA graph"
_PROGRAMS = "not an option here: programs follow from --max-running-requests, --chunked-prefill-size and --page-size"
_GUESSES = "not an option here: --speculative-num-draft-tokens is the maximum of guesses, one after the other"
_GPUS = "not an option here: set CUDA_VISIBLE_DEVICES"
_RECOMMENDED = "not an option here: --sampling-defaults chooses between the model's values and OpenAI's"
_SLEEP = "not implemented: weights and KV stay in device memory; stop the server and start it again"
_STEPS = "not implemented: each step is launched while the one before it runs"
_WEIGHTS = (
    "not implemented: weights are held in --dtype; GGUF files of every block type are read, and widened; "
    "--keep-gguf-blocks keeps Q4_0, Q4_1 and Q8_0 as well on a CPU"
)
_GRAMMARS = "not an option here: --grammar-backend chooses what follows grammars, and llguidance reads all kinds"

REFUSED: Mapping[str, OtherFlag] = {
    "allow_auto_truncate": OtherFlag("not implemented: prompts that are too long get 400; truncate them before"),
    "api_server_count": OtherFlag(
        "not an option here: one front end serves all engines; see --dp-size", takes_value=True
    ),
    "base_gpu_id": OtherFlag(_GPUS, takes_value=True),
    "compilation_config": OtherFlag(_FUSED, takes_value=True),
    "cpu_offload_gb": OtherFlag(_MEMORY, takes_value=True),
    "cuda_graph_bs": OtherFlag(_GRAPHS, takes_value=True),
    "disable_log_stats": OtherFlag("not an option here: --log-level warning leaves the lines of steps out"),
    "disable_overlap_schedule": OtherFlag(_STEPS),
    "disaggregation_mode": OtherFlag("not implemented: one engine computes prompts and outputs", takes_value=True),
    "distributed_executor_backend": OtherFlag(
        "not an option here: each rank is a separate process, see --tp-size and --nnodes", takes_value=True
    ),
    "download_dir": OtherFlag("not implemented: set HF_HOME, the hub's own variable", takes_value=True),
    "enable_custom_logit_processor": OtherFlag("not implemented: requests have logit_bias, penalties and grammars"),
    "enable_dp_attention": OtherFlag("not implemented: see --dp-size for replicas"),
    "enable_expert_parallel": OtherFlag("not implemented: there are no models of experts yet"),
    "enable_hierarchical_cache": OtherFlag(_MEMORY),
    "enable_log_requests": OtherFlag(_ACCESS_LOG),
    "enable_lora": OtherFlag(_LORA),
    "enable_memory_saver": OtherFlag(_SLEEP),
    "enable_multimodal": OtherFlag(_MEDIA),
    "enable_priority_scheduling": OtherFlag("not an option here: use --schedule-policy priority"),
    "enable_sleep_mode": OtherFlag(_SLEEP),
    "enable_torch_compile": OtherFlag(_FUSED),
    "ep": OtherFlag("not implemented: there are no models of experts yet", takes_value=True),
    "ep_size": OtherFlag("not implemented: there are no models of experts yet", takes_value=True),
    "expert_parallel_size": OtherFlag("not implemented: there are no models of experts yet", takes_value=True),
    "fastapi_root_path": OtherFlag("not implemented: let the proxy in front take the prefix off", takes_value=True),
    "generation_config": OtherFlag(_RECOMMENDED, takes_value=True),
    "gpu_id_step": OtherFlag(_GPUS, takes_value=True),
    "gpu_memory_utilization": OtherFlag(
        "not an option here: --mem-fraction-static is the share for weights and KV pages together, without what "
        "activations take; a value 0.05 lower is a good start",
        takes_value=True,
    ),
    "guided_decoding_backend": OtherFlag(_GRAMMARS, takes_value=True),
    "hf_overrides": OtherFlag(_CONFIG, takes_value=True),
    "hf_token": OtherFlag("not an option here: set HF_TOKEN, the hub's own variable", takes_value=True),
    "is_embedding": OtherFlag("not implemented: models only generate text"),
    "json_model_override_args": OtherFlag(_CONFIG, takes_value=True),
    "kv_cache_memory_bytes": OtherFlag("not an option here: --max-total-tokens is in tokens", takes_value=True),
    "kv_transfer_config": OtherFlag("not implemented: one engine computes prompts and outputs", takes_value=True),
    "limit_mm_per_prompt": OtherFlag(_MEDIA, takes_value=True),
    "log_level_http": OtherFlag("not an option here: --log-level is that of the whole server", takes_value=True),
    "log_requests": OtherFlag(_ACCESS_LOG),
    "log_requests_level": OtherFlag(_ACCESS_LOG, takes_value=True),
    "lora_modules": OtherFlag(_LORA, takes_value=True),
    "lora_path": OtherFlag(_LORA, takes_value=True),
    "lora_paths": OtherFlag(_LORA, takes_value=True),
    "max_logprobs": OtherFlag("not an option here: requests may ask for up to 20 alternatives", takes_value=True),
    "max_loras": OtherFlag(_LORA, takes_value=True),
    "max_prefill_tokens": OtherFlag(
        "not an option here: --chunked-prefill-size is the maximum of prompt tokens in a step", takes_value=True
    ),
    "max_seq_len_to_capture": OtherFlag(_GRAPHS, takes_value=True),
    "mm_processor_kwargs": OtherFlag(_MEDIA, takes_value=True),
    "no_enable_chunked_prefill": OtherFlag(
        "not implemented: --chunked-prefill-size may be as large as --context-length"
    ),
    "num_continuous_decode_steps": OtherFlag(_STEPS, takes_value=True),
    "num_gpu_blocks_override": OtherFlag("not an option here: --max-total-tokens is in tokens", takes_value=True),
    "num_scheduler_steps": OtherFlag(_STEPS, takes_value=True),
    "otlp_traces_endpoint": OtherFlag("not implemented: see /metrics, and X-Request-Id in the log", takes_value=True),
    "override_generation_config": OtherFlag(_RECOMMENDED, takes_value=True),
    "pipeline_parallel_size": OtherFlag(_ONE_MACHINE, takes_value=True),
    "pp": OtherFlag(_ONE_MACHINE, takes_value=True),
    "pp_size": OtherFlag(_ONE_MACHINE, takes_value=True),
    "precompile_bs_paddings": OtherFlag(_PROGRAMS, takes_value=True),
    "precompile_token_paddings": OtherFlag(_PROGRAMS, takes_value=True),
    "preemption_mode": OtherFlag(
        "not an option here: what a retracted request had is computed again", takes_value=True
    ),
    "preferred_sampling_params": OtherFlag(_RECOMMENDED, takes_value=True),
    "quantization": OtherFlag(_WEIGHTS, takes_value=True),
    "root_path": OtherFlag("not implemented: let the proxy in front take the prefix off", takes_value=True),
    "rope_scaling": OtherFlag(_CONFIG, takes_value=True),
    "runner": OtherFlag("not implemented: models only generate text", takes_value=True),
    "skip_tokenizer_init": OtherFlag("not implemented: the tokenizer is always loaded; /generate takes input_ids"),
    "speculative_config": OtherFlag(
        "not an option here: use --speculative-algorithm, --speculative-draft-model-path and "
        "--speculative-num-draft-tokens",
        takes_value=True,
    ),
    "speculative_eagle_topk": OtherFlag(_GUESSES, takes_value=True),
    "speculative_num_steps": OtherFlag(_GUESSES, takes_value=True),
    "ssl_ca_certs": OtherFlag(_TLS, takes_value=True),
    "ssl_certfile": OtherFlag(_TLS, takes_value=True),
    "ssl_keyfile": OtherFlag(_TLS, takes_value=True),
    "stream_interval": OtherFlag("not implemented: tokens are sent as they come", takes_value=True),
    "swap_space": OtherFlag(_MEMORY, takes_value=True),
    "task": OtherFlag("not implemented: models only generate text", takes_value=True),
    "torch_compile_max_bs": OtherFlag(_FUSED, takes_value=True),
    "torchao_config": OtherFlag(_WEIGHTS, takes_value=True),
    "uvicorn_log_level": OtherFlag("not an option here: --log-level is that of the whole server", takes_value=True),
}
"""Options for what this engine has not got."""

SAMPLING_FIELDS: Mapping[str, str] = {
    "include_stop_str_in_output": "include_stop",
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "no_stop_trim": "include_stop",
    "sampling_seed": "seed",
}
"""What other engines call fields of `SamplingParams`, to their names here."""

_GRAMMAR = "the field grammar, made by {}_grammar()"
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
    "logprobs": "given to generate(): return_logprob=True, top_logprobs_num=...",
    "regex": _GRAMMAR.format("regex"),
    "response_format": _GRAMMAR.format("json"),
    "structural_tag": _GRAMMAR.format("tag"),
    "structured_outputs": _GRAMMAR.format("json"),
    "top_logprobs": "given to generate(): return_logprob=True, top_logprobs_num=...",
}
"""Fields of other engines' sampling parameters that are no field of ours, and what there is instead."""


def canonical(name: str) -> str:
    """The field that `name` is another name of, or `name` itself."""
    return _FIELD_OF.get(name, name)


def value_named(enum: str, value: str) -> str:
    """The value of the enum `enum` that `value` stands for: case does not count, nor whether it has dashes or
    underscores."""
    plain = value.lower().replace("-", "_")
    return VALUES.get(enum, {}).get(plain, plain)


_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}
