"""The engine core that serves a checkpoint: backend, warm-up with regular log lines, scheduler."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tqdm import tqdm

from sglang_jax.architectures import CacheKind
from sglang_jax.checkpoint import Checkpoint, open_served, tokenizer_source, with_end_tokens
from sglang_jax.checkpoint.token_table import load_token_table
from sglang_jax.config import EngineConfig, GrammarLibrary, SamplingDefaults, ServerConfig, Warmup
from sglang_jax.engine.channel import CoreChannel, Ready
from sglang_jax.engine.types import ModelInfo, TextTokenizer
from sglang_jax.errors import CheckpointError, ParameterError
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.runner.backends import load_backend
from sglang_jax.runner.group import GroupRunner
from sglang_jax.runner.protocol import Runner
from sglang_jax.sampling import GenerationDefaults, with_defaults
from sglang_jax.scheduler.loop import SchedulerLoop

SECONDS_BETWEEN_LINES = 4.0

logger = logging.getLogger(__name__)


class ModelCore:
    """`Core`: a loaded checkpoint on a backend, with its scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        defaults: GenerationDefaults,
        runner: Runner,
        channel: CoreChannel,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        runner.announce_builds(channel.pulse.building)
        if isinstance(runner, GroupRunner):
            runner.announce_ranks(channel.pulse.note_rank)
        self._loop = SchedulerLoop(runner, checkpoint.config.eos_token_ids, config, channel, channel.pulse, grammars)
        self._ready = _ready(config, checkpoint, defaults, runner)

    @property
    def ready(self) -> Ready:
        return self._ready

    def run(self) -> None:
        self._loop.run()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._runner.close()


def load_core(config: EngineConfig, channel: CoreChannel) -> ModelCore:
    """Loads the model that `config` names and compiles it. Raises `ConfigError`, `CheckpointError`."""
    begin = time.perf_counter()
    checkpoint = open_served(config)
    checkpoint = with_end_tokens(checkpoint, tokenizer_source(config))
    defaults = generation_defaults(config, checkpoint)
    create_runner = load_backend(config)
    grammars = load_grammars(config, checkpoint)
    with log_every_few_seconds(partial(_loading, config.model_path, begin)):
        runner = create_runner(config, checkpoint)
    loaded = time.perf_counter()
    report = runner.report()
    logger.info(
        "Loaded %s in %.1f s: %s backend, %s, %s attention",
        config.model_path,
        loaded - begin,
        report.backend,
        report.device,
        report.details.get("attention", "no"),
    )
    if not config.skip_warmup:
        warm_up(runner, first_only=config.warmup is Warmup.FIRST)
        left = runner.report().programs_left
        more = f"; {left} more programs are compiled while serving" if left else ""
        logger.info("Warmed up in %.1f s%s", time.perf_counter() - loaded, more)
    return ModelCore(config, checkpoint, defaults, runner, channel, grammars)


def _loading(model_path: str, begin: float) -> str:
    return f"Loading {model_path}: {time.perf_counter() - begin:.0f} s so far"


def load_grammars(config: EngineConfig, checkpoint: Checkpoint) -> GrammarCompiler | None:
    """Creates the compiler of requests' grammars; None if grammars are turned off, if the model generates no text, if
    the vocabulary cannot be read, or if no token ends an output. Raises `CheckpointError` if there is no tokenizer."""
    if config.grammar_backend is GrammarLibrary.NONE:
        return None
    model = checkpoint.config
    if model.pooler is not None:
        return None
    if not model.eos_token_ids:
        logger.warning("The model has no end-of-sequence token: requests with grammars are refused")
        return None
    source = tokenizer_source(config)
    try:
        table = load_token_table(source)
    except CheckpointError as error:
        logger.warning("Requests with grammars are refused: %s", error)
        return None
    return GrammarCompiler(
        LlguidanceBackend(table, model.vocab_size, model.eos_token_ids), seconds=config.grammar_timeout
    )


