"""Requests that cannot be served end with an error, and no other request is affected."""

from __future__ import annotations

import pytest
from helpers.scheduling import VOCAB, Bench

from sglang_jax import errors
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.messages import NewRequest, WireError

PROMPT = [5, 6, 7, 8, 9, 10]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def error_of(bench: Bench, request: int) -> WireError:
    finished = bench.channel.finished[request]
    assert finished.kind == "error"
    assert finished.error is not None
    return finished.error


@pytest.mark.parametrize(
    ("fields", "name", "param", "message"),
    [
        ({"token_ids": b""}, "ParameterError", "prompt", "at least one token, got 0 bytes"),
        ({"token_ids": b"12345"}, "ParameterError", "prompt", "got 5 bytes"),
        ({"prompt": [1, -1, 2]}, "ParameterError", "prompt", "token id -1, the vocabulary is [0, 39]"),
        ({"prompt": [1, VOCAB]}, "ParameterError", "prompt", "token id 40, the vocabulary is [0, 39]"),
        ({"prompt": [1] * 24}, "PromptTooLongError", "prompt", "24 tokens; at most 23 fit"),
        ({"top_logprobs": 21}, "ParameterError", "top_logprobs", "[-1, 20], got 21"),
        ({"top_logprobs": -2}, "ParameterError", "top_logprobs", "[-1, 20], got -2"),
        ({"sampling": SamplingParams(stop_token_ids=[VOCAB])}, "ParameterError", "stop_token_ids", "token id 40"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "ParameterError", "logit_bias", "token id 40"),
    ],
)
def test_only_the_bad_request_is_refused(fields: dict[str, object], name: str, param: str, message: str) -> None:
    """The error names the field, the value and the limit; the other requests are served as always."""
    bench = Bench(context=24)
    before = bench.add(PROMPT, sampling=endless(6))
    bench.scheduler.step()
    facts: dict[str, object] = {"token_ids": bytes([1, 0, 0, 0]), "sampling": endless(3)}
    if "prompt" in fields:
        tokens = fields.pop("prompt")
        assert isinstance(tokens, list)
        facts["token_ids"] = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
    bench.scheduler.add(NewRequest(id=77, **(facts | fields)))
    after = bench.add(PROMPT[::-1], sampling=endless(6))
    bench.run()
    error = error_of(bench, 77)
    assert (error.name, error.param) == (name, param)
    assert message in error.message
    assert 77 not in bench.channel.cached
    assert bench.channel.finished[before].kind == bench.channel.finished[after].kind == "length"
    bench.check_outputs()


def test_too_many_stop_ids_are_refused() -> None:
    bench = Bench()
    bench.scheduler._builder._eos_ids = tuple(range(4))
    request = bench.add(PROMPT, sampling=SamplingParams(stop_token_ids=list(range(20, 36))))
    fits = bench.add(PROMPT, sampling=SamplingParams(stop_token_ids=list(range(12)), max_new_tokens=1))
    bench.run()
    error = error_of(bench, request)
    assert error.message == "20 token ids would end the request, the limit is 16"
    assert bench.channel.finished[fits].kind in ("stop", "length")


def test_a_full_queue_refuses_only_the_newcomer() -> None:
    """A full queue must answer with 503, not hang."""
    bench = Bench(rows=1, options={"max_queued_requests": 2})
    running = bench.add(PROMPT, sampling=endless(6))
    bench.scheduler.step()
    waiting = [bench.add(PROMPT, sampling=endless(2)) for _ in range(2)]
    refused = bench.add(PROMPT, sampling=endless(2))
    bench.scheduler.step()
    error = error_of(bench, refused)
    assert (error.name, error.code) == ("QueueFullError", "queue_full")
    assert error.message == "2 requests wait, the limit is 2; try again later"
    assert errors.QueueFullError.status == 503
    bench.scheduler.abort(waiting[0])
    late = bench.add(PROMPT, sampling=endless(2))
    bench.run()
    assert {bench.channel.finished[request].kind for request in (running, waiting[1], late)} == {"length"}
    bench.check_outputs()


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    bench = Bench(invalid_token=VOCAB - 1)
    bad = bench.add([5, 6, VOCAB - 1], sampling=endless(6))
    good = bench.add(PROMPT, sampling=endless(6, seed=9))
    while bad not in bench.channel.finished:
        bench.scheduler.step()
        check_everything(bench.scheduler.cache)
    bench.run()
    error = error_of(bench, bad)
    assert (error.name, error.code) == ("NumericalError", "non_finite_logits")
    assert bench.channel.finished[bad].num_tokens == 0
    assert bad not in bench.channel.streams
    assert VOCAB - 1 not in bench.wanted[good][:-1], "the test's own seed"
    assert bench.channel.finished[good].kind == "length"
    bench.check_outputs()


def test_logits_that_are_not_finite_in_the_middle_of_the_output() -> None:
    """Tokens sampled before the error are kept; the KV that the request computed is not cached."""
    bench = Bench(invalid_token=VOCAB - 1, page_size=1)
    seed = next(s for s in range(1000) if VOCAB - 1 in bench.oracle.output(PROMPT, s, 8)[3:7])
    request = bench.add(PROMPT, sampling=endless(20, seed), stream=False)
    bench.run()
    sampled = bench.channel.output(request)
    assert sampled[-1] == VOCAB - 1
    assert sampled == bench.wanted[request][: len(sampled)]
    assert error_of(bench, request).name == "NumericalError"
    assert bench.scheduler.cache.groups[0].pool.num_free == bench.scheduler.cache.groups[0].pool.total


def test_a_token_that_was_never_sampled_has_no_logprob() -> None:
    """Its entry would have the id -1 and, from a real model, NaN, which no tokenizer and no JSON takes."""
    bench = Bench(invalid_token=VOCAB - 1)
    bad = bench.add([5, 6, VOCAB - 1], sampling=endless(6), top_logprobs=2)
    good = bench.add(PROMPT, sampling=endless(6, seed=9), top_logprobs=2)
    bench.run()
    assert error_of(bench, bad).name == "NumericalError"
    assert bad not in bench.channel.logprobs
    assert [token for token, _ in bench.channel.logprobs[good]] == bench.wanted[good]


def test_a_window_that_its_pool_cannot_hold_is_named() -> None:
    """With several pools the error names the one that is too small, and how to make it larger."""
    bench = Bench(pages=64, more=((40, 6),))
    request = bench.add([1 + number % 30 for number in range(60)], sampling=endless(4))
    bench.run()
    error = error_of(bench, request)
    assert error.message == (
        "60 tokens do not fit the KV pool of 24 in layers with a window of 40; raise swa_full_tokens_ratio or "
        "max_total_tokens"
    )
