"""The page of a server whose model gives vectors or labels: it offers no chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.echo_server import serve_echo
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_tokenizer, randomise, tiny_fields
from helpers.web_page import Page

from sglang_jax.engine.model_core import load_core, load_text_tokenizer

OPTIONS: dict[str, Any] = {
    "backend": "torch",
    "device": "cpu",
    "dtype": "float32",
    "skip_warmup": True,
    "context_length": 256,
    "max_running_requests": 4,
}


def labelling(folder: Path) -> Path:
    config = transformers.AutoConfig.for_model("llama", **tiny_fields("llama"), id2label={0: "fits"})
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    randomise(model, "llama").save_pretrained(folder)
    make_tiny_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("task", "gives", "route"), [("embed", "vectors", "/v1/embeddings"), ("classify", "labels", "/classify")]
)
def test_the_page_says_what_the_model_gives_and_offers_no_chat(
    page: Page, tmp_path: Path, task: str, gives: str, route: str
) -> None:
    folder = (make_tiny_checkpoint if task == "embed" else labelling)(tmp_path / "model")
    with serve_echo(load_core, load_text_tokenizer, model_path=str(folder), model_task=task, **OPTIONS) as server:
        for path in ("/", "/#chat", "/#live"):
            page.open(server.url, path)
            page.until(lambda: page.shown("live"))
            assert gives in page.text("#purpose")
            assert route in page.text("#purpose")
            assert [one.text for one in page.all("[role=tab]") if one.is_displayed()] == ["Live"]
            assert not page.shown("chat")
        assert server.http.post(route, json={"input": "a b c"}).status_code == 200
        page.until(lambda: "serving" in page.text("#replicas"))


def test_a_model_that_chats_has_no_such_note(page: Page) -> None:
    with serve_echo() as server:
        page.open(server.url)
        assert page.shown("chat")
        assert not page.shown("purpose")
