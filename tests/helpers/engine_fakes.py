"""A tokenizer of bytes and an engine core that echoes prompts, for tests of everything around the model."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint.chat_roles import OPENAI_ROLES, ChatRoles
from sglang_jax.checkpoint.token_table import TokenTable
from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel, Ready
from sglang_jax.engine.types import ModelInfo
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.runner.fake import FakeRunner
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.scheduler.cache_report import CacheSummary
from sglang_jax.scheduler.commands import (
    CloseSession,
    ContinueGeneration,
    FlushCache,
    GetCacheReport,
    GetCacheSummary,
    GetState,
    NameWeights,
    OpenSession,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from sglang_jax.scheduler.loop import SchedulerLoop
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Finished,
    Inbound,
    NewRequest,
    Reply,
    SchedulerStats,
    Shutdown,
    Started,
    StateValue,
    StepOutputs,
    StopRequest,
    WireError,
    WireLogprob,
)

EOS = 256
VOCAB_SIZE = 260
CONTEXT_LENGTH = 4096
MAX_RUNNING = 8
CACHED_TOKENS = 2

MODEL_INFO = ModelInfo(
    model_path="echo",
    architecture="echo",
    context_length=CONTEXT_LENGTH,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(EOS,),
    bos_token_id=None,
    dtype="bytes",
)


class ByteDecoder:
    """UTF-8, one byte at a time; ids from 256 on are special tokens `<256>`, `<257>`..."""

    def __init__(self, skip_special_tokens: bool = True, markers: Set[int] = frozenset()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._skip = skip_special_tokens
        self._markers = markers

    def push(self, token_id: int) -> str:
        if token_id >= 256:
            return "" if self._skip and token_id not in self._markers else f"<{token_id}>"
        return self._decoder.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token for each byte of UTF-8."""

    longest_token = 16
    """More than a byte has, so that tests reach the limits on numbers of tokens."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = ByteDecoder(skip_special_tokens)
        return "".join([decoder.push(token) for token in ids]) + decoder.flush()

    special_tokens: ClassVar[Mapping[str, int]] = {f"<{token}>": token for token in range(256, VOCAB_SIZE)}
    chat_template = "<tool_call> {{ tools }} {{ mood }}"
    role_tokens: ClassVar[Mapping[str, str]] = {}
    response_template = None

    def stream_decoder(
        self, skip_special_tokens: bool = True, *, continues_text: bool = False, markers: Set[int] = frozenset()
    ) -> ByteDecoder:
        return ByteDecoder(skip_special_tokens, markers)

    def token_id(self, text: str) -> int | None:
        return self.special_tokens.get(text)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else f"<{token_id}>".encode()

    def check_roles(self, roles: Sequence[object]) -> None:
        ChatRoles(OPENAI_ROLES).check(roles)

    def marked(self, text: str) -> str:
        return text

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """A line for each message, after the variables. Tools are not shown, so that the echo stays readable."""
        self.check_roles([message.get("role") for message in messages])
        given = "".join(f"{name}={value}\n" for name, value in (variables or {}).items())
        return given + "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def load_tokenizer(config: EngineConfig) -> ByteTokenizer:
    return ByteTokenizer()


def refuse_tokenizer(config: EngineConfig) -> ByteTokenizer:
    raise CheckpointError("there is no tokenizer")


@dataclass
class EchoRequest:
    message: NewRequest
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def stops_at(self, token: int) -> bool:
        sampling = self.message.sampling
        return token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)


def logprob_entry(token: int, num_top: int) -> WireLogprob:
    """The echo core's logprobs: -token/10, with the following tokens as alternatives."""
    return WireLogprob(
        token, -token / 10, [token + i for i in range(num_top)], [-(token + i) / 10 for i in range(num_top)]
    )


