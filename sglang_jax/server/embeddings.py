"""`POST /v1/embeddings` and `POST /classify`: the vectors of texts, and the probabilities of their labels."""

from __future__ import annotations

import base64
import time

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from sglang_jax.engine.pooling import check_dimensions, classifier, embedder, finished_vector, probabilities
from sglang_jax.server.context import ServerContext
from sglang_jax.server.json_body import JsonRoute
from sglang_jax.server.openapi import answers
from sglang_jax.server.pooled_calls import PooledCall, written
from sglang_jax.server.pooling_schema import (
    Classification,
    ClassificationList,
    ClassifyBody,
    Embedding,
    EmbeddingList,
    EmbeddingsBody,
    PooledUsage,
)
from sglang_jax.server.streaming import until_disconnect


def embeddings_router(context: ServerContext) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings")
    @answers(EmbeddingList)
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        """Returns the vector of each text."""
        call = PooledCall.of(context, body, request.headers, "embd", "input")
        return await until_disconnect(request.receive, _vectors(call, body))

    async def classify(body: ClassifyBody, request: Request) -> Response:
        """Returns the probabilities of the model's labels for each text."""
        call = PooledCall.of(context, body, request.headers, "classify", "input")
        return await until_disconnect(request.receive, _classes(call, body))

    answers(ClassificationList)(classify)
    router.add_api_route("/classify", classify, methods=["POST"])
    router.add_api_route("/v1/classify", classify, methods=["POST"], include_in_schema=False)
    return router


async def _vectors(call: PooledCall, body: EmbeddingsBody) -> Response:
    info = call.context.client.model_info
    pooler = embedder(info)
    check_dimensions(body.dimensions, info)
    found = await call.run(body.prompts())
    as_text = body.encoding_format == "base64"

    def answer() -> EmbeddingList:
        vectors = (finished_vector(each, pooler, body.dimensions, body.normalize) for each in found)
        return EmbeddingList(
            id=call.id,
            model=call.context.config.model_name,
            data=[Embedding(index=place, embedding=_written(each, as_text)) for place, each in enumerate(vectors)],
            usage=PooledUsage.of(call.tokens),
        )

    return await written(answer, len(found) * info.pooled_width)


def _written(vector: NDArray[np.float32], as_text: bool) -> str | list[float]:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()


async def _classes(call: PooledCall, body: ClassifyBody) -> Response:
    info = call.context.client.model_info
    pooler = classifier(info)
    found = await call.run(body.prompts())

    def answer() -> ClassificationList:
        data = []
        for place, scores in enumerate(found):
            shares = probabilities(scores, pooler.activation)
            label = pooler.labels[int(np.argmax(shares))]
            data.append(Classification(index=place, label=label, probs=shares.tolist(), num_classes=len(shares)))
        return ClassificationList(
            id=call.id,
            created=int(time.time()),
            model=call.context.config.model_name,
            data=data,
            usage=PooledUsage.of(call.tokens),
        )

    return await written(answer, len(found) * info.pooled_width)
