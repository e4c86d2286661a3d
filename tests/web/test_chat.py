"""The chat: streams, stops, sends what the user set, shows tool calls, reasoning and errors, and adds no markup."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from helpers.echo_server import EchoServer, wait_for
from helpers.web_page import Page
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

REPLY = ".turn.assistant .text"
LONG = "Write a long story about a lighthouse."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
        },
    },
}


def answer(server: EchoServer, messages: list[dict[str, Any]], **fields: Any) -> str:
    """The text that the API returns without a stream."""
    body = {"messages": messages, "temperature": 0, **fields}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    return str(choice["message"]["content"])


def test_a_reply_streams_and_is_that_of_the_api(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("temperature", "0")
    page.set("max_tokens", "40")
    page.find("prompt").send_keys("Describe the sea in one paragraph.", Keys.ENTER)
    lengths = [0]
    while page.shown("stop") or lengths[-1] == 0:
        lengths.append(len(page.text(REPLY)))
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= 4
    expected = answer(demo, [{"role": "user", "content": "Describe the sea in one paragraph."}], max_tokens=40)
    shown = page.script("return document.querySelector(arguments[0]).textContent", REPLY)
    assert "".join(shown.split()) == "".join(expected.split())
    assert "40 tokens" in page.text(".turn .about") or "tokens/s" in page.text(".turn .about")


@pytest.mark.parametrize("key", [True, False], ids=["escape", "button"])
def test_stop_ends_the_request_on_the_server(demo: EchoServer, page: Page, key: bool) -> None:
    page.open(demo.url)
    page.set("max_tokens", "1500")
    aborted = demo.engine.stats.num_aborted
    page.find("prompt").send_keys(LONG, Keys.ENTER)
    page.until(lambda: len(page.text(REPLY)) > 40)
    assert demo.engine.stats.num_running == 1
    if key:
        page.press(Keys.ESCAPE)
    else:
        page.find("stop").click()
    page.until(lambda: page.shown("send"))
    wait_for(lambda: demo.engine.stats.num_running == 0 and demo.engine.stats.num_aborted == aborted + 1)
    told = page.text(REPLY)
    assert "stopped" in page.text(".turn.assistant .about")
    time.sleep(0.3)
    assert page.text(REPLY) == told


def test_the_next_turn_has_the_conversation_and_regenerate_replaces_a_reply(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("system", "You are brief.")
    for name, value in (("temperature", "0.5"), ("top_p", "0.8"), ("max_tokens", "12"), ("seed", "7")):
        page.set(name, value)
    first = page.ask("What is tea?")
    page.ask("And coffee?")
    (regenerate,) = page.all(".turn .only-last")
    regenerate.click()
    page.until(lambda: len(page.chats()) == 3 and page.shown("send"))
    assert len(page.all(".turn")) == 4
    opened, second, again = page.chats()
    fields = {"temperature": 0.5, "top_p": 0.8, "max_tokens": 12, "seed": 7, "stream": True}
    assert {name: opened[name] for name in fields} == fields
    system = {"role": "system", "content": "You are brief."}
    assert opened["messages"] == [system, {"role": "user", "content": "What is tea?"}]
    assert second["messages"][:2] == opened["messages"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert "".join(second["messages"][2]["content"].split()) == "".join(first.split())
    assert again == second


def test_fields_that_are_empty_are_not_sent(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    assert page.find("temperature").get_attribute("placeholder") == "0.2"
    page.find("prompt").send_keys(LONG, Keys.ENTER)
    page.until(lambda: page.chats())
    page.press(Keys.ESCAPE)
    assert set(page.chats()[0]) == {"messages", "stream", "stream_options"}


def test_a_tool_call_is_shown_and_its_result_continues_the_chat(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("temperature", "0")
    page.set("max_tokens", "120")
    page.set("functions", json.dumps([TOOL]))
    page.find("tool_choice").send_keys("required")
    page.ask("What is the weather in Oslo?")
    (card,) = page.all(".call")
    assert card.find_element(By.TAG_NAME, "h4").text.split("\n") == ["Tool call", "weather", "Copy"]
    arguments = json.loads(card.find_element(By.TAG_NAME, "pre").text)
    assert arguments["city"] in ("Paris", "Oslo")
    assert arguments["unit"] in ("C", "F")
    assert "Tool call: weather." in page.text("#spoken")
    page.find("tool_choice").send_keys("none")
    field = card.find_element(By.TAG_NAME, "textarea")
    assert field.accessible_name == "Result of weather"
    field.send_keys("4 degrees, rain")
    card.find_element(By.CSS_SELECTOR, "form button").click()
    page.until(lambda: len(page.all(".turn.assistant")) == 2 and page.shown("send"))
    call, result = page.chats()[1]["messages"][1:]
    assert call["tool_calls"][0]["function"]["name"] == "weather"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == arguments
    assert result == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4 degrees, rain"}
    assert page.text(REPLY)


def test_a_call_that_was_cut_off_is_not_sent_back(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body = {"messages": question, "temperature": 0, "tools": [TOOL], "tool_choice": "required"}
    whole = demo.http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"]
    page.set("temperature", "0")
    page.set("max_tokens", str(whole - 3))
    page.set("functions", json.dumps([TOOL]))
    page.find("tool_choice").send_keys("required")
    page.ask(question[0]["content"])
    assert len(page.all(".call")) == 1
    assert not page.all(".call form")
    assert "cut off at its maximum" in page.text(".turn .about")
    page.ask("And in Paris?")
    assert [message["role"] for message in page.chats()[1]["messages"]] == ["user", "user"]


def test_an_error_is_shown_and_can_be_tried_again(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("max_tokens", "8")
    page.set("temperature", "500")
    page.ask("Hello")
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 500}
    expected = demo.http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    (problem,) = page.all(".turn [role=alert]")
    assert problem.text == expected
    page.set("temperature", "0")
    (again,) = page.all(".turn .only-last")
    assert again.text == "Try again"
    again.click()
    page.until(lambda: page.text(REPLY) and page.shown("send"))
    assert not page.all(".turn [role=alert]")
    assert page.chats()[1]["messages"] == [{"role": "user", "content": "Hello"}]
    page.set("functions", "[{")
    page.ask("More")
    assert page.text(".turn [role=alert]").startswith("Tools must be JSON: ")
    assert page.focused.get_attribute("id") == "functions"
    assert len(page.chats()) == 2


def test_an_error_in_a_stream_keeps_what_came_before(page: Page, echo: EchoServer) -> None:
    page.open(echo.url)
    page.find("prompt").send_keys("</think>" + "word " * 400, Keys.ENTER)
    page.until(lambda: len(page.text(REPLY)) > 20)
    echo.await_(echo.engine.close())
    page.until(lambda: page.shown("send"))
    assert len(page.text(REPLY)) > 20
    assert "engine" in page.text(".turn [role=alert]")


def test_reasoning_is_folded(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    page.ask("It must be 4.</think>The answer is 4.")
    (reasoning,) = page.all(".reasoning")
    assert reasoning.get_attribute("open") is None
    assert page.text(REPLY) == "The answer is 4."
    assert "It must be" not in page.text(".turn.assistant")
    reasoning.find_element(By.TAG_NAME, "summary").click()
    assert "user: It must be 4." in page.text(".reasoning .thought")
    page.ask("More")
    assert page.chats()[1]["messages"][1] == {"role": "assistant", "content": "The answer is 4.\n"}


HOSTILE = """</think>

