"""Outputs under grammars through the whole engine, on a tiny model with random weights, which follows no grammar by
itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from helpers.schemas import REGEXES, SCHEMAS, Schema, conforms
from helpers.tiny_models import make_tiny_checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint import resolve_model
from sglang_jax.checkpoint.token_table import TokenTable, load_token_table
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.grammar.interface import Matcher
from sglang_jax.grammar.llguidance_backend import LlguidanceBackend
from sglang_jax.grammar.llguidance_trial import Trial
from sglang_jax.runner.plan import allowed_tokens, mask_words
from sglang_jax.sampling.grammar import Grammar, json_grammar, regex_grammar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EOS = 2
PROMPT = [5, 17, 200, 33]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDLESS = regex_grammar("([a-z]{2} )+")
SAMPLED = SamplingParams(temperature=1.0, seed=1, max_new_tokens=30)

BYTES = TokenTable((*(bytes([byte]) for byte in range(256)), b"<eos>"), frozenset({256}))
CLOSING = [256, *b'"}],', *b"0123456789", *range(0x61, 0x7B), *b":-. \\"]
"""Bytes tried first to complete a text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def table(folder: Path) -> TokenTable:
    return load_token_table(resolve_model(str(folder)))


def config(folder: Path, **options: Any) -> EngineConfig:
    values = {"backend": Backend.TORCH, "device": "cpu", "dtype": "float32", "max_total_tokens": 2048, "page_size": 4}
    return EngineConfig.model_validate({"model_path": str(folder), "max_running_requests": 6, **values, **options})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(config=config(folder)) as engine:
        yield engine


class Completer:
    """Completes the start of a text byte by byte so that its grammar accepts it."""

    def __init__(self) -> None:
        self._backend = LlguidanceBackend(BYTES, 257, (256,))
        self._words = np.zeros((1, mask_words(257)), np.int32)

    def complete(self, grammar: Grammar, beginning: bytes) -> bytes:
        compiled = self._backend.build(grammar, Trial({}).try_out(grammar))
        matcher, text = compiled.matcher(), b""
        for byte in beginning:
            assert byte in self._next(matcher), f"{beginning!r} leaves its grammar behind {text!r}"
            self._backend.accept([matcher], [byte])
            text += bytes([byte])
        for _ in range(400):
            choice = self._next(matcher)
            token = next((one for one in CLOSING if one in choice), None)
            token = min(choice, default=256) if token is None else token
            if token == 256:
                return text
            self._backend.accept([matcher], [token])
            text += bytes([token])
        raise AssertionError(f"{text!r} comes to no end")

    def _next(self, matcher: Matcher) -> list[int]:
        self._words[:] = 0
        (progress,) = self._backend.fill([matcher], self._words)
        return allowed_tokens(self._words[0]).tolist() if progress.name == "CONTINUES" else []


@pytest.fixture(scope="module")
def completer() -> Completer:
    return Completer()


def bytes_of(table: TokenTable, output: GenerateOutput) -> bytes:
    ids = [token for token in output.output_ids if token != EOS]
    assert not table.special & set(ids)
    return b"".join(table.tokens[token] for token in ids)


def run(engine: Engine, grammars: Sequence[Grammar], seed: int, most: int) -> list[GenerateOutput]:
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=most, grammar=grammar) for grammar in grammars]
    outputs = engine.generate([PROMPT] * len(grammars), params)
    assert isinstance(outputs, list)
    return outputs


def check_schemas(
    engine: Engine, table: TokenTable, completer: Completer, schemas: Sequence[Schema], seed: int, most: int
) -> None:
    """A finished output parses and validates; a truncated one is the start of one that does."""
    grammars = [json_grammar(schema) for schema in schemas]
    for schema, grammar, output in zip(schemas, grammars, run(engine, grammars, seed, most), strict=True):
        text = bytes_of(table, output)
        assert output.finish is not None
        if output.finish.kind == "length":
            assert output.completion_tokens == most
            text = completer.complete(grammar, text)
        assert conforms(json.loads(text), schema), (text, schema)


def check_regexes(engine: Engine, table: TokenTable, patterns: Sequence[str], seed: int, most: int) -> None:
    outputs = run(engine, [regex_grammar(pattern) for pattern in patterns], seed, most)
    for pattern, output in zip(patterns, outputs, strict=True):
        assert output.finish is not None
        text = bytes_of(table, output).decode(errors="ignore")  # it may end within a character
        cut = output.finish.kind == "length"
        assert regex.fullmatch(pattern, text, partial=cut), (pattern, text, output.finish)


EXAMPLES = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
}
SEEDS = st.integers(0, 1000)
LENGTHS = st.sampled_from([3, 12, 40])


@settings(max_examples=10, **EXAMPLES)
@given(schemas=st.lists(SCHEMAS, min_size=3, max_size=6), seed=SEEDS, most=LENGTHS)
def test_json_follows_the_schema(
    engine: Engine, table: TokenTable, completer: Completer, schemas: list[Schema], seed: int, most: int
) -> None:
    check_schemas(engine, table, completer, schemas, seed, most)


@settings(max_examples=10, **EXAMPLES)
@given(patterns=st.lists(REGEXES, min_size=3, max_size=6), seed=SEEDS, most=LENGTHS)
def test_text_follows_the_regex(engine: Engine, table: TokenTable, patterns: list[str], seed: int, most: int) -> None:
    check_regexes(engine, table, patterns, seed, most)


