"""Files for results: a path that cannot be written is known before the work, and a full disk is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.streaming_server import FakeServer, serve_in_thread

from sglang_jax.cli.bench.accuracy import bench_accuracy
from sglang_jax.cli.bench.commands import bench_offline, bench_serving
from sglang_jax.cli.eval.commands import eval_gsm8k
from sglang_jax.cli.main import run
from tpu.check import check

COMMANDS = [
    (bench_serving, ["--port", "1"], "--output-file"),
    (bench_serving, ["--port", "1"], "--plot"),
    (bench_offline, ["--model-path", "nowhere"], "--result-filename"),
    (bench_accuracy, ["--model-path", "nowhere", "--task", "nothing"], "--result-filename"),
    (eval_gsm8k, ["--base-url", "http://127.0.0.1:1", "--data", "questions.jsonl", "--num-shots", "0"], "--json"),
    (check, ["nowhere", "--topology", "v6e-1"], "--json"),
]


@pytest.mark.parametrize(("command", "words", "flag"), COMMANDS)
@pytest.mark.parametrize(
    ("file", "reason"), [("no/x", "a folder that does not exist"), (".", "is a directory|is a folder")]
)
def test_a_wrong_path_ends_the_command_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: Any, words: list[str], flag: str, file: str, reason: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text('{"question": "a", "answer": "#### 1"}')
    assert run(command, "x", [*words, flag, file]) == 2
    told = capsys.readouterr().err
    assert flag in told
    assert any(each in told for each in reason.split("|"))
    assert told.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_after_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_in_thread(FakeServer()) as server:
        words = ["--port", str(server.port), "--num-prompts", "1", "--random-output-len", "2"]
        assert run(bench_serving, "x", [*words, "--output-file", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "Output token throughput" in told.out
    assert told.err == "Error: --output-file /dev/full cannot be written: No space left on device\n"
