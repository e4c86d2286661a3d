from __future__ import annotations

import numpy as np
import pytest
from helpers.engine_fakes import ByteDecoder

from sglang_jax import errors
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.output import Completion, RequestOutputs, request_error
from sglang_jax.engine.types import FinishKind, TokenLogprob
from sglang_jax.errors import RequestError
from sglang_jax.scheduler.messages import Finished, WireError


def completion(stop: tuple[str, ...] = ()) -> Completion:
    outputs = RequestOutputs("r", stream=True)
    text = OutputText(ByteDecoder(), stop, frozenset({0}))
    return Completion(outputs, wire_id=1, index=0, prompt_tokens=3, text=text)


def test_what_was_drawn_after_a_stop_string_is_dropped() -> None:
    """A step may publish the tokens of two."""
    each = completion(stop=("b",))
    each.logprobs += [TokenLogprob(97, -1.0), TokenLogprob(98, -2.0), TokenLogprob(99, -3.0)]
    assert [each.push(97), each.push(98)] == [False, True]
    output = each.take()
    assert (output.text, output.output_ids, output.completion_tokens) == ("a", [97, 98], 2)
    assert [entry.token_id for entry in output.logprobs] == [97, 98]
    assert each.delivered


def test_outputs_taken_earlier_stay_as_they_were() -> None:
    each = completion()
    each.push(97)
    first = each.take()
    assert not each.has_news
    each.push(98)
    assert each.has_news
    second = each.take()
    assert (first.text, first.output_ids) == ("a", [97])
    assert (second.text, second.delta_text, second.output_ids, second.delta_ids) == ("ab", "b", [97, 98], [98])


def test_stop_string_in_what_was_held_back_wins_over_the_length() -> None:
    each = completion(stop=("\N{REPLACEMENT CHARACTER}",))
    tokens = np.frombuffer("a€".encode()[:2], np.uint8).astype("<i4").tobytes()
    each.end(Finished(1, "length", None, 2, tokens, 0))
    output = each.take()
    assert output.text == "a"
    assert output.finish is not None
    assert output.finish.kind is FinishKind.STOP


@pytest.mark.parametrize(
    "error",
    [
        errors.ParameterError("m", param="p"),
        errors.PromptTooLongError("m", param="prompt"),
        errors.QueueFullError("m"),
        errors.CapacityError("m", code="other"),
        errors.NumericalError("m"),
        RequestError("m"),
    ],
)
def test_errors_of_the_scheduler_arrive_as_they_were_raised(error: RequestError) -> None:
    got = request_error(WireError(type(error).__name__, error.message, error.param, error.code))
    assert type(got) is type(error)
    assert (got.message, got.param, got.code, got.status) == (error.message, error.param, error.code, error.status)
