"""The page at `/` as a client of the server sees it: who gets it, what it may load, and what a key protects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from helpers.echo_server import EchoServer, serve_echo

import sglang_jax.server
from sglang_jax.server.web_ui import POLICY

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FILES = sorted(path.name for path in Path(sglang_jax.server.__file__).with_name("web").iterdir())
KEY = {"Authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    ("accept", "page"),
    [
        (BROWSER["Accept"], True),
        ("TEXT/HTML", True),
        ("application/json, text/html;q=0.1", True),
        ("text/html;q=0", False),
        ("text/html; q=0.0, */*", False),
        ("*/*", False),
        ("application/json", False),
        ("text/*", False),
    ],
)
def test_only_clients_that_name_html_get_the_page(server: EchoServer, accept: str, page: bool) -> None:
    answer = server.http.get("/", headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == ("text/html; charset=utf-8" if page else "application/json")
    assert answer.text.startswith("<!doctype html>") if page else answer.json()["model"] == "echo-model"


def test_head_has_the_headers_of_get(server: EchoServer) -> None:
    for headers in (BROWSER, {"Accept": "*/*"}):
        got, told = (server.http.request(method, "/", headers=headers).headers for method in ("GET", "HEAD"))
        assert [told[name] for name in ("content-type", "content-length")] == [
            got[name] for name in ("content-type", "content-length")
        ]


def test_the_page_loads_only_files_of_this_server(server: EchoServer) -> None:
    page = server.http.get("/", headers=BROWSER)
    assert page.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    assert "*" not in POLICY
    assert page.headers["vary"] == "Accept"
    linked = set(re.findall(r'(?:src|href)="(?!#|docs")([^"]+)"', page.text))
    assert linked == {f"ui/{name}" for name in FILES if name.endswith((".css", ".svg")) or name == "main.js"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?! type=\"module\" src=)", page.text)
    imported = {"main.js"}
    for name in FILES:
        file = server.http.get(f"/ui/{name}")
        if name == "index.html":
            assert file.status_code == 404
            continue
        assert file.status_code == 200
        for header, value in (("x-content-type-options", "nosniff"), ("referrer-policy", "no-referrer")):
            assert file.headers[header] == page.headers[header] == value
        assert not re.search(r"@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|eval\(", file.text)
        assert not re.search(r"https?://(?!www\.w3\.org/)[a-z]", file.text)
        imported |= set(re.findall(r'from "\./([\w.]+)"', file.text))
    assert imported == {name for name in FILES if name.endswith(".js")}


def test_a_file_that_the_browser_has_is_not_sent_again(server: EchoServer) -> None:
    tag = server.http.get("/ui/main.js").headers["etag"]
    again = server.http.get("/ui/main.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.get("/ui/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui", "/ui/__init__.py"])
def test_no_other_file_can_be_read(server: EchoServer, path: str) -> None:
    assert server.http.get(path, headers=BROWSER).status_code == 404


def test_the_page_needs_no_key_and_its_figures_do(server: EchoServer) -> None:
    with serve_echo(api_key="sesame", served_model_name="secret-name") as locked:
        http = locked.http
        assert http.get("/", headers=BROWSER).content == server.http.get("/", headers=BROWSER).content
        assert http.get("/ui/main.js").status_code == 200
        for path in ("/", "/ui/state", "/ui/nothing", "/cache_summary", "/v1/models"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers=KEY).status_code == (404 if path == "/ui/nothing" else 200)
        assert http.post("/", headers=BROWSER).status_code == 401
    with serve_echo(api_key="sesame", admin_api_key="operator") as locked:
        assert locked.http.get("/ui/state", headers=KEY).status_code == 403
        assert locked.http.get("/ui/state", headers={"Authorization": "Bearer operator"}).status_code == 200


def test_the_figures_follow_the_requests(server: EchoServer) -> None:
    def state() -> dict[str, Any]:
        answer: dict[str, Any] = server.http.get("/ui/state").json()
        return answer

    before = state()
    server.events("/v1/completions", {"prompt": "abcdef", "max_tokens": 6})
    after = state()
    assert (after["model"], after["draining"]) == ("echo-model", False)
    assert after["seconds"] > before["seconds"]
    assert [one["load"]["state"] for one in after["replicas"]] == ["serving"]
    for name, most in (("first_token", 1), ("inter_token", 5)):
        assert len(after[name]["counts"]) == len(after[name]["bounds"]) + 1
        assert 0 < sum(after[name]["counts"]) - sum(before[name]["counts"]) <= most


def test_a_server_without_the_page() -> None:
    with serve_echo(disable_web_ui=True) as server:
        assert server.http.get("/", headers=BROWSER).json()["model"] == "echo"
        assert server.http.get("/ui/main.js").status_code == 404
        assert server.http.get("/ui/state").status_code == 404
        assert "/ui/state" not in server.http.get("/openapi.json").json()["paths"]
