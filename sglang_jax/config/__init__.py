"""Every option of the engine and the server: typed, documented, validated once.

`choices.py` has the values that an option may have, `engine.py` and `server.py` the options, `environment.py` what is
read from the environment, `keys.py` keys and secrets.
"""

from __future__ import annotations

from sglang_jax.config.choices import (
    ALWAYS_RUN,
    PASS_SUMMARIES,
    AttentionBackend,
    Backend,
    Choice,
    CompilePass,
    Device,
    Dtype,
    EvictionPolicy,
    GrammarLibrary,
    KVCacheDtype,
    LoadBalanceMethod,
    LoadFormat,
    LogFormat,
    LogLevel,
    MambaDtype,
    ModelImpl,
    ReasoningParser,
    SamplingDefaults,
    SchedulePolicy,
    SpeculativeAlgorithm,
    ToolCallParser,
    Warmup,
    WeightQuantization,
    chosen_passes,
)
from sglang_jax.config.engine import EngineConfig, PositiveInt
from sglang_jax.config.environment import Environment, TpuEnvironment, VisibleDevices
from sglang_jax.config.keys import MIN_GROUP_SECRET, check_key, read_secret_file
from sglang_jax.config.server import ServerConfig

__all__ = [
    "ALWAYS_RUN",
    "MIN_GROUP_SECRET",
    "PASS_SUMMARIES",
    "AttentionBackend",
    "Backend",
    "Choice",
    "CompilePass",
    "Device",
    "Dtype",
    "EngineConfig",
    "Environment",
    "EvictionPolicy",
    "GrammarLibrary",
    "KVCacheDtype",
    "LoadBalanceMethod",
    "LoadFormat",
    "LogFormat",
    "LogLevel",
    "MambaDtype",
    "ModelImpl",
    "PositiveInt",
    "ReasoningParser",
    "SamplingDefaults",
    "SchedulePolicy",
    "ServerConfig",
    "SpeculativeAlgorithm",
    "ToolCallParser",
    "TpuEnvironment",
    "VisibleDevices",
    "Warmup",
    "WeightQuantization",
    "check_key",
    "chosen_passes",
    "read_secret_file",
]
