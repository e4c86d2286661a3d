"""Logprobs as OpenAI's two routes report them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sglang_jax.engine.types import StreamDecoder, TextTokenizer, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own choice."""


def reported(logprob: float | None) -> float | None:
    """A logprob that JSON can carry."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def token_string(tokenizer: TextTokenizer, token_id: int) -> str:
    r"""A token as text, or as `bytes:\xe2\x82` where it is a part of a character.

    Unlike U+FFFD the second form tells such tokens apart, which the keys of `top_logprobs` need.
    """
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
    """Writes the logprobs of one choice, run by run: those of an echoed prompt if `from_prompt`, then the output's.

    Offsets count characters of the choice's text, echoed prompt included. They are found by decoding the tokens the
    way the text was, so special tokens that were left out and characters made of several tokens count right.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool, *, from_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._offset = 0
        self._decoder: StreamDecoder = tokenizer.stream_decoder(skip_special_tokens, continues_text=not from_prompt)

    def end_prompt(self, prompt_text: str) -> None:
        """What follows is output, behind an echoed prompt of this text."""
        self._offset = len(prompt_text)
        self._decoder = self._tokenizer.stream_decoder(self._skip_special_tokens, continues_text=True)

    def write(self, tokens: Iterable[TokenLogprob], written: CompletionLogprobs) -> None:
        """Appends the next tokens to `written`. A token is among its own alternatives, as OpenAI has it."""
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
    """One token of a chat answer, and the likeliest ones at its position."""

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
