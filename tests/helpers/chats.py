"""Renders chats as the server does."""

from __future__ import annotations

from starlette.datastructures import Headers

from sglang_jax.engine.types import TextTokenizer
from sglang_jax.sampling import GenerationDefaults
from sglang_jax.server.conversation import RenderedChat, render
from sglang_jax.server.openai_chat import read_conversation
from sglang_jax.server.openai_schema import ChatBody


def rendered(tokenizer: TextTokenizer, body: ChatBody) -> RenderedChat:
    return render(tokenizer, read_conversation(body, Headers(), tokenizer, GenerationDefaults(), max_tools=128))
