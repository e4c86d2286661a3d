"""The real engine on a model of random weights: scheduler, runner and Engine, without files, tokenizer or entry
points."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.timed_steps import StepLog, TimedRunner, timed_streams
from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.checkpoint import ModelConfig, RopeConfig, open_checkpoint, write_hf_config
from sglang_jax.config import AttentionBackend, Backend, Device, EngineConfig, LoadFormat
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.engine import Engine
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.model_core import ModelCore, warm_up
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.sampling import GenerationDefaults
from torch_backend import create_runner

LLAMA_8B = dense_decoder(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    max_position=8192,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001,),
    bos_token_id=128_000,
)

TINY = dense_decoder(
    architecture="llama",
    vocab_size=500,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position=256,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_token_ids=(1,),
    dtype="float32",
)


class NoText:
    """A tokenizer without text: prompts and outputs are token ids."""

    longest_token = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise ValueError("prompts of this benchmark are token ids")

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    chat_template = ""
    response_template = None
    special_tokens: Mapping[str, int] = {}

    def stream_decoder(
        self, skip_special_tokens: bool = True, *, continues_text: bool = False, markers: Set[int] = frozenset()
    ) -> NoText:
        """Itself: it has no state."""
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def token_id(self, text: str) -> int | None:
        return None

    def token_text(self, token_id: int) -> str:
        return str(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def render_chat(self, messages: Sequence[dict[str, object]], **more: object) -> str:
        raise ValueError("this benchmark has no chat")


@dataclass(frozen=True, slots=True)
class DummyEngine:
    """A ready engine, its model, and the times of its runner's steps."""

    engine: Engine
    model: ModelConfig
    log: StepLog
    weight_bytes: int

    def settle(self) -> None:
        """Waits for the step that was launched while the last tokens arrived, and clears the prefix cache."""
        if not self.engine.flush_cache():
            raise RuntimeError("the engine still has requests after all of them were answered")

    def streamed_bytes(self) -> int:
        """Weights that every decode step reads: all but the embeddings, of which it reads a row for each token."""
        itemsize = 2 if self.model.dtype == "bfloat16" else 4
        return self.weight_bytes - self.model.vocab_size * self.model.hidden_size * itemsize

    def kv_bytes(self, tokens: int) -> int:
        """Keys and values of this many tokens."""
        itemsize = 2 if self.model.dtype == "bfloat16" else 4
        return 2 * tokens * itemsize * sum(each.num_kv_heads * each.head_dim for each in self.model.attention)


@contextmanager
def dummy_engine(bench: Bench, *, graphs: bool) -> Iterator[DummyEngine]:
    """Loads and warms up an 8B model, or a tiny one in a dry run; other options have the engine's defaults."""
    model = TINY if bench.small else LLAMA_8B
    log = StepLog()
    bench.measure_rates()  # the engine will leave too little memory for it
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        write_hf_config(model, Path(folder))
        with Engine(config=_config(bench, folder, graphs=graphs), launch=_Launch(log)) as engine:
            yield DummyEngine(engine, model, log, int(str(engine.state()["weight_bytes"])))


def _config(bench: Bench, folder: str, *, graphs: bool) -> EngineConfig:
    options: dict[str, Any] = {"max_running_requests": 8, "max_total_tokens": 2048} if bench.small else {}
    return EngineConfig(
        model_path=folder,
        load_format=LoadFormat.DUMMY,
        backend=Backend.TORCH,
        device=Device.CUDA if bench.on_gpu else Device.CPU,
        attention_backend=AttentionBackend.AUTO,
        disable_cuda_graph=not graphs,
        debug_memory=False,
        **options,
    )


class _Launch:
    """Starts a core in a thread that loads the Torch backend directly: the package need not be installed."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    async def __call__(self, config: EngineConfig) -> AsyncEngineClient:
        return await launch_core(config, in_process=True, load=self._load, load_tokenizer=_no_text)

    def _load(self, config: EngineConfig, channel: CoreChannel) -> ModelCore:
        checkpoint = open_checkpoint(
            config.model_path, config.load_format, seed=config.random_seed, revision=config.revision
        )
        with timed_streams(self._log):
            runner = TimedRunner(create_runner(config, checkpoint), self._log)
        warm_up(runner)
        return ModelCore(config, checkpoint, GenerationDefaults(), runner, channel)


def _no_text(config: EngineConfig) -> TextTokenizer:
    return NoText()
