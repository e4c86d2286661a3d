"""The body of `POST /generate`, in SGLang's native format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, TypeVar

from pydantic import Field
from starlette.datastructures import Headers

from sglang_jax.engine.types import GenerateInput
from sglang_jax.errors import ParameterError
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.sampling.wants import MAX_SCORED_TOKENS, POOLED, SAMPLES, TokenScores, Wants
from sglang_jax.server.callers import Claim
from sglang_jax.server.context import new_id, prompt_ids
from sglang_jax.server.fields import (
    Body,
    Many,
    OneOrMany,
    Priority,
    SessionParamsBody,
    ShortText,
    TokenIds,
    as_list,
    check_turns,
    claim_of,
    routing_key,
    shared_length_of,
)
from sglang_jax.server.sampling import NativeSampling, native_sampling

MAX_MARKERS = 64
"""Maximum `marker_token_ids` of a request: special tokens that stay in its output text."""

Value = TypeVar("Value")


class WantsBody(Body):
    """`wants`: another result than samples, for a server in front of this one. `pooled`: the prompt's vector or scores;
    `token_ids`: the logprobs of these tokens after it."""

    pooled: bool | None = None
    token_ids: Annotated[Many[int], Field(max_length=MAX_SCORED_TOKENS)] | None = None

    def wants(self) -> Wants:
        if self.token_ids:
            return TokenScores(tuple(self.token_ids))
        return POOLED if self.pooled else SAMPLES


class GenerateBody(Body):
    """One prompt, or a batch. In a batch, a single value applies to all prompts; a list has one value per prompt."""

    model: str | None = None
    text: OneOrMany[str] | None = None
    input_ids: TokenIds | None = None
    sampling_params: OneOrMany[NativeSampling] | None = None
    return_logprob: OneOrMany[bool] | None = None
    logprob_start_len: OneOrMany[int] | None = None
    top_logprobs_num: OneOrMany[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    incremental_output: bool | None = None
    rid: OneOrMany[ShortText] | None = None
    priority: Priority | None = None
    extra_key: OneOrMany[ShortText] | None = None
    routing_key: OneOrMany[ShortText] | None = None
    continues_text: bool | None = None
    session_params: OneOrMany[SessionParamsBody] | None = None
    marker_token_ids: Annotated[Many[int], Field(max_length=MAX_MARKERS)] | None = None
    wants: WantsBody | None = None


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A checked `/generate` call.

    - `single`: the answer is one object; otherwise a list, also for one prompt with n > 1.
    - `first_index`: index of each prompt's first completion in that list.
    - `prompt_field`: the field in which the client sent the prompts.
    - `claim`: the tenant and the flow that its headers name.
    """

    request_id: str
    prompts: list[GenerateInput]
    first_index: list[int]
    single: bool
    prompt_field: str
    claim: Claim


def native_request(
    body: GenerateBody, defaults: GenerationDefaults, headers: Headers, check_size: Callable[[int, int, str], None]
) -> NativeRequest:
    """Validates a `/generate` body. `defaults`: for sampling fields that it leaves out; `check_size`: see
    `ServerContext`. Raises `ParameterError`."""
    field, prompts, batch = _prompts(body)
    count = len(prompts)
    check_size(count, count, field)
    request_id, ids = _ids(body.rid, count)
    fields = _spread("sampling_params", body.sampling_params, count, NativeSampling())
    sampling = [native_sampling(one, defaults) for one in fields]
    check_size(count, sum(one.n for one in sampling), field)
    return_logprob = _spread("return_logprob", body.return_logprob, count, False)
    logprob_start = _spread("logprob_start_len", body.logprob_start_len, count, -1)
    top_logprobs = _spread("top_logprobs_num", body.top_logprobs_num, count, 0)
    extra_keys = _spread("extra_key", body.extra_key, count, "")
    routing_keys = _spread("routing_key", body.routing_key, count, "")
    params = _spread("session_params", body.session_params, count, SessionParamsBody())
    turns = [one.turn_of() for one in params]
    check_turns(turns)
    if body.incremental_output and not body.stream:
        raise ParameterError("incremental_output needs stream to be true", param="incremental_output")
    for number in range(count):
        if not return_logprob[number] and (top_logprobs[number] > 0 or logprob_start[number] >= 0):
            raise ParameterError(
                "top_logprobs_num and logprob_start_len need return_logprob to be true", param="return_logprob"
            )
    inputs = [
        GenerateInput(
            prompt=prompts[number],
            sampling=sampling[number],
            request_id=ids[number],
            stream=bool(body.stream),
            return_logprob=return_logprob[number],
            logprob_start_len=logprob_start[number],
            top_logprobs_num=top_logprobs[number],
            extra_key=extra_keys[number] or None,
            priority=body.priority or 0,
            routing_key=routing_key(routing_keys[number], headers),
            continues_text=body.continues_text is not False,
            markers=frozenset(body.marker_token_ids or ()),
            session=turns[number],
            shared_len=shared_length_of(headers),
            wants=SAMPLES if body.wants is None else body.wants.wants(),
        )
        for number in range(count)
    ]
    first_index = list(accumulate((one.n for one in sampling[:-1]), initial=0))
    single = not batch and sampling[0].n == 1
    return NativeRequest(request_id, inputs, first_index, single, field, claim_of(headers))


def _prompts(body: GenerateBody) -> tuple[str, Sequence[str | list[int]], bool]:
    """Returns the field of the prompts, the prompts, and whether they are a batch."""
    if (body.text is None) == (body.input_ids is None):
        given = "neither" if body.text is None else "both"
        raise ParameterError(f"exactly one of text and input_ids must be given, got {given}", param="text")
    if body.text is not None:
        texts = as_list(body.text)
        prompts: Sequence[str | list[int]] = texts
        field, batch = "text", isinstance(body.text, list)
    else:
        assert body.input_ids is not None
        nested = [ids for ids in body.input_ids if isinstance(ids, list)]
        flat = [token for token in body.input_ids if isinstance(token, int)]
        field, batch = "input_ids", bool(nested)
        prompts = nested or [flat]
    if not prompts or not all(prompts):
        raise ParameterError(f"{field} is empty or holds an empty prompt; each needs at least one token", param=field)
    return field, prompts, batch


def _ids(rid: str | list[str] | None, count: int) -> tuple[str, list[str]]:
    if isinstance(rid, list):
        if len(rid) != count:
            raise ParameterError(f"rid holds {len(rid)} ids for {count} prompts", param="rid")
        return (rid[0] if count == 1 else new_id("batch")), rid
    request_id = rid or new_id("gen")
    return request_id, prompt_ids(request_id, count)


def _spread(name: str, value: Value | list[Value] | None, count: int, default: Value) -> list[Value]:
    """Returns one value for each prompt. Raises `ParameterError` for a list of another length."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise ParameterError(f"{name} holds {len(value)} values for {count} prompts", param=name)
    return value
