"""How much of an agent's conversation the prefix cache finds, by the usage that a server reports.

An agent calls a tool in each turn and resends everything; its system prompt has a new billing line, the time of day, a
budget that grows, and an unmarked block in each call, as coding agents send them. Texts are made up, of the lengths of
a recorded conversation, since answers of a small model would end it.

    python benchmarks/agent_conversation.py --turns 30

What could be found at each call: the prompt of the call before it, without what changes. For the stored conversation
of `/v1/responses`, its reply too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from faults import Server

LEAST_SHARE = 0.95

TOOLS = [
    {"name": name, "description": f"{name} something in the workspace " * 6, "input_schema": {"type": "object"}}
    for name in ("read", "write", "search", "run")
]
WORDS = ("the", "of", "file", "line", "value", "test", "call", "name", "error", "fix", "change", "return", "list")


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def system(turn: int, rules: str) -> list[dict[str, Any]]:
    """The blocks of a system prompt; all but the rules are new in each call."""
    budgets = "\n".join(
        f"<total_tokens>{100_000 - 700 * spent} tokens left</total_tokens>" for spent in range(turn + 1)
    )
    return [
        {"type": "text", "text": f"x-anthropic-billing-header: version=1; cch={turn * 7919 % 65536:05x};"},
        {"type": "text", "text": f"You work on a program.\nCurrent time: 10:{turn:02}:{turn * 17 % 60:02}\n{rules}"},
        {"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": f"Open files: {turn % 5}"},
        {"type": "text", "text": budgets},
    ]


def messages_share(url: str, turns: int, chance: random.Random) -> float:
    """The share that is found of an agent's conversation over `/v1/messages`."""
    rules, conversation = words(chance, 600), []
    found = could = before = 0
    conversation.append({"role": "user", "content": "Fix the test. " + words(chance, 60)})
    for turn in range(turns):
        body = {"model": "default", "max_tokens": 16, "system": system(turn, rules), "tools": TOOLS}
        usage = post(f"{url}/v1/messages", {**body, "messages": conversation})["usage"]
        found, could = found + usage["cache_read_input_tokens"], could + before
        before = usage["input_tokens"] + usage["cache_read_input_tokens"]
        call = {"type": "tool_use", "id": f"t{turn}", "name": "read", "input": {"path": words(chance, 3)}}
        said = [{"type": "text", "text": words(chance, 15)}, call]
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": words(chance, 90)}
        conversation += [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    return found / could


def responses_share(url: str, turns: int, chance: random.Random) -> float:
    """The share that is found of a stored conversation over `/v1/responses`."""
    body: dict[str, Any] = {"instructions": words(chance, 600), "max_output_tokens": 24}
    found = could = before = 0
    for _ in range(turns):
        response = post(f"{url}/v1/responses", {**body, "input": words(chance, 90)})
        usage = response["usage"]
        found, could = found + usage["input_tokens_details"]["cached_tokens"], could + before
        before = usage["input_tokens"] + usage["output_tokens"]
        body["previous_response_id"] = response["id"]
    return found / could


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; default: one of the embedded model on Torch")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    if options.url is not None:
        report_shares(options.url, options.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(["--model-path", "demo", "--backend", "torch"], Path(folder) / "log")
        try:
            asyncio.run(server.ready())
            report_shares(server.url, options.turns)
        finally:
            server.end()


def report_shares(url: str, turns: int) -> None:
    for name, share in (("/v1/messages", messages_share), ("/v1/responses", responses_share)):
        found = share(url, turns, random.Random(1))
        print(f"{name}: {found:.1%} of what could be found was cached")
        if found < LEAST_SHARE:
            raise SystemExit(f"{name}: less than {LEAST_SHARE:.0%}")


if __name__ == "__main__":
    main()
