"""Logprobs in the formats of OpenAI's two routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sglang_jax.engine.types import StreamDecoder, TextTokenizer, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Reported instead of minus infinity, which JSON does not have; OpenAI's own choice."""


def reported(logprob: float | None) -> float | None:
    """Returns a logprob that JSON can represent."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def token_string(tokenizer: TextTokenizer, token_id: int) -> str:
    r"""Returns a token as text, or as `bytes:\xe2\x82` if it is a part of a character: unlike U+FFFD, different for
    different tokens, as the keys of `top_logprobs` must be."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/completions`: one entry per token in each list."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] = []
    text_offset: list[int] = []


class CompletionLogprobWriter:
    """Writes the logprobs of one choice step by step: those of an echoed prompt if `from_prompt`, then the output's.
    Offsets count characters of the choice's text, including an echoed prompt. Tokens are decoded as the text is, so
    that omitted special tokens, and characters of several tokens, are counted correctly."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, *, from_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0
        self._decoder: StreamDecoder = tokenizer.stream_decoder(skip_special_tokens, continues_text=not from_prompt)

    def end_prompt(self, prompt_text: str) -> None:
        """Ends the echoed prompt with this text: output follows."""
        self._offset = len(prompt_text)
        self._decoder = self._tokenizer.stream_decoder(self._skip_special_tokens, continues_text=True)

    def write(self, tokens: Iterable[TokenLogprob], written: CompletionLogprobs) -> None:
        """Appends the next tokens to `written`. A token is one of its own alternatives, as with OpenAI."""
        for one in tokens:
            text = token_string(self._tokenizer, one.token_id)
            written.tokens.append(text)
            written.token_logprobs.append(reported(one.logprob))
            top: dict[str, float | None] | None = None
            if one.logprob is not None:
                top = {token_string(self._tokenizer, token): reported(logprob) for logprob, token in one.top}
                top.setdefault(text, reported(one.logprob))
            written.top_logprobs.append(top)
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.push(one.token_id))


class ChatAlternative(msgspec.Struct):
    """A likely token at a position."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One token of a chat answer, and the most likely ones at its position."""

    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a choice of `/v1/chat/completions`."""

    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(tokenizer: TextTokenizer, tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    def alternative(token_id: int, logprob: float | None) -> ChatAlternative:
        spelled = list(tokenizer.token_bytes(token_id))
        return ChatAlternative(token_string(tokenizer, token_id), reported(logprob), spelled)

    content = []
    for one in tokens:
        token = alternative(one.token_id, one.logprob)
        top = [alternative(token_id, logprob) for logprob, token_id in one.top]
        content.append(ChatLogprob(token.token, token.logprob, token.bytes, top))
    return ChatLogprobs(content)
