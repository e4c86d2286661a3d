"""The live view: its figures follow the server's, under load and at rest."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.echo_server import EchoServer, serve_echo, wait_for
from helpers.engine_fakes import load_echo, load_tokenizer
from helpers.replica_fakes import AT_ONCE
from helpers.web_page import Page

from sglang_jax.config import ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import launch_link
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.replica import Replica

SYSTEM = "You are the assistant of a library. You answer briefly, and you say so when you do not know. " * 3
TOPICS = ("a book about the sea", "the history of lighthouses", "rivers in winter")


@contextmanager
def load(server: EchoServer, count: int, tokens: int = 1500) -> Iterator[None]:
    """Chats of this many clients, which share the system message and some a topic. They end with the block."""
    ids = [f"load-{number}" for number in range(count)]

    def chat(number: int) -> None:
        question = (
            f"Tell me much more about {TOPICS[number % len(TOPICS)]}, please. " * 4 + f"This is question {number}."
        )
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True, "rid": ids[number]}
        with server.http.stream("POST", "/v1/chat/completions", json=body, timeout=None) as answer:
            for _ in answer.iter_lines():
                pass

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for one in ids:
            server.http.post("/abort_request", json={"rid": one})
        for thread in threads:
            thread.join()


def tiles(page: Page) -> dict[str, str]:
    """The value of each tile, by its name."""
    script = "return [...document.querySelectorAll('.tile')].map(one => one.innerText)"
    return {text.split("\n")[0]: text.split("\n")[1] for text in page.script(script)}


def first_number(text: str) -> float:
    found = re.match(r"[\d.]+", text)
    return float(found[0]) if found else 0.0


def boxes(page: Page) -> dict[int, int]:
    """The requests that use each box of the tree, by the number of its node."""
    script = "return [...document.querySelectorAll('#tree rect')].map(one => [one.dataset.node, one.dataset.requests])"
    return {int(node): int(requests) for node, requests in page.script(script)}


def test_figures_follow_the_load(demo: EchoServer, page: Page, pictures: Path, seconds_shown: float) -> None:
    page.open(demo.url, "/#live")
    page.until(lambda: tiles(page))
    assert (tiles(page)["Running"], tiles(page)["Waiting"]) == ("0requests", "0requests")
    with load(demo, 11):
        wait_for(lambda: demo.engine.stats.num_running == 8 and demo.engine.stats.num_waiting == 3)
        page.until(lambda: tiles(page)["Running"].startswith("8") and tiles(page)["Waiting"].startswith("3"))
        page.until(lambda: first_number(tiles(page)["Output"]) > 5)
        page.until(lambda: first_number(tiles(page)["First token"]) > 0 and first_number(tiles(page)["Cache hits"]) > 0)
        assert first_number(tiles(page)["Between tokens"]) > 0
        assert re.fullmatch(r"queue p95 \d[\d.]* m?s", page.all(".tile .more")[1].text.replace("\u00a0", " "))
        page.until(lambda: max(boxes(page).values()) == 8)
        chart = page.all(".chart svg")[0]
        assert chart.accessible_name == "Requests: running 8, waiting 3"
        assert page.all(".chart path.line")
        row = page.text("#replicas tbody tr").split("\t")
        assert row[:4] == ["0", "serving", "8", "3"]
        time.sleep(seconds_shown)
        page.size(1280, 1130)
        for theme in ("light", "dark"):
            page.prefer("prefers-color-scheme", theme)
            page.save(pictures / f"web_live_{theme}.png")
    wait_for(lambda: demo.engine.stats.num_running == 0)
    page.until(lambda: tiles(page)["Running"].startswith("0") and tiles(page)["Waiting"].startswith("0"))
    page.until(lambda: max(boxes(page).values()) == 0)


def test_the_tree_and_the_pools_are_those_of_the_cache(demo: EchoServer, page: Page) -> None:
    with load(demo, 5, tokens=4):
        pass
    wait_for(lambda: demo.engine.stats.num_running == 0)
    page.open(demo.url, "/#live")
    page.until(lambda: boxes(page))
    (report,) = demo.http.get("/cache_summary").json()["replicas"]
    assert boxes(page) == {node["id"]: node["requests"] for node in report["nodes"]}
    script = "return [...document.querySelectorAll('#tree rect title')].map(one => one.textContent)"
    assert sorted(int(text.split()[0]) for text in page.script(script)) == sorted(
        node["tokens"] for node in report["nodes"]
    )
    places = {
        int(node): (float(x), float(y), float(width), float(height))
        for node, x, y, width, height in page.script(
            "return [...document.querySelectorAll('#tree rect')].map("
            "one => [one.dataset.node, ...['x', 'y', 'width', 'height'].map(name => one.getAttribute(name))])"
        )
    }
    for node in report["nodes"]:
        if node["parent"]:
            x, y, _, height = places[node["id"]]
            left, top, wide, high = places[node["parent"]]
            assert x == pytest.approx(left + wide + 2)
            assert top <= y
            assert y + height <= top + high + 1e-6
    (pool,) = report["groups"]
    numbers = [int(one.replace(",", "")) for one in re.findall(r"[\d,]*\d", page.text(".pool .numbers"))]
    assert numbers == [pool["total"], pool["used"], pool["session"], pool["cached"], pool["free"]]
    assert sum(numbers[1:]) == numbers[0]
    assert "library" not in page.text("#live")
    page.all("#live details summary")[0].click()
    rows = page.all("#tree-table tbody tr")
    assert len(rows) == min(len(report["nodes"]), 40)


async def launch_two(config: ServerConfig) -> AsyncEngineClient:
    """Two echo engines in threads of this process."""

    async def start() -> CoreLink:
        return await launch_link(config, in_process=True, load=load_echo)

    replicas = [Replica(index, start, backoff=AT_ONCE) for index in range(2)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    return replicated_client(config, replicas, load_tokenizer(config))


def test_each_replica_has_a_row(page: Page) -> None:
    with serve_echo(launch=launch_two, model_path="echo:0.02", load_balance_method="round_robin") as server:
        page.open(server.url, "/#live")
        page.until(lambda: page.all("#replicas tbody tr"))
        rows = page.script("return [...document.querySelectorAll('#replicas tbody tr')].map(one => one.innerText)")
        assert [row.split("\t")[:2] for row in rows] == [["0", "serving"], ["1", "serving"]]


def test_the_state_of_a_lost_engine_is_shown(echo: EchoServer, page: Page) -> None:
    page.open(echo.url, "/#live")
    page.until(lambda: "serving" in page.text("#replicas"))
    echo.await_(echo.engine.close())
    page.until(lambda: "serving" not in page.text("#replicas"))
    (load,) = echo.http.get("/v1/loads").json()["loads"]
    assert page.text("#replicas .state") == load["state"]
    message = echo.http.get("/cache_summary").json()["error"]["message"]
    assert page.text("#live-note") == f"{message}; memory and tree are not shown."


def test_a_hanging_engine_hides_no_other_figures(echo: EchoServer, page: Page) -> None:
    page.open(echo.url)
    page.script(
        "const real = fetch; window.fetch = (url, {signal, ...others}) => String(url).endsWith('/cache_summary')"
        " ? new Promise((_, fail) => signal.addEventListener('abort', () => fail(signal.reason)))"
        " : real(url, {signal, ...others})"
    )
    page.find("tab-live").click()
    page.until(lambda: "serving" in page.text("#replicas"))
    assert page.text("#live-note") == "the engine does not answer; memory and tree are not shown."


def test_what_has_not_changed_stays(echo: EchoServer, page: Page) -> None:
    page.open(echo.url, "/#live")
    page.until(lambda: page.all("#replicas tbody tr"))
    page.script("window.kept = document.querySelector('#replicas tbody tr')")
    before = sum(one.path == "/ui/state" for one in page.requests())
    page.until(lambda: sum(one.path == "/ui/state" for one in page.requests()) >= before + 3)
    assert page.script("return window.kept.isConnected")


def test_nothing_is_asked_while_the_view_is_hidden(echo: EchoServer, page: Page) -> None:
    def polls() -> int:
        return sum(one.path == "/ui/state" for one in page.requests())

    page.open(echo.url)
    assert polls() == 0
    page.find("tab-live").click()
    page.until(lambda: polls() >= 2)
    page.find("tab-chat").click()
    before = polls()
    page.driver.execute_async_script("setTimeout(arguments[0], 2500)")
    assert polls() == before


def test_programs_that_compile_are_shown(echo: EchoServer, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The echo compiles nothing, so the answer says that it does."""
    page.open(echo.url)
    answered: dict[str, Any] = echo.http.get("/ui/state").json()
    answered["replicas"][0]["load"]["programs_left"] = 12
    page.script(
        "const real = fetch, told = arguments[0];"
        "window.fetch = (url, options) => String(url).endsWith('/ui/state')"
        " ? Promise.resolve(new Response(told)) : String(url).endsWith('/cache_summary')"
        " ? Promise.resolve(new Response('{\"replicas\": []}')) : real(url, options)",
        json.dumps(answered),
    )
    page.find("tab-live").click()
    page.until(lambda: tiles(page).get("Compiling") == "12programs left")
    assert "of 12 seen" in page.text(".tile.busy")


