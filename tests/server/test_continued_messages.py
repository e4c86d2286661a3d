"""`continue_final_message`: the prompt ends with the text of the last message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_models import make_tiny_tokenizer

from sglang_jax.checkpoint.resolve import ModelSource, SourceKind
from sglang_jax.checkpoint.tokenizer import Tokenizer, load_tokenizer
from sglang_jax.errors import ParameterError
from sglang_jax.server.conversation import RenderedChat
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.openai_schema import ChatBody
from tests.helpers.chats import rendered

KEEPS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
TEMPLATES = {
    "keeps spaces": KEEPS,
    "trims": KEEPS.replace("m.content + '<", "(m.content | trim) + ' <"),
    "thinks": KEEPS + "enable_thinking is {{ enable_thinking }}, thinking is {{ thinking }}",
    "mentions": KEEPS + "<thinking> enable_thinking {{ messages[0].thinking }}{{ messages[0].enable_thinking }}",
    "in capitals": KEEPS.replace("m.content", "(m.content | upper)"),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    saved = make_tiny_tokenizer(folder)
    found = {}
    for name, template in TEMPLATES.items():
        saved.chat_template = template
        saved.save_pretrained(folder)
        found[name] = load_tokenizer(ModelSource(SourceKind.SAFETENSORS, folder, "tiny"))
    return found


def continued(tokenizer: Tokenizer, text: str) -> RenderedChat:
    messages = [{"role": "user", "content": f"a {text}"}, {"role": "assistant", "content": text}]
    return rendered(tokenizer, ChatBody.model_validate({"messages": messages, "continue_final_message": True}))


ENDINGS = ["<", "|", "end", "n", "im_end", "The list:\n- ", "```python\n", " a", "a\t\n ", "Yes"]


@pytest.mark.parametrize("text", ENDINGS)
def test_the_prompt_ends_with_the_message(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """Also where the end-of-turn text contains the message again, and where the message ends in white space."""
    for name, expected in (("keeps spaces", text), ("trims", text.strip())):
        found = continued(tokenizers[name], text)
        assert found.text.endswith(f"<|im_start|>assistant\n{expected}"), name
        assert found.continued is not None
        assert found.continued.lstrip() == expected.lstrip()


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_thinking_is_passed_to_templates_that_use_it(tokenizers: dict[str, Tokenizer], name: str) -> None:
    for value in (False, True):
        body = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], name: value})
        assert f"{name} is {value}" in rendered(tokenizers["thinks"], body).text
        for other in ("trims", "mentions"):
            with pytest.raises(UnsupportedParameterError, match=f"{name} is not supported by this model"):
                rendered(tokenizers[other], body)


@pytest.mark.parametrize(("said", "value"), [("enabled", True), ("disabled", False)])
def test_thinking_may_be_an_object(tokenizers: dict[str, Tokenizer], said: str, value: bool) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = ChatBody.model_validate({"messages": messages, "thinking": {"type": said}})
    assert f"thinking is {value}" in rendered(tokenizers["thinks"], body).text
    body = ChatBody.model_validate({"messages": messages, "thinking": {"type": said, "budget_tokens": None}})
    assert f"thinking is {value}" in rendered(tokenizers["thinks"], body).text
    for other in ({"type": "adaptive"}, {"type": [said]}, {}, said):
        with pytest.raises((ValueError, ParameterError), match="boolean"):
            ChatBody.model_validate({"messages": messages, "thinking": other})
    with pytest.raises(UnsupportedParameterError, match=r"thinking\.budget_tokens is not supported.*got 1024"):
        ChatBody.model_validate({"messages": messages, "thinking": {"type": said, "budget_tokens": 1024}})
    described = json.dumps(ChatBody.model_json_schema()["properties"]["thinking"])
    assert all(form in described for form in ("ThinkingBody", "boolean"))


def test_a_message_that_the_template_changes_is_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ParameterError, match="changes the last message"):
        continued(tokenizers["in capitals"], "yes")
