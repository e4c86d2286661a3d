"""The embedded model through the whole engine in float32, against transformers, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.oracle_model import assert_greedy, load_oracle

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

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


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(config=_config()) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    assert len(QUESTIONS) == 50
    return [
        engine.encode(engine.tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        for text in QUESTIONS
    ]


@pytest.fixture(scope="module")
def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What all prompts at once give, with the options' defaults."""
    return _run(engine, prompts)


def _config(**options: object) -> EngineConfig:
    return EngineConfig(**{"model_path": "demo", "dtype": "float32", "context_length": 1024, **options})


def _run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    outputs = engine.generate(prompts, GREEDY)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


@pytest.mark.timeout(600)
def test_fifty_prompts_equal_transformers(prompts: list[list[int]], outputs: list[list[int]]) -> None:
    oracle = load_oracle()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        assert_greedy(oracle, prompt, output)


def test_the_oracle_notices_one_wrong_token(prompts: list[list[int]], outputs: list[list[int]]) -> None:
    wrong = list(outputs[0])
    wrong[40] += 1
    with pytest.raises(AssertionError, match="the oracle prefers"):
        assert_greedy(load_oracle(), prompts[0], wrong)


@pytest.mark.timeout(600)
def test_one_by_one_and_from_the_cache(engine: Engine, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Alone instead of 32 at once; and with the prompt's KV in the tree from the time before."""
    for prompt, expected in zip(prompts[:6], outputs[:6], strict=True):
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
    options: dict[str, object], prompts: list[list[int]], outputs: list[list[int]]
) -> None:
    with Engine(config=_config(skip_warmup=True, **options)) as engine:
        assert _run(engine, prompts[:16]) == outputs[:16]
        if "max_total_tokens" in options:
            assert engine.stats.num_retractions > 0