@pytest.fixture(scope="module", params=["torch", pytest.param("jax", marks=pytest.mark.soak)])
def demo(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A real model and its vocabulary, whose tokens have several letters."""
    options = EngineConfig(backend=Backend(request.param), device="cpu", max_total_tokens=2048, skip_warmup=True)
    with Engine(config=options.model_copy(update={"max_running_requests": 6})) as engine:
        yield engine


@settings(max_examples=3, phases=[Phase.generate], **EXAMPLES)
@given(
    schemas=st.lists(SCHEMAS, min_size=3, max_size=3),
    patterns=st.lists(REGEXES, min_size=3, max_size=3),
    seed=SEEDS,
)
def test_the_demo_model_follows_schemas_and_regexes(
    demo: Engine, completer: Completer, schemas: list[Schema], patterns: list[str], seed: int
) -> None:
    words = load_token_table(resolve_model("demo"))
    check_schemas(demo, words, completer, schemas, seed, 20)
    check_regexes(demo, words, patterns, seed, 20)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schemas=st.lists(SCHEMAS, min_size=3, max_size=6),
    patterns=st.lists(REGEXES, min_size=3, max_size=6),
    seed=SEEDS,
    most=LENGTHS,
)
def test_soak(
    engine: Engine,
    table: TokenTable,
    completer: Completer,
    schemas: list[Schema],
    patterns: list[str],
    seed: int,
    most: int,
) -> None:
    check_schemas(engine, table, completer, schemas, seed, most)
    check_regexes(engine, table, patterns, seed, most)


def test_greedy_takes_the_most_likely_allowed_token(engine: Engine, table: TokenTable, folder: Path) -> None:
    """Logits by transformers, masks by the test's own matcher. Logprobs cover all tokens."""
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    backend = LlguidanceBackend(table, 384, (EOS,))
    words = np.zeros((1, mask_words(384)), np.int32)
    apart = 0
    for grammar in (json_grammar(PERSON), ENDLESS, json_grammar({"enum": ["x", 5, None]})):
        params = SamplingParams(temperature=0.0, max_new_tokens=30, grammar=grammar)
        output = engine.generate(PROMPT, params, return_logprob=True)
        assert isinstance(output, GenerateOutput)
        with torch.no_grad():
            logits = oracle(torch.tensor([[*PROMPT, *output.output_ids]])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = logits.log_softmax(-1).numpy()
        matcher = backend.build(grammar, Trial(backend.specials).try_out(grammar)).matcher()
        for token, line, told in zip(output.output_ids, logprobs, output.logprobs, strict=True):
            backend.fill([matcher], words)
            allowed = allowed_tokens(words[0])
            assert token == allowed[line[allowed].argmax()]
            assert told.logprob == pytest.approx(line[token], abs=1e-4)
            apart += token != line.argmax()
            backend.accept([matcher], [token])
    assert apart > 10, "grammars decided little"


def test_a_retracted_request_resumes(engine: Engine, folder: Path) -> None:
    """With pages for half of the requests, they lose their rows, and give the same outputs as without contention."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=60, grammar=grammar)
        for seed, grammar in enumerate([ENDLESS, json_grammar({"type": "array"}), ENDLESS, None, ENDLESS])
    ]
    prompts = [[*PROMPT, 40 + place] for place in range(len(params))]
    alone = [engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    with Engine(config=config(folder, max_total_tokens=160, schedule_conservativeness=0.01)) as small:
        together = small.generate(prompts, params)
        assert int(str(small.state()["num_retractions"])) > 0  # current values: the last statistics may be older
    assert [output.output_ids for output in together] == [output.output_ids for output in alone]  # type: ignore


def test_min_tokens_stop_and_ignore_eos_hold_as_far_as_the_grammar_allows(engine: Engine) -> None:
    anything = regex_grammar("[a-z]*")
    for least in (0, 8):
        output = engine.generate(PROMPT, SamplingParams(**_seeded(3), min_new_tokens=least, grammar=anything))
        assert isinstance(output, GenerateOutput)
        assert output.completion_tokens >= least
    ignoring = engine.generate(PROMPT, SamplingParams(**_seeded(3), ignore_eos=True, grammar=anything))
    assert isinstance(ignoring, GenerateOutput)
    assert ignoring.completion_tokens == 30
    short = engine.generate(PROMPT, SamplingParams(**_seeded(3), min_new_tokens=8, grammar=regex_grammar("ab")))
    assert isinstance(short, GenerateOutput)
    assert short.text == "ab"
    stopped = engine.generate(PROMPT, SamplingParams(**_seeded(5), stop=(" ",), grammar=ENDLESS))
    assert isinstance(stopped, GenerateOutput)
    assert regex.fullmatch("[a-z]{2}", stopped.text)
    assert stopped.finish is not None
    assert stopped.finish.matched == " "


def _seeded(seed: int) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, "max_new_tokens": 30}


def test_seeds_and_several_outputs(engine: Engine) -> None:
    """Each of n outputs follows the grammar; a seed gives the same ones again, in a batch or not."""
    params = SamplingParams(temperature=1.0, seed=7, n=4, max_new_tokens=40, grammar=json_grammar(PERSON))
    first, busy = engine.generate(PROMPT, params), engine.generate([PROMPT, PROMPT[:2]], params)
    assert isinstance(first, list)
    assert isinstance(busy, list)
    ids = [output.output_ids for output in first]
    assert ids == [output.output_ids for output in busy[:4]]
    assert len({tuple(one) for one in ids}) > 1
    for output in first:
        if output.finish is not None and output.finish.kind == "stop":
            assert conforms(json.loads(output.text), PERSON)