def generation_defaults(config: EngineConfig, checkpoint: Checkpoint) -> GenerationDefaults:
    """Returns the checkpoint's sampling defaults, empty if turned off. Raises `CheckpointError` if one is invalid."""
    defaults = checkpoint.generation_defaults
    if config.sampling_defaults is SamplingDefaults.OPENAI or not defaults.recommended():
        return GenerationDefaults()
    try:
        with_defaults({}, defaults)
    except ParameterError as error:
        raise CheckpointError(
            f"sampling defaults of {config.model_path}: {error.message}; "
            "--sampling-defaults openai leaves its sampling values out"
        ) from error
    listed = ", ".join(f"{name} {value:g}" for name, value in defaults.recommended().items())
    logger.info("Sampling defaults of the model: %s (--sampling-defaults openai turns them off)", listed)
    return defaults


def load_text_tokenizer(config: EngineConfig) -> TextTokenizer:
    """Loads the tokenizer that `config` names. Raises `CheckpointError`."""
    from sglang_jax.checkpoint.tokenizer import (
        load_tokenizer,
    )  # here: slow to import, and cores do not need it

    chat_template = config.chat_template if isinstance(config, ServerConfig) else None
    source = tokenizer_source(config)
    return load_tokenizer(
        source,
        chat_template=chat_template,
        special_tokens_in_content=config.allow_special_tokens_in_content,
        template_seconds=config.template_timeout,
    )


def warm_up(runner: Runner, *, first_only: bool = False) -> None:
    """Builds and runs the runner's programs, with a progress bar or log lines. `first_only`: see `Runner`."""
    if not sys.stderr.isatty():
        progress = WarmUpProgress()
        with log_every_few_seconds(progress.describe):
            runner.warm_up(progress, first_only=first_only)
        return
    with tqdm(desc="Warming up", unit="program") as bar:

        def show(done: int, total: int, what: str) -> None:
            bar.total = total
            bar.set_postfix_str(what, refresh=False)
            bar.update(done - bar.n)

        runner.warm_up(show, first_only=first_only)


def _ready(config: EngineConfig, checkpoint: Checkpoint, defaults: GenerationDefaults, runner: Runner) -> Ready:
    spec = runner.spec
    # If all layers have windows or states, a request of any length keeps only part of its tokens.
    sees_all = any(pool.kind is CacheKind.FULL for pool in spec.pools)
    most = spec.max_total_tokens if sees_all else spec.max_context
    info = ModelInfo(
        model_path=config.model_path,
        architecture=checkpoint.config.architecture,
        context_length=min(spec.max_context, most),
        vocab_size=spec.vocab_size,
        eos_token_ids=checkpoint.config.eos_token_ids,
        bos_token_id=checkpoint.config.bos_token_id,
        dtype=runner.report().details.get("dtype", checkpoint.config.dtype),
        generation_defaults=defaults,
        weight_version=config.weight_version,
        keeps_states=any(pool.kind.keeps_states for pool in spec.pools),
        pooler=checkpoint.config.pooler,
        pooled_width=spec.pooled_width,
    )
    return Ready(
        model_info=info,
        max_running_requests=spec.max_rows,
        max_total_tokens=spec.max_total_tokens,
        programs_left=runner.report().programs_left,
    )


@contextmanager
def log_every_few_seconds(describe: Callable[[], str]) -> Iterator[None]:
    """Logs `describe()`, called on another thread, every `SECONDS_BETWEEN_LINES` until the block ends."""
    over = threading.Event()

    def say() -> None:
        while not over.wait(SECONDS_BETWEEN_LINES):
            logger.info("%s", describe())

    thread = threading.Thread(target=say, name="start-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class WarmUpProgress:
    """The `progress` of `Runner.warm_up`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._so_far: tuple[int, int] | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        self._so_far = done, total

    def describe(self) -> str:
        """Returns a line with the time left, extrapolated from the programs so far, which are the slowest."""
        seconds = time.perf_counter() - self._begin
        if self._so_far is None:
            return f"Warming up: {seconds:.0f} s so far"
        done, total = self._so_far
        left = f"about {seconds / done * (total - done):.0f} s left" if done else f"{seconds:.0f} s so far"
        return (
            f"Warming up: {done} of {total} programs, {left} "
            "(the first start compiles them; later ones find them in the cache)"
        )
