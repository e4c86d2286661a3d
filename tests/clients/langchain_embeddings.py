"""LangChain's `OpenAIEmbeddings`."""

from __future__ import annotations

import asyncio

import openai
from checks import KEY, MODEL, URL, check, cosine, main, raised
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

TEXTS = ["The cat sleeps on the warm sofa.", "A kitten naps on a couch.", "Quarterly revenue fell by 3 %."]


def embeddings(**fields: object) -> OpenAIEmbeddings:
    """With the server's tokenizer: LangChain would otherwise send tokens of OpenAI's."""
    given = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
    return OpenAIEmbeddings(**{**given, "check_embedding_ctx_length": False, **fields})  # type: ignore[arg-type]


@check
def documents() -> None:
    found = embeddings().embed_documents(TEXTS)
    assert [len(each) for each in found] == [576] * 3
    assert cosine(found[0], found[1]) > cosine(found[0], found[2])
    assert cosine(embeddings().embed_query(TEXTS[0]), found[0]) > 0.9999


@check
def documents_async() -> None:
    found = asyncio.run(embeddings().aembed_documents(TEXTS))
    assert all(cosine(*pair) > 0.9999 for pair in zip(found, embeddings().embed_documents(TEXTS), strict=True))


@check
def dimensions() -> None:
    assert len(embeddings(dimensions=32).embed_query(TEXTS[0])) == 32


@check
def vector_store() -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings())
    [nearest] = store.similarity_search(TEXTS[2], k=1)
    assert nearest.page_content == TEXTS[2]


@check
def errors() -> None:
    error = raised(openai.BadRequestError, lambda: embeddings(dimensions=577).embed_query(TEXTS[0]))
    assert error.param == "dimensions"


main()
