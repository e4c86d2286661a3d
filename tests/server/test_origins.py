"""CORS: which web pages may use the server, as browsers check it."""

from __future__ import annotations

import pytest
from helpers.echo_server import EchoServer, serve_echo

PAGE = "https://chat.example.org"
LOCAL_PAGE = "http://localhost:3000"
ALLOWED = {"allowed_origins": f"{PAGE}, {LOCAL_PAGE}"}
BODY = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


def headers_of(server: EchoServer, path: str, method: str, page: str, sent: dict[str, str]) -> dict[str, str] | None:
    """The answer's headers that a page's script can read, by the Fetch standard: a preflight where the content type
    or key requires one, then the request. None if the browser blocks the script."""
    marks = {"Origin": page, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    asked = sorted(name.lower() for name in sent)
    if method not in ("GET", "POST") or asked:
        preflight = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": ",".join(asked)}
        answer = server.http.options(path, headers=marks | preflight)
        names = {name.strip().lower() for name in answer.headers.get("access-control-allow-headers", "").split(",")}
        methods = answer.headers.get("access-control-allow-methods", "")
        if not (answer.is_success and shared(answer.headers, page) and names >= set(asked) and method in methods):
            return None
    answer = server.http.request(method, path, headers=marks | sent, json=BODY if method == "POST" else None)
    if not shared(answer.headers, page):
        return None
    readable = {name.strip().lower() for name in answer.headers.get("access-control-expose-headers", "").split(",")}
    return {name: value for name, value in answer.headers.items() if name in readable} | {
        "status": str(answer.status_code)
    }


def shared(headers: object, page: str) -> bool:
    return headers.get("access-control-allow-origin") in (page, "*")  # type: ignore[attr-defined]


JSON = {"Content-Type": "application/json"}


def test_an_allowed_page_may_chat_and_read_the_answer() -> None:
    with serve_echo(**ALLOWED) as server:
        for page in (PAGE, LOCAL_PAGE):
            found = headers_of(server, CHAT, "POST", page, JSON)
            assert found is not None
            assert found["status"] == "200"
            assert found["x-request-id"]
        for page in ("https://evil.example", "http://chat.example.org", "http://localhost:3001", "null"):
            assert headers_of(server, CHAT, "POST", page, JSON) is None
            assert headers_of(server, "/v1/models", "GET", page, {}) is None


def test_a_key_is_required_after_the_preflight_and_the_401_can_be_read() -> None:
    with serve_echo(api_key="k", **ALLOWED) as server:
        with_key = JSON | {"Authorization": "Bearer k"}
        assert headers_of(server, CHAT, "POST", PAGE, with_key)["status"] == "200"
        assert headers_of(server, CHAT, "POST", PAGE, JSON)["status"] == "401"
        assert headers_of(server, CHAT, "POST", "https://evil.example", with_key) is None


def test_streams_can_be_read() -> None:
    with serve_echo(**ALLOWED) as server:
        answer = server.http.post(CHAT, json=BODY | {"stream": True}, headers={"Origin": PAGE})
        assert shared(answer.headers, PAGE)
        assert answer.headers["vary"].lower() == "origin"  # a cache in between keeps the answers of two pages separate
        assert answer.text.endswith("data: [DONE]\n\n")


def test_all_pages_may_be_allowed() -> None:
    with serve_echo(allowed_origins="*") as server:
        assert headers_of(server, CHAT, "POST", "https://any.example", JSON)["status"] == "200"
        assert headers_of(server, "/v1/sessions/none", "DELETE", "https://any.example", {})["status"] == "404"


@pytest.mark.parametrize("options", [{}, {"api_key": "k"}, {"host": "0.0.0.0"}])
def test_by_default_pages_are_refused_and_the_preflight_says_why(options: dict[str, str]) -> None:
    with serve_echo(**options) as server:
        assert headers_of(server, CHAT, "POST", PAGE, JSON | {"Authorization": "Bearer k"}) is None
        answer = server.http.options(CHAT, headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert PAGE in answer.json()["error"]["message"]
        assert "--allowed-origins" in answer.json()["error"]["message"]


def test_requests_without_a_preflight_are_served_only_for_allowed_pages() -> None:
    with serve_echo(**ALLOWED) as server:
        for page, status in ((PAGE, 200), ("https://evil.example", 403)):
            found = server.http.get("/flush_cache", headers={"Origin": page, "Sec-Fetch-Site": "cross-site"})
            assert found.status_code == status
        assert server.http.get("/flush_cache", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
