"""LlamaIndex's `OpenAILikeEmbedding`."""

from __future__ import annotations

import asyncio

from checks import KEY, MODEL, URL, check, cosine, main
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["The cat sleeps on the warm sofa.", "A kitten naps on a couch.", "Quarterly revenue fell by 3 %."]
embedding = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key=KEY, max_retries=0)


@check
def texts() -> None:
    found = embedding.get_text_embedding_batch(TEXTS)
    assert [len(each) for each in found] == [576] * 3
    assert cosine(found[0], found[1]) > cosine(found[0], found[2])
    assert cosine(embedding.get_query_embedding(TEXTS[0]), found[0]) > 0.9999


@check
def texts_async() -> None:
    found = asyncio.run(embedding.aget_text_embedding_batch(TEXTS))
    assert cosine(found[1], embedding.get_text_embedding(TEXTS[1])) > 0.9999


@check
def dimensions() -> None:
    cut = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key=KEY, dimensions=32, max_retries=0)
    assert len(cut.get_text_embedding(TEXTS[0])) == 32


main()
