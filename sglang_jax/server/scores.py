"""`POST /v1/score` and `POST /v1/rerank`: how well texts fit each other, or how likely tokens are after a text.

What a pair's score is depends on the model: the cosine of two vectors; the probability of a classifier's only label for
both texts; or, if the model generates text, the share of "yes" against "no" as its answer to the question of
Qwen3-Reranker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from fastapi import APIRouter, Request, Response

from sglang_jax.architectures.pooling import Activation, Pooler
from sglang_jax.engine.pooling import finished_vector, probabilities
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling.wants import TokenScores
from sglang_jax.server.context import ServerContext
from sglang_jax.server.fields import as_list
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openapi import answers
from sglang_jax.server.pooled_calls import PooledCall, written
from sglang_jax.server.pooling_schema import (
    DEFAULT_INSTRUCTION,
    PooledUsage,
    Ranked,
    RankedDocument,
    Ranking,
    RerankBody,
    Score,
    ScoreBody,
    ScoreList,
)
from sglang_jax.server.streaming import until_disconnect

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
"""The system message of Qwen3-Reranker."""

_ANSWERS = ("no", "yes")


def scores_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    async def score(body: ScoreBody, request: Request) -> Response:
        """Scores pairs of texts; or, with `label_token_ids`, tokens after texts."""
        call = PooledCall.of(context, body, request.headers, "score", "items" if body.items else "text_2")
        work = _pairs(call, body) if body.label_token_ids is None else _tokens(call, body, body.label_token_ids)
        return await until_disconnect(request.receive, work)

    async def rerank(body: RerankBody, request: Request) -> Response:
        """Ranks documents by how well they fit a query."""
        call = PooledCall.of(context, body, request.headers, "rerank", "documents")
        return await until_disconnect(request.receive, _ranking(call, body))

    for path, endpoint, answer in (("score", score, ScoreList), ("rerank", rerank, Ranking)):
        answers(answer)(endpoint)
        router.add_api_route(f"/v1/{path}", endpoint, methods=["POST"])
        router.add_api_route(f"/{path}", endpoint, methods=["POST"], include_in_schema=False)
    router.add_api_route("/v2/rerank", rerank, methods=["POST"], include_in_schema=False)
    return router


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of texts. `instruct`: what a model that generates text looks for."""

    first: Sequence[str]
    second: Sequence[str]
    instruct: str = DEFAULT_INSTRUCTION

    @property
    def size(self) -> int:
        """Characters of all texts."""
        return sum(map(len, (*self.first, *self.second)))

    @classmethod
    def of(cls, body: ScoreBody) -> Pairs:
        """Raises `ParameterError` for texts that do not pair."""
        _refuse_mixed(body)
        first = [body.query] if body.query is not None else as_list(body.text_1)
        second = as_list(body.items if body.query is not None else body.text_2)
        if not first or not second or not all((*first, *second)):
            raise ParameterError(
                "text_1 and text_2 (or query and items) must each be a text or a list of texts, none of them empty",
                param="text_1",
            )
        if len(first) not in (1, len(second)):
            raise ParameterError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}: give one text_1, or as many as text_2",
                param="text_1",
            )
        return cls(first * (len(second) // len(first)), second)


def _refuse_mixed(body: ScoreBody) -> None:
    """Raises `ParameterError` for fields that the score of a pair would ignore."""
    texts, items = (body.text_1, body.text_2) != (None, None), (body.query, body.items) != (None, None)
    if texts and items:
        raise ParameterError("give text_1 and text_2, or query and items, not some of both", param="query")
    if body.item_first:
        raise ParameterError("item_first needs label_token_ids", param="item_first")
    if body.apply_softmax:
        raise ParameterError("apply_softmax needs label_token_ids", param="apply_softmax")


async def _pairs(call: PooledCall, body: ScoreBody) -> Response:
    return await _scored(call, [[score] for score in await _fits(call, Pairs.of(body))], single=True)


async def _tokens(call: PooledCall, body: ScoreBody, label_token_ids: list[int]) -> Response:
    """Probabilities of tokens after `query` and each item, in SGLang's form."""
    items = as_list(body.items)
    if body.query is None or not items:
        raise ParameterError("label_token_ids needs query and items", param="query")
    texts = [item + body.query if body.item_first else body.query + item for item in items]
    if not all(texts):
        raise ParameterError("query and an item are empty; at least one token is needed", param="items")
    found = await call.run(texts, TokenScores(tuple(label_token_ids)))
    if body.apply_softmax:
        return await _scored(call, [probabilities(each, Activation.SOFTMAX).tolist() for each in found])
    return await _scored(call, [np.exp(each.astype(np.float64)).tolist() for each in found])


async def _scored(call: PooledCall, scores: list[list[float]], *, single: bool = False) -> Response:
    def answer() -> ScoreList:
        plain: list[float | list[float]] = [each[0] if single else each for each in scores]
        return ScoreList(
            id=call.id,
            created=int(time.time()),
            model=call.context.config.model_name,
            data=[Score(index=place, score=each) for place, each in enumerate(plain)],
            scores=plain,
            usage=PooledUsage.of(call.tokens),
        )

    return await written(answer, sum(map(len, scores)))


async def _ranking(call: PooledCall, body: RerankBody) -> Response:
    if body.top_n is not None and body.top_n < 1:
        raise ParameterError(f"top_n must be at least 1, got {body.top_n}", param="top_n")
    texts = body.texts()
    if not body.query or not all(texts):
        raise ParameterError("query and documents must not be empty", param="documents" if body.query else "query")
    pairs = Pairs([body.query] * len(texts), texts, body.instruct or DEFAULT_INSTRUCTION)
    scores = await _fits(call, pairs)
    best = sorted(range(len(texts)), key=lambda place: (-scores[place], place))[: body.top_n]

    def answer() -> Ranking:
        results = []
        for place in best:
            ranked = Ranked(index=place, relevance_score=scores[place])
            if body.return_documents is not False:
                ranked.document = RankedDocument(texts[place])
            results.append(ranked)
        return Ranking(
            id=call.id, model=call.context.config.model_name, results=results, usage=PooledUsage.of(call.tokens)
        )

    return await written(answer, len(texts))


async def _fits(call: PooledCall, pairs: Pairs) -> list[float]:
    """The score of each pair. Raises `RequestError`."""
    pooler = call.context.client.model_info.pooler
    if pooler is None:
        return await _answers_yes(call, pairs)
    if not pooler.labels:
        return await _cosines(call, pairs, pooler)
    if len(pooler.labels) > 1:
        raise ParameterError(
            f"scores of pairs need a model with one label; this one has {len(pooler.labels)}: use /classify",
            param="model",
        )
    encode = call.context.client.tokenizer.encode_pair
    both = await call.prepare(lambda: list(map(encode, pairs.first, pairs.second)), pairs.size, len(pairs.first))
    return [float(probabilities(each, pooler.activation)[0]) for each in await call.run(both)]


async def _cosines(call: PooledCall, pairs: Pairs, pooler: Pooler) -> list[float]:
    texts = list(dict.fromkeys((*pairs.first, *pairs.second)))
    found = await call.run(texts)
    vectors = {
        text: finished_vector(each, pooler, normalize=True).astype(np.float64)
        for text, each in zip(texts, found, strict=True)
    }
    return [float(vectors[first] @ vectors[second]) for first, second in zip(pairs.first, pairs.second, strict=True)]


async def _answers_yes(call: PooledCall, pairs: Pairs) -> list[float]:
    tokenizer = call.context.client.tokenizer
    labels = TokenScores(tuple(_token_of(tokenizer, word) for word in _ANSWERS))
    prompts = await call.prepare(partial(_prompts, tokenizer, pairs), pairs.size, len(pairs.first))
    found = await call.run(prompts, labels)
    return [float(probabilities(each, Activation.SOFTMAX)[1]) for each in found]


def _prompts(tokenizer: TextTokenizer, pairs: Pairs) -> list[list[int]]:
    found = []
    for query, document in zip(pairs.first, pairs.second, strict=True):
        user = f"<Instruct>: {pairs.instruct}\n<Query>: {query}\n<Document>: {document}"
        messages: list[dict[str, object]] = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": user},
        ]
        text = tokenizer.render_chat(messages, variables={"enable_thinking": False})
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def _token_of(tokenizer: TextTokenizer, word: str) -> int:
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ParameterError(
            f"a model that generates text scores pairs by the tokens yes and no; in this vocabulary, {quote(word)} has "
            f"{len(ids)} tokens: serve a model with --model-task embed or classify",
            param="model",
        )
    return ids[0]
