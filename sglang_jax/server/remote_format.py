"""The format between a server and the servers behind it, over `/generate`: requests and answers as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from sglang_jax.config import DEFAULT_WEIGHT_VERSION
from sglang_jax.engine.output import RequestOutputs
from sglang_jax.engine.types import FinishKind, FinishReason, OutputDelta, TokenizedRequest, TokenLogprob
from sglang_jax.logs import REQUEST_ID, REQUEST_ID_HEADER
from sglang_jax.sampling.grammar import Grammar, GrammarKind
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import PooledVector, TokenScores
from sglang_jax.scheduler.messages import DraftCounts
from sglang_jax.server.fields import BACKGROUND_HEADER, CLIENT_REQUEST_HEADER, SHARED_LENGTH_HEADER, TENANT_HEADER


def request_headers(request: TokenizedRequest) -> dict[str, str]:
    """Returns headers with the request's tenant, client request, shared prefix length, whether it is in the background,
    and log id; in headers, because older servers ignore unknown ones."""
    headers = tenant_headers(request.origin.tenant)
    if request.origin.flow:
        headers[CLIENT_REQUEST_HEADER] = quote(request.origin.flow)
    if request.origin.background:
        headers[BACKGROUND_HEADER] = "1"
    if request.input.shared_len:
        headers[SHARED_LENGTH_HEADER] = str(request.input.shared_len)
    if request_id := REQUEST_ID.get():
        headers[REQUEST_ID_HEADER] = request_id
    return headers


def tenant_headers(tenant: str) -> dict[str, str]:
    return {TENANT_HEADER: quote(tenant)} if tenant else {}


def request_body(tokenized: TokenizedRequest, name: str, context_length: int) -> dict[str, Any]:
    """Returns the body for the native route, with all sampling fields, so that the server's defaults do not apply."""
    request, ids = tokenized.input, tokenized.token_ids.tolist()
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": _sampling(tokenized.sampling, context_length - len(ids)),
        "stream": request.stream,
        "incremental_output": request.stream,
        "rid": name,
        "priority": request.priority,
        "continues_text": request.continues_text,
        "return_logprob": request.return_logprob,
    }
    if request.return_logprob:
        body |= {"logprob_start_len": request.logprob_start_len, "top_logprobs_num": request.top_logprobs_num}
    if request.markers:
        body["marker_token_ids"] = sorted(request.markers)
    if tokenized.namespace:
        body["extra_key"] = tokenized.namespace
    if request.routing_key:
        body["routing_key"] = request.routing_key
    match request.wants:
        case PooledVector():
            body["wants"] = {"pooled": True}
        case TokenScores(token_ids):
            body["wants"] = {"token_ids": list(token_ids)}
    if (turn := tokenized.session) is not None:
        body["session_params"] = {"id": turn.session, "rid": turn.after, "turn": turn.name, "opening": turn.bos}
        if turn.whole:
            body["session_params"]["whole"] = True
    return body


def _grammar(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind is GrammarKind.CHOICE:
        return {"guided_choice": msgspec.json.decode(grammar.text)}
    return {grammar.kind.value: grammar.text}


def _sampling(sampling: SamplingParams, room: int) -> dict[str, Any]:
    return {
        **({} if sampling.grammar is None else _grammar(sampling.grammar)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "n": sampling.n,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": sampling.include_stop,
        "max_new_tokens": room if sampling.max_new_tokens is None else sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
    }


def event_of(line: str) -> dict[str, Any] | None:
    """Returns the event in a line of a stream; None for its end, and for lines between events."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    found: dict[str, Any] = msgspec.json.decode(line.removeprefix("data: ").encode())
    return found


def elapsed_times(delta: OutputDelta) -> dict[str, object]:
    """Returns the times for `meta_info`, as seconds before now, because another machine has another clock."""
    times: dict[str, object] = {}
    if delta.queue_seconds is not None:
        times["queue_time"] = delta.queue_seconds
    if delta.sampled is not None:
        now = time.monotonic()
        times["sampled_ago"] = [now - moment for moment in delta.sampled]
    return times


def _sampled(meta: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns when the first and last token were sampled, by this machine's clock, plus the time on the network."""
    if "sampled_ago" not in meta:
        return None
    now = time.monotonic()
    first, last = meta["sampled_ago"]
    return now - first, now - last


def add_answer(outputs: RequestOutputs, answer: Mapping[str, Any], *, first: bool) -> int:
    """Adds an answer of the native route, the `first` of its completion or not. Returns the completion's index."""
    request, meta = outputs.request.input, answer["meta_info"]
    prompt_logprobs: list[TokenLogprob] | None = None
    if first and request.return_logprob and request.logprob_start_len >= 0:
        prompt_logprobs = _logprobs(meta.get("input_token_logprobs"), meta.get("input_top_logprobs"))
    delta = OutputDelta(
        index=int(answer.get("index", 0)),
        text=answer["text"],
        token_ids=answer["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        cached_tokens=meta["cached_tokens"] or 0,  # null if they are hidden from this server
        queue_seconds=meta.get("queue_time"),
        sampled=_sampled(meta),
        finish=_finish(meta["finish_reason"]),
        logprobs=_logprobs(meta.get("output_token_logprobs"), meta.get("output_top_logprobs")),
        prompt_logprobs=prompt_logprobs,
        drafts=_drafts(meta),
        weight_version=meta.get("weight_version", DEFAULT_WEIGHT_VERSION),
        pooled=np.array(meta["pooled"], np.float32) if "pooled" in meta else None,
    )
    outputs.started = True
    outputs.completions[delta.index].add(delta)
    return delta.index


def _drafts(meta: Mapping[str, Any]) -> DraftCounts | None:
    if "spec_verify_ct" not in meta:
        return None
    return DraftCounts(meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"])


def _finish(reason: Mapping[str, Any] | None) -> FinishReason | None:
    return None if reason is None else FinishReason(FinishKind(reason["type"]), reason.get("matched"))


def _logprobs(tokens: list[Any] | None, top: list[Any] | None) -> list[TokenLogprob]:
    """Converts SGLang's (logprob, id, text) entries."""
    alternatives = top if top is not None else [None] * len(tokens or [])
    return [
        TokenLogprob(token_id, logprob, tuple((one[0], one[1]) for one in others or ()))
        for (logprob, token_id, _), others in zip(tokens or [], alternatives, strict=True)
    ]
