"""Values of other engines' options: aliases of this engine's values, and values that are refused with a reason.
`docs/migration.md` shows the same tables; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping

VALUES: Mapping[str, Mapping[str, str]] = {
    "Api": {
        "/generate": "sglang",
        "/v1/chat/completions": "openai_chat",
        "/v1/completions": "openai",
        "sglang_native": "sglang",
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
    "LoadFormat": {"jax": "auto"},
    "LogLevel": {"warn": "warning", "critical": "error", "trace": "debug"},
    "AttentionBackend": {"torch_native": "native"},
    "SpeculativeAlgorithm": {"draft_model": "draft", "standalone": "draft"},
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
    "WeightQuantization": {
        **dict.fromkeys(("compressed_tensors", "gguf", "modelopt", "modelopt_fp8", "none"), "auto"),
        "w8a8_fp8": "fp8",
        "w8a8_int8": "int8",
    },
    "ReasoningParser": {"qwen3_thinking": "deepseek_r1", "openai_gptoss": "gpt_oss"},
}
"""Enums, and aliases of their values, in lower case and with underscores like the values."""

_WEIGHTS = "not available: use --quantization int8 or fp8, or a checkpoint that is quantised so"
_OTHER_WEIGHTS = "not implemented: use int8 or fp8, or a checkpoint that is quantised so"
_GRAMMARS = "not available: use llguidance, which supports all kinds of grammars"
_ONE_ENGINE = "not implemented: each engine runs both prefill and decode"
_PARSERS = "not implemented: docs/tools.md lists the supported formats"
_KERNELS = "not available: use auto, which chooses triton on GPUs and pallas on TPUs"
_FORMATS = "not implemented: convert the checkpoint to safetensors"
_POLICIES = "not implemented: lpm and lof order requests by the prefix cache and by length"
_GUESSERS = "not implemented: use ngram, or draft with a smaller model"
_DATA = "not available: nothing is downloaded; use sharegpt with a file, or a generated dataset"
_ROUTES = "not implemented: use openai, which measures any server with OpenAI's routes"
_KV = "not implemented: use fp8_e4m3 or int8"

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    "Api": dict.fromkeys(("gserver", "lmdeploy", "tensorrt_llm", "tgi", "trt", "truss"), _ROUTES),
    "AttentionBackend": dict.fromkeys(
        (
            *("aiter", "cutlass_mla", "fa", "fa2", "fa3", "fa4", "flash_attn", "flashmla", "flex_attention"),
            *("intel_amx", "torch_sdpa", "trtllm_mha", "trtllm_mla", "xformers"),
        ),
        _KERNELS,
    ),
    "Dataset": dict.fromkeys(("burstgpt", "hf", "image", "mmmu", "mooncake", "random_image", "sonnet"), _DATA),
    "Device": dict.fromkeys(("hpu", "musa", "npu", "rocm", "xpu"), "not implemented: only CPUs, NVIDIA GPUs and TPUs"),
    "Dtype": dict.fromkeys(("fp8", "float8", "fp4", "int4", "int8"), _WEIGHTS),
    "EvictionPolicy": dict.fromkeys(("filo", "mru", "priority", "slru"), "not implemented"),
    "GrammarLibrary": dict.fromkeys(("lm_format_enforcer", "outlines", "xgrammar"), _GRAMMARS),
    "KVCacheDtype": {
        "bf16": "not available: auto uses the dtype of --dtype",
        "bfloat16": "not available: auto uses the dtype of --dtype",
        "float8_e5m2": _KV,
        "fp4_e2m1": _KV,
        "fp8_e5m2": _KV,
        "fp8_inc": _KV,
    },
    "LoadBalanceMethod": {
        "minimum_tokens": "not implemented: use least_loaded, which counts requests",
        "total_tokens": "not implemented: use least_loaded, which counts requests",
        "decode_round_robin": _ONE_ENGINE,
        "follow_bootstrap_room": _ONE_ENGINE,
    },
    "LoadFormat": dict.fromkeys(
        (
            *("bitsandbytes", "fastsafetensors", "layered", "mistral", "npcache", "pt", "remote"),
            *("runai_streamer", "sharded_state", "tensorizer"),
        ),
        _FORMATS,
    ),
    "MambaDtype": {"float16": "not implemented: use float32 or bfloat16"},
    "ReasoningParser": dict.fromkeys(
        ("deepseek_v3", "glm45", "granite", "hunyuan_a13b", "kimi", "kimi_k2", "minimax", "mistral", "step3"), _PARSERS
    ),
    "SchedulePolicy": dict.fromkeys(("dfs_weight", "random", "routing_key"), _POLICIES),
    "SpeculativeAlgorithm": dict.fromkeys(
        ("dflash", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "nextn", "suffix"), _GUESSERS
    ),
    "WeightQuantization": dict.fromkeys(
        (
            *("awq", "awq_marlin", "bitsandbytes", "fbgemm_fp8", "gptq", "gptq_marlin", "marlin", "modelopt_fp4"),
            *("moe_wna16", "mxfp4", "mxfp8", "nvfp4", "petit_nvfp4", "qoq", "quark", "torchao", "w4afp8"),
        ),
        _OTHER_WEIGHTS,
    ),
    "ToolCallParser": dict.fromkeys(
        (
            *("glm", "glm45", "granite", "internlm", "jamba", "kimi_k2", "lfm2", "llama4_json", "llama4_pythonic"),
            *("minimax_m2", "olmo3", "phi4_mini_json", "pythonic", "step3", "xlam"),
        ),
        _PARSERS,
    ),
}
"""Enums, and values that only other engines have for the option, with their alternatives."""


def value_named(enum: str, value: str) -> str:
    """Returns the value of the enum `enum` for one of its spellings: case, and dashes or underscores, do not count."""
    plain = value.lower().replace("-", "_")
    return VALUES.get(enum, {}).get(plain, plain)


def refused_value(enum: str, value: str) -> str | None:
    """Returns the alternative to a value that only other engines have for the enum `enum`; None if it is unknown."""
    return REFUSED_VALUES.get(enum, {}).get(value.lower().replace("-", "_"))
