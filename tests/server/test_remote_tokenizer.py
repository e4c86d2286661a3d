"""The server's tokenizer routes, as lm-eval uses them (`tokenizer_backend=remote`), against transformers' tokenizer
of the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.tiny_models import make_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from sglang_jax.checkpoint.tokenizer import Tokenizer
from sglang_jax.config import EngineConfig

TEXTS = ["abc def", "Füße <|im_end|>\n", "<|im_start|>user\nhi<|im_end|>", "  two  spaces "]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), 259)


@pytest.fixture(scope="module")
def remote(local: PreTrainedTokenizerFast) -> Iterator[EchoServer]:
    def load(config: EngineConfig) -> Tokenizer:
        return Tokenizer(local, "test")

    with serve_echo(load_tokenizer=load) as server:
        yield server


def encode(server: EchoServer, text: str) -> list[int]:
    tokens: list[int] = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
        "tokens"
    ]
    return tokens


def test_special_tokens_and_template_are_those_of_transformers(
    remote: EchoServer, local: PreTrainedTokenizerFast
) -> None:
    info: dict[str, Any] = remote.http.get("/tokenizer_info").json()
    for role in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert info[role] == getattr(local, role)
    assert info["model_max_length"] == remote.engine.model_info.context_length


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_a_special_token_is_tokenized_to_its_own_id(
    remote: EchoServer, local: PreTrainedTokenizerFast, role: str
) -> None:
    """lm-eval finds ids in this way."""
    spelled = remote.http.get("/tokenizer_info").json()[role]
    assert encode(remote, spelled)[0] == getattr(local, f"{role}_id")


@pytest.mark.parametrize("text", TEXTS)
def test_tokenization_round_trips_as_with_transformers(
    remote: EchoServer, local: PreTrainedTokenizerFast, text: str
) -> None:
    tokens = encode(remote, text)
    assert tokens == local.encode(text, add_special_tokens=False)
    answer = remote.http.post("/detokenize", json={"tokens": tokens}).json()
    assert answer["prompt"] == answer["text"] == local.decode(tokens, skip_special_tokens=True)


def test_missing_special_tokens_come_from_the_model(server: EchoServer) -> None:
    info = server.http.get("/tokenizer_info").json()
    end = server.http.post("/detokenize", json={"tokens": [256], "skip_special_tokens": False}).json()["prompt"]
    assert (info["eos_token"], info["bos_token"]) == (end, None)


def test_templates_without_a_chat_template_give_none(tmp_path: Path) -> None:
    tokenizer = make_tiny_tokenizer(tmp_path, 259)
    tokenizer.chat_template = {"summary": "{{ messages }}"}
    with serve_echo(load_tokenizer=lambda config: Tokenizer(tokenizer, "test")) as server:
        assert server.http.get("/tokenizer_info").json()["chat_template"] is None