class EchoCore:
    """Handles the scheduler's messages. Each request gets its prompt back, one token a step, then EOS repeatedly; a
    request for no tokens ends in its first step.

    `config.model_path` is `echo`, or `echo:SECONDS` for a pause between steps, or `states` for a model with states. A
    prompt that starts with the token 257 makes the core fail, 258 ends the process at once, 259 is refused with a
    `CapacityError`.
    """

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        info = dataclasses.replace(MODEL_INFO, keeps_states=config.model_path == "states")
        self.ready = Ready(model_info=info, max_running_requests=MAX_RUNNING, max_total_tokens=CONTEXT_LENGTH)
        self._pause = float(config.model_path.partition(":")[2] or 0.0)
        self._channel = channel
        self._requests: dict[int, EchoRequest] = {}
        self._seen: list[dict[str, object]] = []
        self._events: dict[str, list[int]] = {"aborted": [], "stopped": []}
        self._peak = 0
        self._drain = self._stop = False

    def run(self) -> None:
        while not self._stop and not (self._drain and not self._requests):
            for message in self._channel.receive(block=not self._requests):
                self._serve(message)
            if self._requests and not self._stop:
                self._step()
                time.sleep(self._pause)

    def close(self) -> None:
        self._requests.clear()

    def _serve(self, message: Inbound) -> None:
        match message:
            case NewRequest():
                self._admit(message)
            case AbortRequest():
                if self._requests.get(message.id) is not None:
                    self._events["aborted"].append(message.id)
                    self._channel.send(StepOutputs(ids=b"", tokens=b"", finished=[self._finish(message.id, "abort")]))
            case StopRequest():
                self._events["stopped"].append(message.id)
                self._requests.pop(message.id, None)
            case FlushCache():
                self._channel.send(Reply(message.call, not self._requests, "requests run" if self._requests else ""))
            case (
                OpenSession()
                | CloseSession()
                | StartProfile()
                | StopProfile()
                | NameWeights()
                | PauseGeneration()
                | ReleaseMemory()
                | ResumeMemory()
                | ContinueGeneration()
            ):
                self._channel.send(Reply(message.call, True))
            case UpdateWeights():
                self._channel.send(Reply(message.call, True, str(len(self._requests))))
            case GetCacheReport():
                self._channel.send(Reply(message.call, True, report=b"{}"))
            case GetCacheSummary():
                empty = CacheSummary(page_size=1, num_nodes=0, num_namespaces=0, groups=[], nodes=[])
                self._channel.send(Reply(message.call, True, report=msgspec.json.encode(empty)))
            case GetState():
                self._channel.send(Reply(message.call, True, state=self._state()))
            case Shutdown():
                self._drain, self._stop = True, not message.drain

    def _state(self) -> dict[str, StateValue]:
        events = {name: json.dumps(ids) for name, ids in self._events.items()}
        return {
            "pid": os.getpid(),
            "running": len(self._requests),
            "peak": self._peak,
            "seen": json.dumps(self._seen),
            "started": sum(bool(request.output) for request in self._requests.values()),
        } | events

    def _admit(self, message: NewRequest) -> None:
        prompt = np.frombuffer(message.token_ids, "<i4").tolist()
        if prompt[0] == 257:
            raise RuntimeError("the echo broke")
        if prompt[0] == 258:
            os._exit(7)
        if prompt[0] == 259:
            error = WireError("CapacityError", "the pool is too small", None, "kv_capacity_exceeded")
            finished = Finished(message.id, "error", None, 0, b"", 0, error)
            self._channel.send(StepOutputs(ids=b"", tokens=b"", finished=[finished]))
            return
        sampling = message.sampling
        self._seen.append(
            {
                "id": message.id,
                "prompt": len(prompt),
                "stream": message.stream,
                "max_new_tokens": sampling.max_new_tokens,
                "seed": sampling.seed,
                "n": sampling.n,
                "stop": list(sampling.stop),
                "top_logprobs": message.top_logprobs,
                "logprob_start": message.logprob_start,
                "extra_key": message.extra_key,
                "tenant": message.tenant,
                "background": message.background,
                "flow": message.flow,
                "priority": message.priority,
                "shared_len": message.shared_len,
                "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
            }
        )
        self._requests[message.id] = EchoRequest(message, prompt)
        self._peak = max(self._peak, len(self._requests))

    def _step(self) -> None:
        ids, tokens, logprobs, prompt_logprobs, started, finished = [], [], [], [], [], []
        for wire_id, request in list(self._requests.items()):
            message = request.message
            if not request.output:
                started.append(Started(wire_id, CACHED_TOKENS))
                if message.logprob_start >= 0:
                    wanted = request.prompt[message.logprob_start :]
                    prompt_logprobs.append((wire_id, [logprob_entry(t, message.top_logprobs) for t in wanted]))
            if message.sampling.max_new_tokens == 0:
                finished.append(self._finish(wire_id, "length"))
                continue
            position = len(request.output)
            token = request.prompt[position] if position < len(request.prompt) else EOS
            request.output.append(token)
            if message.top_logprobs >= 0:
                logprobs.append((wire_id, logprob_entry(token, message.top_logprobs)))
            if message.stream:
                ids.append(wire_id)
                tokens.append(token)
            if request.stops_at(token):
                finished.append(self._finish(wire_id, "stop", token))
            elif len(request.output) == message.sampling.max_new_tokens:
                finished.append(self._finish(wire_id, "length"))
        self._channel.send(
            StepOutputs(
                ids=np.array(ids, "<i8").tobytes(),
                tokens=np.array(tokens, "<i4").tobytes(),
                started=started,
                finished=finished,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        )
        self._channel.send(SchedulerStats(num_running=len(self._requests)))

    def _finish(self, wire_id: int, kind: str, matched: int | None = None) -> Finished:
        request = self._requests.pop(wire_id)
        tokens = b"" if request.message.stream else np.array(request.output, "<i4").tobytes()
        return Finished(wire_id, kind, matched, len(request.output), tokens, CACHED_TOKENS)


def _start_forever() -> None:
    time.sleep(3600)


def load_echo(config: EngineConfig, channel: CoreChannel) -> EchoCore:
    """The `CoreLoader` of tests. `model_path` may also name a way to fail at the start."""
    match config.model_path:
        case "missing":
            raise CheckpointError("no checkpoint at 'missing'")
        case "misconfigured":
            raise ConfigError("backend 'x' is not installed")
        case "broken":
            raise RuntimeError("no such device")
        case "dying":
            os._exit(9)
        case "slow":
            time.sleep(1.0)
        case "never":
            _start_forever()
    return EchoCore(config, channel)


FAKE_VOCAB_SIZE = 128
FAKE_EOS = 0
FAKE_INVALID = 127
"""With `model_path` numerical, a row that samples after this token has non-finite logits."""


class FakeModelCore:
    """The scheduler's loop over `FakeRunner`. `max_total_tokens` is the pool, `max_running_requests` the rows. With
    `model_path` grammars it follows the grammars of requests."""

    def __init__(self, config: EngineConfig, channel: CoreChannel) -> None:
        pool = PoolSpec(
            "full", CacheKind.FULL, (config.max_total_tokens or 1024) // config.page_size + 1, config.page_size
        )
        spec = RunnerSpec((pool,), config.max_running_requests or MAX_RUNNING, 64, 128, FAKE_VOCAB_SIZE)
        runner = FakeRunner(spec, invalid_token=FAKE_INVALID if config.model_path == "numerical" else None)
        self._grammars = fake_grammars(config) if config.model_path == "grammars" else None
        self._loop = SchedulerLoop(runner, (FAKE_EOS,), config, channel, channel.pulse, self._grammars)
        info = dataclasses.replace(
            MODEL_INFO,
            context_length=spec.max_context,
            vocab_size=FAKE_VOCAB_SIZE,
            eos_token_ids=(FAKE_EOS,),
        )
        tokens = (pool.num_pages - 1) * pool.page_size
        self.ready = Ready(model_info=info, max_running_requests=spec.max_rows, max_total_tokens=tokens)

    def run(self) -> None:
        self._loop.run()

    def close(self) -> None:
        """Grammars have threads."""
        if self._grammars is not None:
            self._grammars.close()


def fake_grammars(config: EngineConfig) -> GrammarCompiler:
    """Over a vocabulary of bytes."""
    table = TokenTable(tuple(bytes([byte]) for byte in range(FAKE_VOCAB_SIZE)), frozenset({FAKE_EOS}))
    backend = LlguidanceBackend(table, FAKE_VOCAB_SIZE, (FAKE_EOS,))
    return GrammarCompiler(backend, seconds=config.grammar_timeout)


def load_fake_model(config: EngineConfig, channel: CoreChannel) -> FakeModelCore:
    return FakeModelCore(config, channel)
