"""Sampling defaults for fields that HTTP requests leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.recommended_sampling import (
    NEUTRAL,
    RECOMMENDED,
    make_recommending_checkpoint,
    recorded_sampling,
    values_of,
)

from sglang_jax.engine.model_core import load_core, load_text_tokenizer
from sglang_jax.sampling import SamplingParams

Sampled = Callable[[str, dict[str, Any]], list[SamplingParams]]
"""Posts a body and returns the sampling parameters of its prompts."""

BODIES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/generate": lambda fields: {"text": "hello", "sampling_params": {"max_new_tokens": 2, **fields}},
    "/v1/completions": lambda fields: {"prompt": "hello", "max_tokens": 2, **fields},
    "/v1/chat/completions": lambda fields: {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
        **fields,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recommending_checkpoint(tmp_path_factory.mktemp("model"))


def post_to(server: EchoServer, seen: list[SamplingParams]) -> Sampled:
    def sampled(path: str, body: dict[str, Any]) -> list[SamplingParams]:
        seen.clear()
        response = server.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return list(seen)

    return sampled


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Iterator[Sampled]:
    with recorded_sampling() as seen, serve_echo(load_core, load_text_tokenizer, model_path=str(folder)) as server:
        yield post_to(server, seen)


@pytest.mark.parametrize("path", BODIES)
def test_fields_left_out_have_the_models_defaults(sampled: Sampled, path: str) -> None:
    [sampling] = sampled(path, BODIES[path]({}))
    assert values_of(sampling) == RECOMMENDED
    [sampling] = sampled(path, BODIES[path]({"top_k": 3, "temperature": None}))
    assert values_of(sampling) == RECOMMENDED | {"top_k": 3}


@pytest.mark.parametrize("path", BODIES)
def test_values_in_a_request_win_even_if_neutral(sampled: Sampled, path: str) -> None:
    [sampling] = sampled(path, BODIES[path](NEUTRAL))
    assert values_of(sampling) == NEUTRAL
    [sampling] = sampled(path, BODIES[path]({"temperature": 1.0}))
    assert values_of(sampling) == RECOMMENDED | {"temperature": 1.0}
    [sampling] = sampled(path, BODIES[path]({"temperature": 0}))
    assert sampling.temperature == 0.0


def test_no_parameters_at_all(sampled: Sampled) -> None:
    [sampling] = sampled("/generate", {"text": "hello"})
    assert values_of(sampling) == RECOMMENDED
    assert sampling.max_new_tokens == SamplingParams().max_new_tokens
    [sampling] = sampled("/v1/completions", {"prompt": "hello"})
    assert (values_of(sampling), sampling.max_new_tokens) == (RECOMMENDED, 16)


def test_defaults_apply_to_each_prompt_of_a_batch(sampled: Sampled) -> None:
    each = [{"temperature": 1.0, "max_new_tokens": 1}, {"top_p": 0.5, "max_new_tokens": 1}]
    batch = sampled("/generate", {"text": ["hello", "world"], "sampling_params": each})
    assert sorted((one.temperature, one.top_p) for one in batch) == [(0.6, 0.5), (1.0, 0.95)]


def test_a_flag_makes_the_defaults_neutral(folder: Path) -> None:
    options = {"model_path": str(folder), "sampling_defaults": "openai"}
    with recorded_sampling() as seen, serve_echo(load_core, load_text_tokenizer, **options) as server:
        sampled = post_to(server, seen)
        for path, body in BODIES.items():
            [sampling] = sampled(path, body({}))
            assert values_of(sampling) == NEUTRAL
        assert not any(server.http.get("/model_info").json()["generation_defaults"].values())


def test_a_route_reports_the_defaults(folder: Path) -> None:
    with recorded_sampling(), serve_echo(load_core, load_text_tokenizer, model_path=str(folder)) as server:
        assert server.http.get("/model_info").json()["generation_defaults"] == RECOMMENDED


@pytest.mark.parametrize("path", BODIES)
def test_do_sample_false_is_greedy_and_a_top_k_of_0_is_unlimited(sampled: Sampled, path: str) -> None:
    [sampling] = sampled(path, BODIES[path]({"do_sample": False, "temperature": 0.7, "top_k": 0}))
    assert (sampling.temperature, sampling.top_k) == (0.0, -1)
    [sampling] = sampled(path, BODIES[path]({"do_sample": True, "temperature": 0.7}))
    assert sampling.temperature == 0.7
