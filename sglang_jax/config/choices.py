"""Options with a fixed set of values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from sglang_jax.spellings import value_named


class Choice(StrEnum):
    """One of a fixed set of values, each of which may have several spellings."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        name = value_named(cls.__name__, str(value))
        return next((member for member in cls if member.value.replace("-", "_") == name), None)


class Backend(Choice):
    """Name of an entry point in the group `sglang_jax.backends`, or auto."""

    AUTO = "auto"
    JAX = "jax"
    TORCH = "torch"


class Device(Choice):
    AUTO = "auto"
    CPU = "cpu"
    TPU = "tpu"
    CUDA = "cuda"


class Dtype(Choice):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Deterministic(Choice):
    """What logits do not depend on: the batch, or also the number of devices that share a layer (tp)."""

    NONE = "none"
    BATCH = "batch"
    TP = "tp"


class CpuActivations(Choice):
    """The form of activations in products with matrices in blocks on a CPU."""

    AUTO = "auto"
    EXACT = "exact"
    INT8 = "int8"


class TpuActivations(Choice):
    """The form of activations in products with 8-bit matrices, in steps of many tokens on a TPU."""

    AUTO = "auto"
    EXACT = "exact"
    ROUNDED = "rounded"


class LoadFormat(Choice):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    ORBAX = "orbax"
    DUMMY = "dummy"


class Task(Choice):
    """What a model gives for a text: more text, a vector, or scores of labels."""

    AUTO = "auto"
    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"


class PoolingType(Choice):
    """Which tokens make a text's vector, by `architectures.pooling.Pooling`."""

    AUTO = "auto"
    LAST = "last"
    MEAN = "mean"
    CLS = "cls"


class ModelImpl(Choice):
    """This project's code, or that of transformers, which the Torch backend traces and rewrites."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"


class CompilePass(Choice):
    """A rewriting of a model's graph (`torch_backend.compilation`)."""

    NO_OPS = "no-ops"
    PAGED_ATTENTION = "paged-attention"
    COLLECTIVES = "collectives"
    NORM = "norm"
    ROPE = "rope"
    HEAD_NORM = "head-norm"
    GATED_ACTIVATION = "gated-activation"
    MERGE_LINEARS = "merge-linears"
    ADD_NORM = "add-norm"
    ALL_REDUCE_ADD_NORM = "all-reduce-add-norm"


PASS_SUMMARIES: Mapping[CompilePass, str] = {
    CompilePass.NO_OPS: "remove casts, views, slices and products that change nothing",
    CompilePass.PAGED_ATTENTION: "write keys and values to pages, and compute attention over pages (always runs)",
    CompilePass.COLLECTIVES: "with --tp-size, sum or gather over ranks what each has a part of (always runs)",
    CompilePass.NORM: "fuse RMS norms with weights w or 1 + w",
    CompilePass.ROPE: "fuse rotary embedding of whole heads with writing keys and values",
    CompilePass.HEAD_NORM: "fuse RMS norms of each head with rope",
    CompilePass.GATED_ACTIVATION: "fuse SiLU or GELU (tanh) of the gate, times up",
    CompilePass.MERGE_LINEARS: "merge linear layers that read the same input (qkv, gate and up)",
    CompilePass.ADD_NORM: "fuse a sum with the RMS norm after it",
    CompilePass.ALL_REDUCE_ADD_NORM: "fuse a sum over ranks with the sum and the RMS norm after it",
}
"""What each pass does, in the order in which they run."""

ALWAYS_RUN = frozenset({CompilePass.PAGED_ATTENTION, CompilePass.COLLECTIVES})
"""Passes that run in any case, since no model could be served without them."""


def chosen_passes(names: str) -> frozenset[CompilePass]:
    """The passes that `compile_passes` names, and `ALWAYS_RUN`. Raises `ValueError` for an unknown name."""
    if names in ("all", "none"):
        return frozenset(CompilePass) if names == "all" else ALWAYS_RUN
    known = {each.value: each for each in CompilePass}
    given = [name.strip() for name in names.split(",")]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"unknown pass {unknown[0]!r}: choose all, none, or some of {', '.join(known)}")
    return ALWAYS_RUN | {known[name] for name in given}


class SchedulePolicy(Choice):
    FCFS = "fcfs"
    LPM = "lpm"
    LOF = "lof"
    PRIORITY = "priority"


class EvictionPolicy(Choice):
    LRU = "lru"
    LFU = "lfu"
    FIFO = "fifo"


class LoadBalanceMethod(Choice):
    CACHE_AWARE = "cache_aware"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


class AttentionBackend(Choice):
    """`XLA` and `PALLAS` (TPU) are the JAX backend's; the torch backend's are `NATIVE` (torch operations), `NUMBA`
    (CPU), `TRITON` (GPU), `SAGE` (keys and queries in int8, by Triton on a GPU and by torch operations on a CPU), and
    `FLASHINFER`, a library for GPUs."""

    AUTO = "auto"
    REFERENCE = "reference"
    XLA = "xla"
    PALLAS = "pallas"
    NATIVE = "native"
    NUMBA = "numba"
    TRITON = "triton"
    SAGE = "sage"
    FLASHINFER = "flashinfer"


class KVCacheDtype(Choice):
    AUTO = "auto"
    FLOAT8_E4M3 = "fp8_e4m3"
    INT8 = "int8"


class WeightQuantization(Choice):
    """The format to which weights are quantised while they are loaded."""

    AUTO = "auto"
    """Not quantised: they stay as the checkpoint stores them."""
    INT8 = "int8"
    FLOAT8_E4M3 = "fp8"
    INT4 = "int4"


class MambaDtype(Choice):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class SamplingDefaults(Choice):
    """The source of values for sampling fields that a request leaves out."""

    MODEL = "model"
    OPENAI = "openai"


class Warmup(Choice):
    """Which programs are compiled before the first request: one for every step, or all."""

    FIRST = "first"
    FULL = "full"


class GrammarLibrary(Choice):
    LLGUIDANCE = "llguidance"
    NONE = "none"


class ToolCallParser(Choice):
    AUTO = "auto"
    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    DEEPSEEK = "deepseek"
    GPT_OSS = "gpt_oss"
    NONE = "none"


class ReasoningParser(Choice):
    NONE = "none"
    AUTO = "auto"
    DEEPSEEK_R1 = "deepseek_r1"
    QWEN3 = "qwen3"
    GPT_OSS = "gpt_oss"


class SpeculativeAlgorithm(Choice):
    """The source of draft tokens. `NGRAM` continues the text as after an earlier occurrence of its last tokens; `DRAFT`
    uses a second, smaller model."""

    NONE = "none"
    NGRAM = "ngram"
    DRAFT = "draft"


class LogLevel(Choice):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Choice):
    TEXT = "text"
    JSON = "json"
