"""Bodies and answers of the routes for vectors and scores of texts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, Field

from sglang_jax.errors import ParameterError
from sglang_jax.server.fields import Body, Many, OneOrMany, Priority, Prompt, ShortText, cache_namespace
from sglang_jax.server.openai_usage import PromptTokensDetails
from sglang_jax.server.token_count import TokenCount

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction with which Qwen3-Reranker ranks if a request gives none."""


class PooledBody(Body):
    """Fields that all these routes have; see `OpenAIBody`."""

    model: str | None = None
    rid: ShortText | None = None
    priority: Priority | None = None
    extra_key: ShortText | None = None
    routing_key: ShortText | None = None
    cache_salt: ShortText | None = None

    @property
    def cache_namespace(self) -> str | None:
        return cache_namespace(self.extra_key, self.cache_salt)


class InputBody(PooledBody):
    """A body with texts: a text, texts, token ids, or lists of token ids."""

    input: Prompt

    def prompts(self) -> list[str | list[int]]:
        """The texts. Raises `ParameterError` for an empty one."""
        prompts: list[str | list[int]] = []
        match self.input:
            case str() | [int(), *_]:
                prompts = [self.input]  # type: ignore[list-item]  # a list that starts with an int holds no other type
            case list():
                prompts = [*self.input]
        if not prompts or not all(prompts):
            raise ParameterError("input is empty or holds an empty one; each needs at least one token", param="input")
        return prompts


class EmbeddingsBody(InputBody):
    """`POST /v1/embeddings`. `normalize`: None for what the checkpoint says."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class ClassifyBody(InputBody):
    """`POST /classify`."""


class DocumentBody(Body):
    text: str


class ScoreBody(PooledBody):
    """`POST /v1/score`: pairs of texts, by vLLM's names or Sentence Transformers' idea of them; or `query` and `items`
    with the tokens whose probabilities are wanted, in SGLang's form."""

    text_1: OneOrMany[str] | None = Field(None, validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: OneOrMany[str] | None = Field(None, validation_alias=AliasChoices("text_2", "documents", "data_2"))
    query: str | None = None
    items: OneOrMany[str] | None = None
    label_token_ids: Many[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class RerankBody(PooledBody):
    """`POST /v1/rerank`, in the form of Cohere and Jina. `instruct`: what a reranker that generates text looks for."""

    query: str
    documents: Annotated[Many[str | DocumentBody], Field(min_length=1)]
    top_n: int | None = None
    return_documents: bool | None = None
    instruct: str | None = None

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class PooledUsage(msgspec.Struct, kw_only=True):
    """`prompt_tokens_details` is null for callers with `hide_cached_tokens`."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None

    @classmethod
    def of(cls, tokens: TokenCount) -> PooledUsage:
        details = PromptTokensDetails(tokens.cached_tokens) if tokens.shows_cached else None
        total = tokens.prompt_tokens
        return cls(prompt_tokens=total, total_tokens=total, prompt_tokens_details=details)


class Embedding(msgspec.Struct, kw_only=True):
    """`embedding`: a list, or base64 of float32 in little-endian order."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class Score(msgspec.Struct, kw_only=True):
    object: str = "score"
    index: int
    score: float | list[float]


class Classification(msgspec.Struct, kw_only=True):
    """`label`: that with the highest probability; `probs`: of all labels, in the order of the model's."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    model: str
    data: list[Embedding]
    usage: PooledUsage


class ClassificationList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PooledUsage


class ScoreList(msgspec.Struct, kw_only=True):
    """`data` has the scores as vLLM returns them, `scores` as SGLang does."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    scores: list[float | list[float]]
    usage: PooledUsage


class RankedDocument(msgspec.Struct):
    text: str


class Ranked(msgspec.Struct, kw_only=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """The answer of a ranking, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage
