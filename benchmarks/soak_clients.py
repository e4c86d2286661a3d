"""The clients of `soak_server.py`: ordinary requests with known answers, and all kinds of client errors.

An operation returns an empty text on success, or an error code of the server, or a description of the fault.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from malformed import MalformedRequest

JSON = {"Content-Type": "application/json"}
PATIENCE = 300.0
"""Seconds that a client waits for more of an answer; longer than any fault may last."""

CLIENT_TIMEOUT = 5.0
"""`--client-timeout` of the server: a client that reads nothing for so long is disconnected."""

GREEDY = {"temperature": 0.0}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards", "boil", "green", "soup"]

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": WORDS}, "times": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "times"],
    "additionalProperties": False,
}


def _follows_schema(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"word", "times"} and found["word"] in WORDS and 0 <= found["times"] <= 99


PATTERN = "(fox|dog){1,3} [0-9]{2}"
GRAMMARS: list[tuple[str, str, Callable[[str], bool]]] = [
    ("regex", PATTERN, lambda text: re.fullmatch(PATTERN, text) is not None),
    ("json_schema", json.dumps(SCHEMA), _follows_schema),
    ("ebnf", 'root ::= "yes" | "no" | "perhaps"', {"yes", "no", "perhaps"}.__contains__),
]
"""Name in `sampling_params`, grammar, and whether a text that has ended follows it."""


@dataclass(frozen=True)
class Outcome:
    """One operation with its start and end times (monotonic); `error`: see above."""

    name: str
    begin: float
    end: float
    error: str


class Oracle:
    """Known answers: the first answer to each request. Later answers must equal it, whatever runs, is cached, or was
    killed."""

    def __init__(self) -> None:
        self._answers: dict[str, object] = {}
        self._lock = threading.Lock()

    def check(self, request: str, answer: object) -> str:
        """`request` identifies the request, independent of its format."""
        with self._lock:
            first = self._answers.setdefault(request, answer)
        return "" if first == answer else f"another answer to {request[:120]}"


class Client:
    """One of the clients. `admin_key` is for operators' routes.

    **Arguments:** `malformed`: an endless supply of malformed requests for all clients.
    """

    def __init__(
        self, port: int, seed: int, oracle: Oracle, malformed: Iterator[MalformedRequest], lock: threading.Lock
    ) -> None:
        self._port = port
        self._draw = random.Random(seed)
        self._oracle = oracle
        self._malformed = malformed
        self._malformed_lock = lock
        self._number = 0
        self._seed = seed

    def step(self) -> Outcome:
        """Does one random operation."""
        return self.do(self._draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])

    def do(self, operation: Callable[[Client], str]) -> Outcome:
        """Does this operation."""
        begin = time.monotonic()
        try:
            error = operation(self)
        except (OSError, http.client.HTTPException) as broken:
            error = f"{type(broken).__name__}: {broken}"
        return Outcome(operation.__name__.strip("_"), begin, time.monotonic(), error)

    # -- Requests whose answers are known ------------------------------------------------------------------------------

    def completion(self) -> str:
        """Text, greedy or with a seed; whole or streamed."""
        sampling = self._sampling()
        body = {"prompt": self._prompt(), "max_tokens": self._draw.choice((1, 8, 24, 64)), **sampling}
        if self._draw.random() < 0.5:
            return self._known("/v1/completions", body, lambda answer: answer["choices"][0]["text"])
        return self._stream("/v1/completions", body, lambda event: event["choices"][0]["text"])

    def chat(self) -> str:
        """A conversation."""
        messages = [{"role": "user", "content": self._prompt()}]
        body = {"messages": messages, "max_tokens": self._draw.choice((1, 8, 24)), **self._sampling()}
        if self._draw.random() < 0.5:
            return self._known("/v1/chat/completions", body, lambda answer: answer["choices"][0]["message"]["content"])
        return self._stream("/v1/chat/completions", body, _chat_delta)

    def generate(self) -> str:
        """The native route, with cumulative or incremental streams."""
        sampling = {"max_new_tokens": self._draw.choice((8, 32, 96)), "ignore_eos": True, **self._sampling()}
        body = {"text": self._prompt(), "sampling_params": sampling}
        if self._draw.random() < 0.3:
            return self._known("/generate", body, lambda answer: answer["text"])
        if self._draw.random() < 0.5:
            return self._stream("/generate", {**body, "incremental_output": True}, lambda event: event["text"])
        return self._stream("/generate", body, lambda event: event["text"], repeats=True)

    def logprobs(self) -> str:
        """Scores of a prompt and of the output."""
        body = {
            "text": self._prompt(),
            "sampling_params": {"max_new_tokens": 8, **GREEDY},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": self._draw.choice((0, 5, 20)),
        }
        return self._known("/generate", body, lambda answer: answer["output_ids"])

    def long_prompt(self) -> str:
        """A prompt of several chunks."""
        body = {"prompt": self._prompt() * self._draw.choice((4, 8)), "max_tokens": 4, **GREEDY}
        return self._known("/v1/completions", body, lambda answer: answer["choices"][0]["text"])

    def many(self) -> str:
        """Several prompts and completions in one request."""
        prompts = [self._prompt() for _ in range(self._draw.choice((2, 5)))]
        body = {"prompt": prompts, "n": 2, "seed": 7, "max_tokens": 6}
        return self._known("/v1/completions", body, lambda answer: [choice["text"] for choice in answer["choices"]])

    def batch(self) -> str:
        """A hundred prompts at once: the batch in the background."""
        body = {
            "text": [self._prompt() for _ in range(100)],
            "sampling_params": {"max_new_tokens": 12, **GREEDY},
        }
        return self._known("/generate", body, lambda answer: [one["text"] for one in answer])

    def tokens(self) -> str:
        """Tokenizes and detokenizes."""
        text = self._prompt()
        status, answer = self._post("/tokenize", {"prompt": text})
        if status != 200:
            return _code(status, answer)
        status, answer = self._post("/detokenize", {"tokens": json.loads(answer)["tokens"]})
        if status != 200:
            return _code(status, answer)
        return "" if json.loads(answer)["text"] == text else "text changed on its way to tokens and back"

    def structured(self) -> str:
        """An output under one of a few grammars: a finished one follows it."""
        name, grammar, follows = self._draw.choice(GRAMMARS)
        body = {"text": self._prompt(), "sampling_params": {"max_new_tokens": 48, name: grammar, **self._sampling()}}
        status, content = self._post("/generate", body)
        if status != 200:
            return _code(status, content)
        answer = json.loads(content)
        if answer["meta_info"]["finish_reason"]["type"] != "length" and not follows(answer["text"]):
            return f"not what {name} asks for: {answer['text'][:60]}"
        return self._oracle.check(json.dumps(body), answer["text"])

    def tools(self) -> str:
        """A tool that must be called, with arguments of its schema."""
        body = {
            "messages": [{"role": "user", "content": self._prompt()}],
            "tools": [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}],
            "tool_choice": "required",
            "max_tokens": 64,
            **self._sampling(),
        }
        status, content = self._post("/v1/chat/completions", body)
        if status != 200:
            return _code(status, content)
        [choice] = json.loads(content)["choices"]
        calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
        if choice["finish_reason"] != "length" and not (calls and all(map(_follows_schema, calls))):
            return f"not the call that was asked for: {calls}"
        return self._oracle.check(json.dumps(body), [choice["message"]["content"], calls])

    def session(self) -> str:
        """A conversation that sends only new tokens; some are left open until they time out."""
        status, content = self._post("/open_session", {"streaming": True, "timeout": 20.0})
        if status != 200:
            return _code(status, content)
        session, so_far = json.loads(content), "turns: "
        for turn in range(self._draw.choice((2, 4))):
            new = f" Turn {turn}:" if turn else self._prompt()
            sampling = {"max_new_tokens": 8, "ignore_eos": True, **GREEDY}
            body = {"text": new, "sampling_params": sampling, "session_params": {"id": session}}
            status, content = self._post("/generate", body)
            if status != 200:
                return _code(status, content)
            so_far += f"{new} "
            output = json.loads(content)["output_ids"]
            if error := self._oracle.check(so_far, output):
                return error
            so_far += f"{output} "
        if self._draw.random() < 0.3:
            return ""
        status, content = self._post("/close_session", {"session_id": session})
        return "" if status == 200 else _code(status, content)

    def housekeeping(self) -> str:
        """Requests of load balancers and dashboards."""
        path = self._draw.choice(("/health", "/readyz", "/livez", "/v1/models", "/model_info"))
        status, answer = self._ask("GET", path)
        return "" if status == 200 else f"{path}: {_code(status, answer)}"

    # -- Client errors
    # -------------------------------------------------------------------------------------------------

    def leaves_early(self) -> str:
        """Sends a request, and leaves before any answer."""
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps(self._long_body()).encode(), JSON)
        time.sleep(self._draw.choice((0.0, 0.05, 0.5)))
        connection.close()
        return ""

    def leaves(self) -> str:
        """Reads some events of a stream, and leaves."""
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps({**self._long_body(), "stream": True}).encode(), JSON)
        response = connection.getresponse()
        if response.status != 200:
            return _code(response.status, response.read())
        lines = [response.readline() for _ in range(self._draw.choice((1, 5, 40)))]
        connection.close()
        return _error_in(lines)

    def aborts(self) -> str:
        """Aborts its own stream by its id."""
        self._number += 1
        rid = f"soak-{self._seed}-{self._number}"
        sampling = {"max_new_tokens": 400, "ignore_eos": True}
        body = {"text": self._prompt(), "rid": rid, "stream": True, "sampling_params": sampling}
        connection = self._connection()
        connection.request("POST", "/generate", json.dumps(body).encode(), JSON)
        response = connection.getresponse()
        if response.status != 200:
            return _code(response.status, response.read())
        lines = [response.readline() for _ in range(self._draw.choice((1, 9)))]
        status, answer = self._post("/abort_request", {"rid": rid})
        lines += response.readlines()
        connection.close()
        if status != 200:
            return _code(status, answer)
        if error := _error_in(lines):
            return error
        last = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")][-1]
        finish = last["meta_info"]["finish_reason"]
        return "" if finish and finish["type"] in ("abort", "length") else f"an aborted stream ended with {finish}"

    def bad_input(self) -> str:
        """Something malformed."""
        with self._malformed_lock:
            request = next(self._malformed)
        if request.raw:
            with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE) as raw:
                raw.sendall(request.body)
                raw.shutdown(socket.SHUT_WR)
                received = raw.recv(65536)
            status = int(received.split()[1]) if received.startswith(b"HTTP/1.1 ") else 0
            return f"malformed request {request.number}: {status}" if status >= 500 else ""
        connection = self._connection()
        headers: dict[str, Any] = {name: value.encode("latin-1") for name, value in request.headers.items()}
        connection.request(request.method, request.path, request.body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return _code(response.status, content) if response.status >= 500 else _error_in(content.splitlines())

    def stalls(self) -> str:
        """Asks for a long stream, and pauses reading. It may be disconnected if the pause exceeds the client
        timeout: how much output waits by then depends on how busy the engine is."""
        sampling = {"max_new_tokens": 700, "ignore_eos": True}
        body = {"text": "a", "stream": True, "return_logprob": True, "top_logprobs_num": 20}
        content = json.dumps({**body, "sampling_params": sampling}).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        long = self._draw.random() < 0.5
        with socket.socket() as connection:
            if long:  # so that little of the answer is buffered on this side
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(PATIENCE)
            connection.connect(("127.0.0.1", self._port))
            connection.sendall(f"{head}{len(content)}\r\n\r\n".encode() + content)
            received = connection.recv(4096)
            time.sleep(CLIENT_TIMEOUT * (4.0 if long else 0.3))
            try:
                while more := connection.recv(65536):
                    received = received[-65536:] + more
            except ConnectionResetError:
                return "" if long else "a client that paused for less than it may was let go"
        whole = long or b"data: [DONE]" in received
        return _error_in(received.splitlines()) or ("" if whole else "a stream without an end")

    def half_a_head(self) -> str:
        """Starts a request and abandons it."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
            time.sleep(self._draw.choice((0.1, 2.0)))
        return ""

    def slow_body(self) -> str:
        """Sends a body in small pieces; it is answered anyway."""
        body = json.dumps({"prompt": self._prompt(), "max_tokens": 2, **GREEDY}).encode()
        connection = self._connection()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        for place in range(0, len(body), 32):
            connection.send(body[place : place + 32])
            time.sleep(0.02)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        return "" if response.status == 200 else _code(response.status, answer)

    # ------------------------------------------------------------------------------------------------------------------

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)

    def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request(method, path, body, JSON)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return self._ask("POST", path, json.dumps(body).encode())

    def _prompt(self) -> str:
        """One of a few hundred, so that prompts hit the cache and answers repeat."""
        which = random.Random(self._draw.randrange(150))
        return f"Story {which.randrange(12)}: " + " ".join(which.choices(WORDS, k=which.choice((3, 10, 40))))

    def _sampling(self) -> dict[str, Any]:
        return GREEDY if self._draw.random() < 0.6 else {"seed": self._draw.randrange(3), "temperature": 0.8}

    def _long_body(self) -> dict[str, Any]:
        return {"prompt": self._prompt(), "max_tokens": 500, "ignore_eos": True}

    def _known(self, path: str, body: dict[str, Any], said: Callable[[Any], object]) -> str:
        status, answer = self._post(path, body)
        if status != 200:
            return _code(status, answer)
        return self._oracle.check(f"{path} {json.dumps(body)}", said(json.loads(answer)))

    def _stream(self, path: str, body: dict[str, Any], said: Callable[[Any], str], *, repeats: bool = False) -> str:
        status, answer = self._post(path, {**body, "stream": True})
        lines = answer.splitlines()
        if status != 200:
            return _code(status, answer)
        if error := _error_in(lines):
            return error
        if not lines or b"data: [DONE]" not in lines[-2:]:
            return "a stream without an end"
        parts = [said(json.loads(line[6:])) for line in lines if line.startswith(b"data: {")]
        asked = {name: value for name, value in body.items() if name != "incremental_output"}
        return self._oracle.check(f"{path} {json.dumps(asked)}", parts[-1] if repeats else "".join(parts))


def _chat_delta(event: Any) -> str:
    return "".join(choice["delta"].get("content", "") for choice in event["choices"])


def _code(status: int, answer: bytes) -> str:
    try:
        return f"{status} {json.loads(answer)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{status} {answer[:100]!r}"


def _error_in(lines: list[bytes]) -> str:
    """The error that a stream ended with, if any."""
    for line in lines:
        if line.startswith(b'data: {"error"'):
            return f"500 {json.loads(line[6:])['error']['code']}"
    return ""


WEIGHTS: dict[Callable[[Client], str], int] = {
    Client.completion: 20,
    Client.chat: 12,
    Client.generate: 12,
    Client.logprobs: 5,
    Client.long_prompt: 5,
    Client.many: 4,
    Client.tokens: 4,
    Client.structured: 5,
    Client.tools: 3,
    Client.session: 4,
    Client.housekeeping: 6,
    Client.leaves_early: 6,
    Client.leaves: 6,
    Client.aborts: 5,
    Client.bad_input: 10,
    Client.stalls: 1,
    Client.half_a_head: 2,
    Client.slow_body: 2,
}
"""Operations of a client, and their frequencies."""