<img src=x onerror="document.title='broken'"> <script>document.title = 'broken'</script>
[click](javascript:document.title='broken') [page](https://example.org/a) ![shot](https://example.org/b.png)
<a href="https://example.org" onclick="alert(1)">x</a> **bold <b>html</b>** `code`
"""


def test_text_is_never_markup(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    prompt = page.find("prompt")
    page.script("arguments[0].value = arguments[1]", prompt, HOSTILE)
    page.ask("")
    for selector in (".turn.user .text", REPLY):
        shown = page.script("return document.querySelector(arguments[0]).textContent", selector)
        assert "<img src=x onerror=" in shown
        assert "<script>" in shown
        assert "javascript:" in shown
    assert not page.all("#turns img, #turns script, #turns b, #turns [onerror], #turns [onclick]")
    links = [(link.get_attribute("href"), link.get_attribute("rel")) for link in page.all("#turns a")]
    assert links == [
        ("https://example.org/a", "noopener noreferrer"),
        ("https://example.org/b.png", "noopener noreferrer"),
        ("https://example.org/", "noopener noreferrer"),
    ]
    assert page.text(f"{REPLY} strong") == "bold <b>html</b>"
    assert "broken" not in page.driver.title


MARKDOWN = """</think>

# Title

1. one
2. two
   - deep

> quoted *words*

| a | b |
|---|---|
| 1 | `2` |

```python
print("<b>")
```
"""


def test_markdown_becomes_elements(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    page.script("arguments[0].value = arguments[1]", page.find("prompt"), MARKDOWN)
    page.ask("")
    names = page.script("return [...document.querySelectorAll(arguments[0])].map(one => one.localName)", f"{REPLY} *")
    assert names == [
        *("h4", "ol", "li", "li", "ul", "li", "blockquote", "p", "em"),
        *("table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td", "code"),
        *("div", "pre", "code", "button"),
    ]
    assert page.text(f"{REPLY} pre") == 'print("<b>")'


@pytest.mark.parametrize("allowed", [True, False])
def test_a_reply_and_its_code_can_be_copied(echo: EchoServer, page: Page, allowed: bool) -> None:
    page.open(echo.url)
    setting = "granted" if allowed else "denied"
    for permission in ("clipboard-write", "clipboard-read"):
        given = {"permission": {"name": permission}, "setting": setting, "origin": echo.url}
        page.driver.execute_cdp_cmd("Browser.setPermission", given)
    page.script("arguments[0].value = arguments[1]", page.find("prompt"), MARKDOWN)
    page.ask("")
    whole = next(one for one in page.all(".turn .about button") if one.text == "Copy")
    for button, expected in ((page.all(".fence button")[0], 'print("<b>")'), (whole, MARKDOWN[10:].strip())):
        button.click()
        page.until(lambda: button.text == ("Copied" if allowed else "Not copied"))  # noqa: B023
        if allowed:
            copied = page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
            assert copied.strip() == expected


def rendered(page: Page, text: str, selector: str) -> dict[str, Any]:
    """What the page makes of a reply: its text, and how many elements match."""
    script = """
        const [text, selector, done] = arguments;
        import('/ui/markdown.js').then(({ markdown }) => {
          const made = markdown(text);
          done({text: made.textContent, count: made.querySelectorAll(selector).length});
        }).catch(error => done({text: String(error)}))
    """
    return dict(page.driver.execute_async_script(script, text, selector))


def test_no_reply_is_too_deep(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    for text, selector in (
        (">" * 50_000 + " end", "blockquote"),
        ("\n".join("  " * depth + "- end" for depth in range(400)), "ul"),
    ):
        made = rendered(page, text, selector)
        assert made["text"].endswith("end")
        assert made["count"] == 17


@pytest.mark.parametrize("text", ["|\n" + " " * 300_000 + "end", ("a " + "`" * 19_990 + "end\n\n") * 100])
def test_a_loop_of_the_model_does_not_hang_the_page(echo: EchoServer, page: Page, text: str) -> None:
    """The driver's limit for a script is 30 s."""
    page.open(echo.url)
    assert rendered(page, text, "p")["text"].endswith("end")


def test_code_in_a_line_starts_no_block(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    made = rendered(page, "```print(1)``` prints 1.\n\nMore", "pre")
    assert made == {"text": "print(1) prints 1.More", "count": 0}


def answer_with(page: Page, path: str, status: int, body: str) -> None:
    """From now on, the page gets this answer of a path."""
    page.script(
        "const real = fetch, [path, status, body] = arguments;"
        "window.fetch = (url, options) => String(url).endsWith(path)"
        " ? Promise.resolve(new Response(body, {status})) : real(url, options)",
        path,
        status,
        body,
    )


def event_of(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (502, '{"error": "Bad Gateway"}', "the server answered with status 502"),
        (
            200,
            event_of({"content": "some"}) + "data: <html>\n\n",
            "the stream is not this server's: an event is not JSON",
        ),
        (200, ": waits\n\n" + event_of({"content": "some"}, "stop") + "data: [DONE]\n\n", ""),
    ],
)
def test_what_a_proxy_adds_does_not_stop_the_chat(
    echo: EchoServer, page: Page, status: int, body: str, problem: str
) -> None:
    page.open(echo.url)
    answer_with(page, "/v1/chat/completions", status, body)
    page.ask("Hello")
    assert page.text(".turn [role=alert]") == problem
    assert page.text(REPLY) == ("some" if status == 200 else "")


def test_arguments_are_shown_as_the_model_wrote_them(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    for arguments, shown in (
        ('{"id": 12345678901234567890}', '{"id": 12345678901234567890}'),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ('{"a": "<img src=x onerror=alert(1)>"}', '{\n  "a": "<img src=x onerror=alert(1)>"\n}'),
    ):
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "<b>f</b>", "arguments": arguments}}
        answer_with(
            page, "/v1/chat/completions", 200, event_of({"tool_calls": [call]}, "tool_calls") + "data: [DONE]\n\n"
        )
        page.ask("Hello")
        assert page.text(".call pre") == shown
        assert "<b>f</b>" in page.text(".call h4")
