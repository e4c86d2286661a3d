"""GuideLLM: a short benchmark of chats and of completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import CAPITAL, KEY, MODEL, URL, check, main

REQUESTS = 4


def benchmark(route: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text((json.dumps({"prompt": CAPITAL}) + "\n") * REQUESTS)
        backend = f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={route},max_tokens=8"
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            *("--backend", backend),
            *("--profile", "kind=synchronous"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={report}"),
            "--disable-console",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        [result] = json.loads(report.read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals


@check
def chat() -> None:
    benchmark("/v1/chat/completions")


@check
def completions() -> None:
    benchmark("/v1/completions")


@check
def responses() -> None:
    benchmark("/v1/responses")


main()
