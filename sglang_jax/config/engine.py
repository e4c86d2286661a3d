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
    Device,
    Dtype,
    EvictionPolicy,
    GrammarLibrary,
    KVCacheDtype,
    LoadBalanceMethod,
    LoadFormat,
    MambaDtype,
    ModelImpl,
    SamplingDefaults,
    SchedulePolicy,
    SpeculativeAlgorithm,
    chosen_passes,
)
from sglang_jax.config.environment import Environment
from sglang_jax.config.keys import MIN_GROUP_SECRET, read_secret_file
from sglang_jax.errors import ConfigError

PositiveInt = Annotated[int, Field(ge=1)]


def _as_text(path: object) -> object:
    """Python callers may give a path."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


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
        False, description="control tokens that messages of a chat spell out are control tokens, and not text"
    )
    load_format: LoadFormat = Field(LoadFormat.AUTO, description="how the weights are stored; dummy: random weights")
    model_impl: ModelImpl = Field(
        ModelImpl.NATIVE,
        description="whose code runs the model; native: this project's; transformers: that of transformers, traced and "
        "rewritten (torch backend only)",
    )
    compile_passes: str = Field(
        "all",
        description="passes that rewrite a model of --model-impl transformers: all, none, or names with commas (see "
        "--list-passes)",
    )
    dump_graphs: Path | None = Field(
        None,
        description="folder to write the graphs of such a model to, before and after each pass, as text and SVG; "
        "default: none are written",
    )
    keep_gguf_blocks: bool = Field(
        False,
        description="keep GGUF's Q4_0, Q4_1 and Q8_0 matrices in their blocks as well, and multiply few rows by them: "
        "faster steps on a CPU with avx512_bf16 (torch); bfloat16 then rounds otherwise in batches of other sizes",
    )
    backend: Backend = Field(
        Backend.AUTO,
        description="inference backend that runs the model; auto: jax on a TPU, torch on a GPU, else what is installed",
    )
    device: Device = Field(Device.AUTO, description="where it runs")
    dtype: Dtype = Field(Dtype.AUTO, description="type of weights and activations; auto: measured best for the device")
    kv_cache_dtype: KVCacheDtype = Field(
        KVCacheDtype.AUTO,
        description="type of keys and values in the cache; auto: that of the activations",
    )
    tp_size: PositiveInt = Field(1, description="devices that each layer is spread over (tensor parallel)")
    dp_size: PositiveInt = Field(
        1, description="replicas of the model on this machine, each on its own devices (data parallel)"
    )
    load_balance_method: LoadBalanceMethod = Field(
        LoadBalanceMethod.CACHE_AWARE,
        description="which replica gets a request: the one with most of its prompt cached, the next one in turn, "
        "or the least loaded",
    )
    nnodes: PositiveInt = Field(1, description="number of nodes that share the model; start each with the same command")
    node_rank: int = Field(0, ge=0, description="this node's number; node 0 runs the scheduler and the server")
    dist_init_addr: str | None = Field(None, description="HOST:PORT of node 0; required with several nodes")
    dist_bind_host: str | None = Field(
        None, description="address that node 0 listens on for other nodes; default: that of dist_init_addr"
    )
    group_secret_file: Path | None = Field(
        None,
        description="file with the secret that nodes authenticate with, the same on each; also read from "
        "SGLANG_JAX_GROUP_SECRET; default: none: any machine that can connect to node 0 may join",
    )
    context_length: PositiveInt | None = Field(
        None, description="maximum tokens of a request, prompt plus output; default: the model's"
    )
    mem_fraction_static: float = Field(
        0.85, gt=0.0, lt=1.0, description="fraction of device memory for weights plus KV pages"
    )
    max_total_tokens: PositiveInt | None = Field(None, description="tokens in the KV pool; default: what memory allows")
    swa_full_tokens_ratio: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="KV tokens of layers with a sliding window, as a share of those of the others; default: by the "
        "window and the context, at least a quarter",
    )
    max_mamba_cache_size: PositiveInt | None = Field(
        None,
        description="slots for recurrent states (Mamba, gated delta nets), one for each running request, the others "
        "for states of cached prefixes; default: by mamba_full_memory_ratio",
    )
    mamba_full_memory_ratio: float = Field(
        0.9,
        gt=0.0,
        allow_inf_nan=False,
        description="memory for recurrent states, as a share of that for KV pages",
    )
    mamba_ssm_dtype: MambaDtype = Field(
        MambaDtype.FLOAT32,
        description="dtype in which recurrent states are kept between steps; bfloat16 takes half the memory and rounds "
        "at every step (convolutions keep their last inputs in the dtype of activations)",
    )
    mamba_track_interval: int = Field(
        64,
        ge=0,
        description="output tokens, in whole pages, between recurrent states that are kept until a request ends, so "
        "that its next turn goes on from the last; takes up to a second slot a request; 0: only what ends on a page",
    )
    max_running_requests: PositiveInt | None = Field(
        None, description="maximum requests running at once; default: by device"
    )
    max_queued_requests: PositiveInt | None = Field(
        None, description="maximum queued requests; more are refused with 503; default: no limit"
    )
    chunked_prefill_size: PositiveInt | None = Field(
        None,
        description="maximum prompt tokens computed per step; default: 512 on CPUs and TPUs, 1024 to 8192 on GPUs, by "
        "their memory",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="milliseconds between two tokens of a request (inter-token latency) to keep to while prompts are "
        "computed: chunks become as small as the steps so far say; default: chunks of chunked_prefill_size",
    )
    page_size: PositiveInt = Field(16, description="tokens per KV page")
    schedule_policy: SchedulePolicy = Field(
        SchedulePolicy.FCFS,
        description="which request is admitted next: arrival order, longest cached prefix, longest output, priority",
    )
    schedule_conservativeness: float = Field(
        1.0, gt=0.0, description="scales the memory reserved for tokens that running requests may still generate"
    )
    disable_radix_cache: bool = Field(False, description="disable the prefix cache")
    radix_eviction_policy: EvictionPolicy = Field(
        EvictionPolicy.LRU, description="which cached prefix is evicted first"
    )
    max_sessions: PositiveInt = Field(
        1024,
        description="maximum open sessions; more are refused with 503, or take the place of an idle one of a key that "
        "has more",
    )
    session_timeout: float = Field(
        3600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="seconds without a turn after which a session is closed that was opened without a timeout of its "
        "own",
    )
    session_memory_fraction: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="fraction of the KV pages, and of the slots for recurrent states, that idle sessions may keep from "
        "eviction",
    )
    attention_backend: AttentionBackend = Field(
        AttentionBackend.AUTO,
        description="implementation of attention; sage: keys and queries in 8 bits (torch backend)",
    )
    disable_cuda_graph: bool = Field(False, description="run steps without CUDA graphs")
    disable_custom_all_reduce: bool = Field(
        False, description="add up over GPUs by NCCL only, and not in each other's memory (torch backend)"
    )
    cuda_graph_max_bs: PositiveInt | None = Field(
        None,
        description="maximum rows of a decode step that runs as a CUDA graph; default: all that can run at once, up "
        "to 256",
    )
    random_seed: int = Field(0, description="default seed of requests, and seed of dummy weights")
    sampling_defaults: SamplingDefaults = Field(
        SamplingDefaults.MODEL,
        description="defaults of sampling fields: the model's generation_config.json, or neutral values",
    )
    grammar_backend: GrammarLibrary = Field(
        GrammarLibrary.LLGUIDANCE,
        description="what keeps outputs to a JSON schema, a regular expression or a grammar; none: requests with one "
        "are refused",
    )
    speculative_algorithm: SpeculativeAlgorithm = Field(
        SpeculativeAlgorithm.NONE,
        description="what guesses next tokens, to compute several of a request in one step with the same output; "
        "ngram: earlier occurrences of the last tokens, in its own text and in recent outputs of its namespace; "
        "draft: a second, smaller model",
    )
    speculative_draft_model_path: str | None = Field(
        None,
        description="the model that guesses, if speculative_algorithm is draft: given like model_path, with the same "
        "vocabulary",
    )
    speculative_num_draft_tokens: int = Field(
        7, ge=1, le=31, description="maximum guesses per request and step; fewer are made where they do not pay"
    )
    skip_warmup: bool = Field(False, description="compile each program at first use instead of at startup")
    watchdog_timeout: float = Field(
        300.0,
        gt=0.0,
        allow_inf_nan=False,
        description="maximum seconds that an engine process may take for a step (compiling excluded) before it is "
        "killed and restarted",
    )
    engine_start_timeout: float = Field(
        3600.0,
        gt=0.0,
        allow_inf_nan=False,
        description="maximum seconds that an engine process may take to start, loading and compiling included, before "
        "it is killed and its start has failed",
    )
    max_engine_restarts: int = Field(
        5,
        ge=0,
        description="maximum consecutive restarts of an engine process that failed to start or ran less than a "
        "minute; the server exits with status 1 once none is left",
    )
    compilation_cache_dir: Annotated[str, BeforeValidator(_as_text)] | None = Field(
        None,
        description="persistent compilation cache (JAX: gs:// too); default: the user's cache folder",
    )
    decode_log_interval: PositiveInt = Field(40, description="decode steps between two log lines")
    profile_dir: str | None = Field(
        None,
        description="folder that /start_profile writes to (JAX: gs:// too); default: no profiles are taken",
    )
    test_retract: PositiveInt | None = Field(
        None,
        description="for tests: retract a running request every so many steps, as though its memory were needed; "
        "default: never",
    )
    test_evict: PositiveInt | None = Field(
        None,
        description="for tests: evict every so many steps all of the prefix cache that nobody depends on; default: "
        "never",
    )
    debug_memory: bool = Field(
        default_factory=lambda: Environment().debug_memory,
        description="record the owner of every KV page and check the accounting at every step; on TPUs, compile "
        "checks of addresses into kernels (slow)",
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ValueError(
                f"max_total_tokens ({self.max_total_tokens}) must hold at least one page of {self.page_size} tokens"
            )
        return self

    @field_validator("compile_passes")
    @classmethod
    def _check_passes(cls, value: str) -> str:
        chosen_passes(value)
        return value

    @property
    def passes(self) -> frozenset[CompilePass]:
        """Those of `compile_passes`, and those without which nothing can be served."""
        return chosen_passes(self.compile_passes)

    @property
    def max_samples(self) -> int:
        """Most tokens that a request samples in one step."""
        if self.speculative_algorithm is SpeculativeAlgorithm.NONE:
            return 1
        return 1 + self.speculative_num_draft_tokens

    def group_secret(self) -> bytes:
        """What the nodes of a group know each other by; empty if they have nothing.

        **Raises:** `ConfigError` if the file cannot be read, or if the secret is too short.
        """
        if self.group_secret_file is not None:
            where, secret = f"group_secret_file {self.group_secret_file}", read_secret_file(self.group_secret_file)
        else:
            given = Environment().group_secret
            if given is None:
                return b""
            where, secret = "SGLANG_JAX_GROUP_SECRET", given.strip()
        if len(secret) < MIN_GROUP_SECRET:
            raise ConfigError(
                f"{where} holds {len(secret)} characters, a secret has at least {MIN_GROUP_SECRET}: "
                "`openssl rand -hex 32` makes one"
            )
        return secret.encode()

    def cache_address(self) -> str:
        """Where compiled programs are kept between runs: a local folder, or an address such as `gs://bucket/folder`."""
        return self.compilation_cache_dir or str(Path(user_cache_dir("sglang-jax")) / "compilation")

    def cache_folder(self) -> Path:
        """`cache_address` as a local folder. Raises `ConfigError` if it is none."""
        address = self.cache_address()
        if "://" in address:
            raise ConfigError(f"the torch backend keeps what it compiles in a local folder, got {address}")
        return Path(address)