def test_no_rate_is_negative_after_a_replica_restarted(echo: EchoServer, page: Page) -> None:
    """Its output tokens count from 0 again, while those of prompts have grown by more elsewhere."""
    page.open(echo.url)
    answered: dict[str, Any] = echo.http.get("/ui/state").json()
    page.script(
        "const real = fetch, told = arguments[0]; let polls = 0;"
        "window.fetch = (url, options) => {"
        "  if (!String(url).endsWith('/ui/state')) return real(url, options);"
        "  polls += 1; told.seconds += 1;"
        "  told.replicas[0].prompt_tokens = 100 * polls;"
        "  told.replicas[0].generation_tokens = polls < 3 ? 5000 + polls : polls;"
        "  document.body.dataset.polls = polls;"
        "  return Promise.resolve(new Response(JSON.stringify(told)));"
        "}",
        answered,
    )
    page.find("tab-live").click()
    page.until(lambda: int(page.script("return document.body.dataset.polls ?? 0")) >= 5)
    assert tiles(page)["Output"] == "1tokens/s"


@pytest.mark.parametrize("part", [0.5, 0.95, 0.99])
def test_percentiles_are_those_of_the_values(echo: EchoServer, page: Page, part: float) -> None:
    """Values that are spread evenly over each bucket, against numpy's percentile of them."""
    bounds = [0.01, 0.02, 0.05, 0.1, 1.0]
    counts = [0, 400, 300, 200, 100, 0]
    values = np.concatenate(
        [
            np.linspace(low, high, count, endpoint=False)
            for low, high, count in zip([0.0, *bounds[:-1]], bounds, counts[:-1], strict=True)
        ]
    )
    page.open(echo.url)
    script = "const done = arguments[3]; import('/ui/charts.js').then(m => done(m.percentile(...arguments)))"
    found = page.driver.execute_async_script(script, bounds, counts, part)
    assert found == pytest.approx(np.quantile(values, part), rel=0.02)
    assert page.driver.execute_async_script(script, bounds, [0] * 6, part) is None
