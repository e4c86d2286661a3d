"""The embedded model through the whole engine in float32: on every backend, against transformers, the other backend,
and itself in other batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from helpers.oracle_model import assert_equal_but_for_ties, assert_greedy, load_oracle
from transformers import LlamaForCausalLM

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.engine.launch import launch_engine
from sglang_jax.engine.model_core import load_text_tokenizer

BACKENDS = (Backend.JAX, Backend.TORCH)


@dataclass(frozen=True)
class Size:
    """The number of prompts and of tokens sampled for each: a few in `make test`, many in `make soak`."""

    prompts: int
    new_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_new_tokens=self.new_tokens, ignore_eos=True)


SIZES = [pytest.param(Size(8, 24), id="some"), pytest.param(Size(50, 64), id="many", marks=pytest.mark.soak)]

SUBJECTS = (
    "the capital of France", "how a bicycle stays upright", "why the sky is blue", "prime numbers", "photosynthesis",
    "the French Revolution", "how bread rises", "gravity", "the water cycle", "what a compiler does",
    "the moon landing", "volcanoes", "the history of tea", "how vaccines work", "black holes",
    "the Pythagorean theorem", "how to plant a tree", "the Silk Road", "electric motors", "the human heart",
    "recursion", "the Great Wall of China", "how glass is made", "migration of birds", "the stock market",
)  # fmt: skip
QUESTIONS = [f"Tell me about {subject}." for subject in SUBJECTS] + [
    f"Write two short sentences on {subject}, then ask me a question about it." for subject in SUBJECTS
]

Tokens = list[list[int]]


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    assert isinstance(request.param, Size)
    return request.param


@pytest.fixture(scope="module")
def prompts(size: Size) -> Tokens:
    """Half of each kind of question."""
    assert len(QUESTIONS) == 50
    half = size.prompts // 2
    tokenizer = load_text_tokenizer(EngineConfig())
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in QUESTIONS[:half] + QUESTIONS[25 : 25 + half]
    ]


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load_oracle()


@pytest.fixture(scope="module")
def proven() -> set[tuple[int, ...]]:
    """Prompts with outputs that the oracle has confirmed: the second backend's are mostly the same as the first's."""
    return set()


@dataclass
class Engines:
    """One per backend, started by the first test that needs it."""

    stack: ExitStack
    started: dict[Backend, Engine] = field(default_factory=dict)

    def of(self, backend: Backend) -> Engine:
        if backend not in self.started:
            self.started[backend] = self.stack.enter_context(_engine(backend))
        return self.started[backend]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack)


@dataclass
class Outputs:
    """Outputs of all prompts in one batch with the default options, by backend."""

    engines: Engines
    prompts: Tokens
    size: Size
    known: dict[Backend, Tokens] = field(default_factory=dict)

    def of(self, backend: Backend) -> Tokens:
        if backend not in self.known:
            self.known[backend] = _run(self.engines.of(backend), self.prompts, self.size)
        return self.known[backend]


@pytest.fixture(scope="module")
def all_outputs(engines: Engines, prompts: Tokens, size: Size) -> Outputs:
    return Outputs(engines, prompts, size)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture
def engine(backend: Backend, engines: Engines) -> Engine:
    return engines.of(backend)


@pytest.fixture
def outputs(backend: Backend, all_outputs: Outputs) -> Tokens:
    return all_outputs.of(backend)


def _config(backend: Backend, **options: object) -> EngineConfig:
    values = {"model_path": "demo", "backend": backend, "device": "cpu", "dtype": "float32", "context_length": 1024}
    return EngineConfig.model_validate(values | options)


def _engine(backend: Backend, **options: object) -> Engine:
    """Its core is a process whose programs are compiled as users' are. Without a warm-up, which would mostly build
    steps that are not used here."""
    return Engine(config=_config(backend, skip_warmup=True, **options), launch=launch_engine)


def _run(engine: Engine, prompts: Tokens, size: Size) -> Tokens:
    outputs = engine.generate(prompts, size.sampling)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


@pytest.mark.timeout(600)
def test_outputs_equal_transformers(
    backend: Backend,
    engine: Engine,
    oracle: LlamaForCausalLM,
    size: Size,
    prompts: Tokens,
    outputs: Tokens,
    proven: set[tuple[int, ...]],
) -> None:
    assert engine.state()["backend"] == backend.value
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == size.new_tokens
        if (*prompt, *output) not in proven:
            assert_greedy(oracle, prompt, output)
            proven.add((*prompt, *output))


def test_the_oracle_notices_one_wrong_token(oracle: LlamaForCausalLM, prompts: Tokens, outputs: Tokens) -> None:
    wrong = list(outputs[0])
    wrong[20] += 1
    with pytest.raises(AssertionError, match="the oracle prefers"):
        assert_greedy(oracle, prompts[0], wrong)
    with pytest.raises(AssertionError, match="output token 20 is"):
        assert_equal_but_for_ties(oracle, prompts[0], outputs[0], wrong)


@pytest.mark.timeout(600)
def test_outputs_one_by_one_and_from_the_cache_are_the_same(
    engine: Engine, size: Size, prompts: Tokens, outputs: Tokens
) -> None:
    """One request at a time instead of all at once; then with the prompt's KV in the tree from the first run."""
    for prompt, expected in zip(prompts[:3], outputs[:3], strict=True):
        again = engine.generate(prompt, size.sampling)
        assert not isinstance(again, list)
        assert again.cached_tokens >= (len(prompt) - 1) // 16 * 16
        assert again.output_ids == expected


SMALL_POOL = {"max_total_tokens": 256, "max_running_requests": 16, "schedule_conservativeness": 0.01}


@pytest.mark.parametrize(
    "options",
    [
        {"disable_radix_cache": True, "chunked_prefill_size": 16, "page_size": 4, **SMALL_POOL},
        pytest.param({"disable_radix_cache": True, "chunked_prefill_size": 16}, marks=pytest.mark.soak),
        pytest.param({"chunked_prefill_size": 64, "page_size": 4}, marks=pytest.mark.soak),
        pytest.param(SMALL_POOL, marks=pytest.mark.soak),
    ],
    ids=["no reuse, small chunks and pages, retractions", "no reuse, small chunks", "small pages", "retractions"],
)
@pytest.mark.timeout(600)
def test_other_sizes_give_the_same_text(
    options: dict[str, object], backend: Backend, size: Size, prompts: Tokens, outputs: Tokens
) -> None:
    with _engine(backend, **options) as engine:
        assert _run(engine, prompts[:16], size) == outputs[:16]
        if "max_total_tokens" in options:
            assert engine.stats.num_retractions > 0


@pytest.mark.timeout(600)
def test_the_backends_have_the_same_outputs(oracle: LlamaForCausalLM, prompts: Tokens, all_outputs: Outputs) -> None:
    jax, torch = (all_outputs.of(backend) for backend in BACKENDS)
    for prompt, one, other in zip(prompts, jax, torch, strict=True):
        assert_equal_but_for_ties(oracle, prompt, one, other)
    assert sum(one == other for one, other in zip(jax, torch, strict=True)) >= 0.9 * len(prompts)
