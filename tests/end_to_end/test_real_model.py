"""The embedded model through the whole engine in float32: on every backend, against transformers, against the other
backend, and against itself in other batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.oracle_model import assert_equal_but_for_ties, assert_greedy, load_oracle
from transformers import LlamaForCausalLM

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.engine.launch import launch_engine
from sglang_jax.engine.model_core import load_text_tokenizer

BACKENDS = (Backend.JAX, Backend.TORCH)
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)

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


@pytest.fixture(scope="module")
def prompts() -> Tokens:
    assert len(QUESTIONS) == 50
    tokenizer = load_text_tokenizer(EngineConfig())
    return [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in QUESTIONS
    ]


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return load_oracle()


@pytest.fixture(scope="module")
def said() -> dict[Backend, Tokens]:
    """Outputs of all prompts at once with the options' defaults, by backend, as far as they are known."""
    return {}


@pytest.fixture(scope="module")
def proven() -> set[tuple[int, ...]]:
    """Prompts with an output that the oracle agrees to: those of the second backend are mostly the first one's."""
    return set()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture(scope="module")
def engine(backend: Backend) -> Iterator[Engine]:
    with _engine(backend) as engine:
        yield engine


@pytest.fixture(scope="module")
def outputs(backend: Backend, engine: Engine, prompts: Tokens, said: dict[Backend, Tokens]) -> Tokens:
    said[backend] = _run(engine, prompts)
    return said[backend]


def _config(backend: Backend, **options: object) -> EngineConfig:
    values = {"model_path": "demo", "backend": backend, "device": "cpu", "dtype": "float32", "context_length": 1024}
    return EngineConfig.model_validate(values | options)


def _engine(backend: Backend, **options: object) -> Engine:
    """Its core is a process, whose programs are compiled as users' are. Without a warm-up: most of what that builds is
    for steps that are not made here."""
    return Engine(config=_config(backend, skip_warmup=True, **options), launch=launch_engine)


def _run(engine: Engine, prompts: Tokens) -> Tokens:
    outputs = engine.generate(prompts, GREEDY)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


@pytest.mark.timeout(600)
def test_fifty_prompts_equal_transformers(
    backend: Backend,
    engine: Engine,
    oracle: LlamaForCausalLM,
    prompts: Tokens,
    outputs: Tokens,
    proven: set[tuple[int, ...]],
) -> None:
    assert engine.state()["backend"] == backend.value
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        if (*prompt, *output) not in proven:
            assert_greedy(oracle, prompt, output)
            proven.add((*prompt, *output))


def test_the_oracle_notices_one_wrong_token(oracle: LlamaForCausalLM, prompts: Tokens, outputs: Tokens) -> None:
    wrong = list(outputs[0])
    wrong[40] += 1
    with pytest.raises(AssertionError, match="the oracle prefers"):
        assert_greedy(oracle, prompts[0], wrong)
    with pytest.raises(AssertionError, match="output token 40 is"):
        assert_equal_but_for_ties(oracle, prompts[0], outputs[0], wrong)


@pytest.mark.timeout(600)
def test_one_by_one_and_from_the_cache(engine: Engine, prompts: Tokens, outputs: Tokens) -> None:
    """Alone instead of 32 at once; and with the prompt's KV in the tree from the time before."""
    for prompt, expected in zip(prompts[:3], outputs[:3], strict=True):
        again = engine.generate(prompt, GREEDY)
        assert not isinstance(again, list)
        assert again.cached_tokens >= (len(prompt) - 1) // 16 * 16
        assert again.output_ids == expected


@pytest.mark.parametrize(
    "options",
    [
        {"disable_radix_cache": True, "chunked_prefill_size": 16},
        {"chunked_prefill_size": 64, "page_size": 4},
        {"max_total_tokens": 768, "max_running_requests": 16, "schedule_conservativeness": 0.01},
    ],
    ids=["no reuse, chunks of 16", "chunks of 64, small pages", "retractions"],
)
@pytest.mark.timeout(600)
def test_other_sizes_give_the_same_text(
    options: dict[str, object], backend: Backend, prompts: Tokens, outputs: Tokens
) -> None:
    with _engine(backend, **options) as engine:
        assert _run(engine, prompts[:16]) == outputs[:16]
        if "max_total_tokens" in options:
            assert engine.stats.num_retractions > 0


@pytest.mark.timeout(600)
def test_the_backends_say_the_same(oracle: LlamaForCausalLM, prompts: Tokens, said: dict[Backend, Tokens]) -> None:
    for backend in BACKENDS:
        if backend not in said:  # this test runs without those above
            with _engine(backend) as engine:
                said[backend] = _run(engine, prompts)
    jax, torch = (said[backend] for backend in BACKENDS)
    for prompt, one, other in zip(prompts, jax, torch, strict=True):
        assert_equal_but_for_ties(oracle, prompt, one, other)
    assert sum(one == other for one, other in zip(jax, torch, strict=True)) >= 45
