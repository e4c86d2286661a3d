"""The options of an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

from platformdirs import user_cache_dir
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sglang_jax.config.choices import (
    AttentionBackend,
    Backend,
    CompilePass,
    CpuActivations,
    Deterministic,
    Device,
    Dtype,
    EvictionPolicy,
    GrammarLibrary,
    KVCacheDtype,
    LoadBalanceMethod,
    LoadFormat,
    MambaDtype,
    ModelImpl,
    PoolingType,
    SamplingDefaults,
    SchedulePolicy,
    SpeculativeAlgorithm,
    Task,
    TpuActivations,
    Warmup,
    WeightQuantization,
    chosen_passes,
)
from sglang_jax.config.environment import Environment, OtherEnvironment
from sglang_jax.config.keys import MIN_GROUP_SECRET, read_secret_file
from sglang_jax.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]

MAX_WEIGHT_VERSION = 128
"""Maximum characters of the name of a version of the weights, which every reply repeats."""

WeightVersion = Annotated[str, Field(min_length=1, max_length=MAX_WEIGHT_VERSION)]

DEFAULT_WEIGHT_VERSION = "default"


def _as_text(path: object) -> object:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _debug_memory() -> bool:
    given = Environment().debug_memory
    return OtherEnvironment.read().debug_memory_pool if given is None else given


WARMUP = (
    "programs compiled before the first request: full, all of them; first, one that fits for every step, while the "
    "others are compiled in the background (JAX on one node)"
)
"""Description of `warmup`, whose default differs between engine and server."""


class EngineConfig(BaseModel):
    """Options of one engine. Field names are the command line's flags, with underscores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str = Field(
        "demo",
        description="`demo` (the embedded SmolLM2-135M-Instruct), a folder, a .gguf file, a hub id, or gs://BUCKET/PATH",
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of the model's repository on the hub; default: its main branch"
    )
    tokenizer_path: str | None = Field(
        None, description="folder, hub id or gs://BUCKET/PATH of the tokenizer; default: the model's"
    )
    tokenizer_revision: str | None = Field(
        None, description="branch, tag or commit of the tokenizer's repository; default: its main branch"
    )
    allow_special_tokens_in_content: bool = Field(
        False, description="treat control tokens spelled out in chat messages as control tokens, not as text"
    )
    weight_version: WeightVersion = Field(
        DEFAULT_WEIGHT_VERSION,
        description=f"name of this version of the weights, in replies; at most {MAX_WEIGHT_VERSION} characters",
    )
    load_format: LoadFormat = Field(LoadFormat.AUTO, description="how the weights are stored; dummy: random weights")
    model_impl: ModelImpl = Field(
        ModelImpl.NATIVE,
        description="model code to run; native: this project's; transformers: the transformers library's, traced and "
        "rewritten (torch backend only)",
    )
    model_task: Task = Field(
        Task.AUTO,
        description="what the model gives: generate: text; embed: a vector of each text; classify: scores of its "
        "labels; auto: by the checkpoint",
    )
    pooling: PoolingType = Field(
        PoolingType.AUTO,
        description="with model_task embed, the hidden states that make a vector: last: of the last token; mean: of "
        "all; cls: of the first; auto: by the checkpoint, otherwise last",
    )
    compile_passes: str = Field(
        "all",
        description="graph passes for --model-impl transformers: all, none, or names separated by commas (see "
        "--list-passes)",
    )
    dump_graphs: Path | None = Field(
        None,
        description="folder for the graphs of --model-impl transformers, before and after each pass, as text and SVG; "
        "default: none",
    )
    keep_gguf_blocks: bool = Field(
        False,
        description="with cpu_activations exact: also keep GGUF's Q4_0, Q4_1 and Q8_0 matrices quantised, for steps "
        "with few rows: faster on a CPU with avx512_bf16; bfloat16 rounding then depends on the batch size",
    )
    cpu_activations: CpuActivations = Field(
        CpuActivations.AUTO,
        description="activations in products with GGUF's quantised matrices, or int8 ones, on a CPU: exact: as they "
        "are; int8: rounded to int8 with a scale for 32 of them, and the matrices stay quantised, which is faster and "
        "takes less memory; auto: int8, but exact with dtype float32 or equal results",
    )
    tpu_activations: TpuActivations = Field(
        TpuActivations.AUTO,
        description="activations in products with 8-bit matrices that have a scale per row, in steps of many tokens "
        "on a TPU: exact: as they are; rounded: rounded to the matrix's type with a scale per token, which is faster; "
        "auto: rounded if the checkpoint or quantization fp8 says so, but exact with dtype float32 or equal results",
    )
    backend: Backend = Field(
        Backend.AUTO,
        description="framework that runs the model; auto: jax on a TPU, torch on a GPU, otherwise the installed one",
    )
    device: Device = Field(
        Device.AUTO, description="device type to run on; auto: the accelerator that the backend sees, else cpu"
    )
    dtype: Dtype = Field(
        Dtype.AUTO, description="dtype of weights and activations; auto: the fastest one for the device"
    )
    quantization: WeightQuantization = Field(
        WeightQuantization.AUTO,
        description="quantise the matrices of layers while loading them, with a scale for each row, or for each 128 "
        "weights of a row with int4; auto: as they are stored in the checkpoint",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        KVCacheDtype.AUTO,
        description="dtype of the KV cache; auto: the same as --dtype",
    )
    enable_deterministic_inference: bool = Field(
        False,
        description="the same logits, bit for bit, whatever else runs and however a prompt is cut, cached, retracted "
        "or drafted; slower",
    )
    deterministic: Deterministic = Field(
        Deterministic.NONE,
        description="batch: as --enable-deterministic-inference; tp: also the same logits with 1, 2, 4 or 8 devices "
        "(--tp-size); slower still",
    )
    tp_size: PositiveInt = Field(1, description="number of devices that share each layer (tensor parallelism)")
    ep_size: PositiveInt = Field(
        1,
        description="into how many parts the experts are divided among the devices of --tp-size, whole experts each "
        "(expert parallelism); devices with the same part share the columns of its experts",
    )
    enable_expert_parallel: bool = Field(False, description="as --ep-size with the number of --tp-size")
    dp_size: PositiveInt = Field(
        1, description="number of replicas on this machine, each on separate devices (data parallelism)"
    )
    enable_dp_attention: bool = Field(
        False,
        description="each device of --tp-size computes the attention of separate rows, and caches only these; for "
        "models with latent attention, on JAX; --dp-size is then 1 or that of --tp-size, and there is one replica",
    )
    load_balance_method: LoadBalanceMethod = Field(
        LoadBalanceMethod.CACHE_AWARE,
        description="how requests are assigned to replicas: longest cached prefix, round robin, or least load",
    )
    nnodes: PositiveInt = Field(1, description="number of nodes that share the model; run the same command on each")
    node_rank: int = Field(0, ge=0, description="number of this node; node 0 runs the scheduler and the server")
    dist_init_addr: str | None = Field(None, description="HOST:PORT of node 0; required with several nodes")
    dist_bind_host: str | None = Field(
        None, description="address that node 0 listens on for other nodes; default: the host of dist_init_addr"
    )
    group_secret_file: Path | None = Field(
        None,
        description="file with the secret that nodes authenticate with, the same on each node; also read from "
        "SGLANG_JAX_GROUP_SECRET; without one, any machine that can connect to node 0 may join",
    )
    context_length: PositiveInt | None = Field(
        None, description="maximum tokens of a request, prompt plus output; default: the model's limit"
    )
    mem_fraction_static: float = Field(
        0.85, gt=0.0, lt=1.0, description="fraction of free device memory for weights plus KV cache"
    )
    max_total_tokens: PositiveInt | None = Field(
        None, description="size of the KV cache in tokens; default: as memory allows"
    )
    swa_full_tokens_ratio: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="KV cache size of sliding-window layers, as a fraction of that of full-attention layers; default: "
        "from window and context, at least 0.25",
    )
    max_mamba_cache_size: PositiveInt | None = Field(
        None,
        description="number of slots for recurrent states (Mamba, gated delta nets): one per running request, the "
        "rest for cached prefixes; default: from mamba_full_memory_ratio",
    )
    mamba_full_memory_ratio: float = Field(
        0.9,
        gt=0.0,
        allow_inf_nan=False,
        description="memory for recurrent states, as a fraction of that for the KV cache, a draft model's included",
    )
    mamba_ssm_dtype: MambaDtype = Field(
        MambaDtype.FLOAT32,
        description="dtype of recurrent states; bfloat16 halves their memory, but rounds at every step "
        "(convolutions keep their inputs in the dtype of activations)",
    )
    mamba_track_interval: int = Field(
        64,
        ge=0,
        description="output tokens between saved recurrent states, rounded to whole pages; the next turn of a chat "
        "resumes from the last one; takes up to one more slot per request; 0: save only states that end on a page; "
        "turns of sessions save one at each page",
    )
    max_running_requests: PositiveInt | None = Field(
        None, description="maximum concurrent requests; default: 32 on a CPU, 256 elsewhere"
    )
    max_queued_requests: PositiveInt | None = Field(
        None, description="maximum queued requests; more are refused with 503; default: no limit"
    )
    chunked_prefill_size: PositiveInt | None = Field(
        None,
        description="maximum prompt tokens per step; default: 512 on CPUs and TPUs, 1024 to 8192 on GPUs, depending "
        "on memory",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="target inter-token latency in milliseconds: prompt chunks shrink to keep it, based on the time of "
        "earlier steps; default: none, chunks of chunked_prefill_size",
    )
    page_size: PositiveInt = Field(16, description="tokens per KV cache page, a power of two")
    schedule_policy: SchedulePolicy = Field(
        SchedulePolicy.FCFS,
        description="order of admission: arrival (fcfs), longest cached prefix (lpm), longest output (lof), priority",
    )
    schedule_conservativeness: float = Field(
        1.0,
        gt=0.0,
        description="factor for the memory reserved for future tokens of running requests; higher: fewer retractions",
    )
    disable_radix_cache: bool = Field(False, description="disable the prefix cache")
    radix_eviction_policy: EvictionPolicy = Field(EvictionPolicy.LRU, description="eviction order of cached prefixes")
    max_sessions: PositiveInt = Field(
        1024,
        description="maximum open sessions; a further one of an API key that has none, or two fewer than another, "
        "replaces an idle session of that one, or gets 503",
    )
    session_timeout: float = Field(
        3600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds without a turn after which a session is closed, unless it was opened with its own timeout "
        "(at most a day, or this)",
    )
    session_memory_fraction: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="maximum fraction of the KV cache and of recurrent-state slots that idle sessions may pin",
    )
    attention_backend: AttentionBackend = Field(
        AttentionBackend.AUTO,
        description="attention implementation; sage: int8 keys and queries (torch backend)",
    )
    disable_cuda_graph: bool = Field(False, description="run without CUDA graphs, or recorded steps on a CPU")
    disable_custom_all_reduce: bool = Field(
        False, description="use only NCCL for sums over GPUs, not direct access to each other's memory (torch backend)"
    )
    cuda_graph_max_bs: PositiveInt | None = Field(
        None,
        description="maximum batch size of a decode step that runs as a CUDA graph; default: max_running_requests, up "
        "to 256",
    )
    random_seed: int = Field(0, description="default seed of requests, and seed of dummy weights")
    sampling_defaults: SamplingDefaults = Field(
        SamplingDefaults.MODEL,
        description="defaults of sampling fields: the model's generation_config.json, or neutral values",
    )
    grammar_backend: GrammarLibrary = Field(
        GrammarLibrary.LLGUIDANCE,
        description="library that enforces JSON schemas, regular expressions and grammars; none: refuse requests with "
        "one",
    )
    grammar_timeout: float = Field(
        10.0,
        gt=0.0,
        le=60.0,
        description="maximum seconds of processor time to compile a grammar; one that takes longer is refused",
    )
    speculative_algorithm: SpeculativeAlgorithm = Field(
        SpeculativeAlgorithm.NONE,
        description="how to guess tokens ahead, so that one step yields several; the output stays the same; ngram: "
        "from earlier occurrences of the last tokens in this request and in recent outputs; draft: by a smaller model",
    )
    speculative_draft_model_path: str | None = Field(
        None,
        description="draft model for --speculative-algorithm draft, given like model_path; must have the same "
        "vocabulary",
    )
    speculative_num_draft_tokens: int = Field(
        7,
        ge=1,
        le=31,
        description="maximum guessed tokens per request and step; fewer are guessed where that is faster",
    )
    warmup: Warmup = Field(Warmup.FULL, description=WARMUP)
    skip_warmup: bool = Field(False, description="compile programs at first use instead of at startup")
    watchdog_timeout: float = Field(
        300.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds without a step (compilation excluded) after which a busy engine process is killed and "
        "restarted",
    )
    engine_start_timeout: float = Field(
        3600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="maximum seconds for an engine process to start, including loading and compilation, and for the "
        "compilation of one program later",
    )
    max_engine_restarts: int = Field(
        5,
        ge=0,
        description="maximum consecutive restarts of an engine process that fails to start or runs for less than a "
        "minute; then the server exits with status 1",
    )
    max_unread_bytes: PositiveInt = Field(
        32 * 2**20,
        description="maximum bytes of output that wait for slow readers of streams, about, for each replica; above "
        "that, the stream with the most unread output is ended",
    )
    template_timeout: float = Field(
        2.0,
        gt=0.0,
        le=60.0,
        description="maximum seconds of processor time for a chat template to render a conversation",
    )
    compilation_cache_dir: Annotated[str, BeforeValidator(_as_text)] | None = Field(
        None,
        description="folder for compiled programs (JAX: also gs://); default: in the user's cache folder",
    )
    decode_log_interval: PositiveInt = Field(40, description="decode steps between log lines")
    enable_expert_distribution_metrics: bool = Field(
        False,
        description="count the tokens that choose each expert, for /server_info and /metrics (models with experts)",
    )
    profile_dir: str | None = Field(
        None,
        description="folder that /start_profile writes to (JAX: also gs://); default: profiling is off",
    )
    test_retract: PositiveInt | None = Field(
        default_factory=lambda: OtherEnvironment.read().steps_between_retractions,
        description="for tests: retract a running request every N steps; default: never",
    )
    test_evict: PositiveInt | None = Field(
        None,
        description="for tests: evict every unused cached prefix every N steps; default: never",
    )
    debug_memory: bool = Field(
        default_factory=_debug_memory,
        description="check the owner of every KV page at every step; on TPUs, also compile address checks into kernels "
        "(slow)",
    )

    @property
    def determinism_option(self) -> str:
        """The option by which logits do not depend on the batch, for messages."""
        if self.deterministic is Deterministic.NONE:
            return "enable_deterministic_inference"
        return f"deterministic {self.deterministic.value}"

    @property
    def expert_parts(self) -> int:
        """The number of parts into which experts are divided, by either option."""
        return self.tp_size if self.enable_expert_parallel else self.ep_size

    @property
    def batch_invariant(self) -> bool:
        """Whether logits must not depend on the batch, by either option."""
        return self.enable_deterministic_inference or self.deterministic is not Deterministic.NONE

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.enable_expert_parallel and self.ep_size not in (1, self.tp_size):
            raise ValueError(
                f"enable_expert_parallel sets ep_size to tp_size, {self.tp_size}, and ep_size is {self.ep_size}: "
                "remove one of the two"
            )
        if self.tp_size % self.ep_size:
            raise ValueError(f"ep_size must divide tp_size, {self.tp_size}, got {self.ep_size}")
        if self.expert_parts > 1 and self.deterministic is Deterministic.TP:
            raise ValueError(
                f"ep_size {self.expert_parts} changes the order of sums over experts, which deterministic tp excludes: "
                "choose ep_size 1, or deterministic batch"
            )
        if self.enable_dp_attention and self.dp_size not in (1, self.tp_size):
            raise ValueError(
                f"with enable_dp_attention, dp_size must be 1 or tp_size, {self.tp_size}, got {self.dp_size}: each "
                "device of tp_size is one rank"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"max_total_tokens ({self.max_total_tokens}) must hold at least one page of {self.page_size} tokens"
            )
        return self

    @property
    def replicas(self) -> int:
        """The number of engines: that of `dp_size`, which may also name the ranks of `enable_dp_attention`."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def dp_ranks(self) -> int:
        """Ranks that compute the attention of separate rows: see `RunnerSpec.dp_ranks`."""
        return self.tp_size if self.enable_dp_attention else 1

    @field_validator("compile_passes")
    @classmethod
    def _check_passes(cls, value: str) -> str:
        chosen_passes(value)
        return value

    @property
    def passes(self) -> frozenset[CompilePass]:
        return chosen_passes(self.compile_passes)

    @property
    def max_samples(self) -> int:
        """Maximum tokens that a request samples in one step."""
        if self.speculative_algorithm is SpeculativeAlgorithm.NONE:
            return 1
        return 1 + self.speculative_num_draft_tokens

    def group_secret(self) -> bytes:
        """The secret that nodes authenticate with; empty if there is none. Raises `ConfigError` if the file cannot be
        read, or if the secret is too short."""
        if self.group_secret_file is not None:
            where, secret = f"group_secret_file {self.group_secret_file}", read_secret_file(self.group_secret_file)
        else:
            given = Environment().group_secret
            if given is None:
                return b""
            where, secret = "SGLANG_JAX_GROUP_SECRET", given.strip()
        if len(secret) < MIN_GROUP_SECRET:
            raise ConfigError(
                f"{where} must have at least {MIN_GROUP_SECRET} characters, got {len(secret)}: "
                "`openssl rand -hex 32` generates a secret"
            )
        return secret.encode()

    def cache_address(self) -> str:
        """The cache of compiled programs: a local folder, or an address such as `gs://bucket/folder`."""
        return self.compilation_cache_dir or str(Path(user_cache_dir("sglang-jax")) / "compilation")

    def cache_folder(self) -> Path:
        """`cache_address` as a local folder. Raises `ConfigError` if it is not one."""
        address = self.cache_address()
        if "://" in address:
            raise ConfigError(f"the torch backend needs a local folder for compiled programs, got {address}")
        return Path(address)
