"""Rows and files that go into a cluster come out answered."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from helpers.ray_cluster import Nodes, launch_and_die, launcher

from sglang_jax.batch.options import BatchConfig, RayOptions
from sglang_jax.batch.ray import ANSWER_COLUMNS, Answering, answer_rows
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.errors import BatchError

ONE = RayOptions(max_replicas=1, rows_per_batch=8, rows_per_file=8)


@pytest.fixture
def node(cluster: Nodes) -> str:
    return cluster.add(num_cpus=2)


def echo(source: Path | str, output: Path | str, started: Path, options: RayOptions = ONE, **batch: object) -> int:
    config = BatchConfig(input=source, output=output, **batch)
    return run_ray_batch(config, options, EngineConfig(model_path="echo"), launch=launcher(started))


def finish(source: Path, output: Path) -> int:
    """Runs the same job again; an engine that starts ends the run with an error."""
    config = BatchConfig(input=source, output=output)
    return run_ray_batch(config, ONE, EngineConfig(model_path="echo"), launch=launch_and_die)


def test_rows_keep_their_columns_and_get_answers_or_errors(node: str, started: Path) -> None:
    rows = [{"document": f"d{row}", "prompt": f"text {row}", "max_tokens": 20} for row in range(40)]
    rows[7] = {"document": "d7", "prompt": None, "max_tokens": 20}
    rows[9] = {"document": "d9", "prompt": "text 9", "max_tokens": -1}
    answering = Answering(config=ServerConfig(model_path="echo"), launch=launcher(started))
    answered = answer_rows(ray.data.from_items(rows), answering, ONE, columns=["max_tokens"])
    by_document = {row["document"]: row for row in answered.take_all()}
    assert len(by_document) == 40
    assert set(by_document["d0"]) == {"document", "prompt", "max_tokens", *ANSWER_COLUMNS.names}
    for number, row in enumerate(rows):
        got = by_document[row["document"]]
        if number in (7, 9):
            assert got["answer"] is None
            assert got["response"] is None
        else:
            assert got["answer"] == row["prompt"]
            assert got["error"] is None
            assert json.loads(got["response"])["choices"][0]["text"] == row["prompt"]
            assert (got["prompt_tokens"], got["output_tokens"]) == (len(row["prompt"]), len(row["prompt"]) + 1)
    assert by_document["d7"]["error_code"] == "missing_field"
    assert "max_tokens" in by_document["d9"]["error"]


def test_rows_may_be_messages_or_whole_requests(node: str, started: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    request = {"custom_id": "a", "url": "/v1/chat/completions", "body": json.dumps(body)}
    answering = Answering(
        config=ServerConfig(model_path="echo"), defaults='{"max_tokens": 9}', launch=launcher(started)
    )
    whole = answer_rows(ray.data.from_items([request]), answering, ONE).take_all()
    plain = answer_rows(ray.data.from_items([body]), answering, ONE).take_all()
    assert [row["answer"] for row in whole + plain] == ["user: hel"[:9]] * 2


def test_answers_of_a_folder_have_file_names_and_line_numbers(
    node: str, tmp_path: Path, started: Path, output: Path, read_output
) -> None:
    folder = tmp_path / "input"
    (folder / "more").mkdir(parents=True)
    separators = "one\u2028two\u0085three"
    first = json.dumps({"prompt": separators}, ensure_ascii=False)
    (folder / "a.jsonl").write_text(first + "\n\n" + '{"prompt": "a3"}')
    with gzip.open(folder / "more" / "b.jsonl.gz", "wt") as file:
        file.write('{"prompt": "b1"}\n{"prompt": "b2", "custom_id": "mine"}\nnot a request\n')
    assert echo(folder, output, started, defaults='{"max_tokens": 99}') == 1
    answers, errors = read_output()
    assert {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answers} == {
        "a.jsonl:line-1": separators,
        "a.jsonl:line-3": "a3",
        "more/b.jsonl.gz:line-1": "b1",
        "mine": "b2",
    }
    assert [line["error"]["code"] for line in errors] == ["malformed_json"]


def test_parquet_in_and_out(node: str, tmp_path: Path, started: Path) -> None:
    source, output = tmp_path / "rows.parquet", tmp_path / "answers.parquet"
    prompts = [f"row {row}" for row in range(50)]
    pq.write_table(pa.table({"prompt": prompts, "max_tokens": [30] * 50}), source, row_group_size=7)
    assert echo(source.as_uri(), output.as_uri(), started) == 0
    rows = pa.concat_tables([pq.read_table(path) for path in output.iterdir()]).to_pylist()
    assert {row["custom_id"]: row["text"] for row in rows} == {
        f"line-{number}": prompt for number, prompt in enumerate(prompts, 1)
    }
    assert {row["status_code"] for row in rows} == {200}


def test_a_run_resumes_only_with_the_same_input_and_options(
    node: str, tmp_path: Path, started: Path, output: Path, read_output
) -> None:
    source = tmp_path / "input.jsonl"
    source.write_text('{"prompt": "a"}\n')
    assert echo(source, output, started) == 0
    assert finish(source, output) == 0
    with pytest.raises(BatchError, match="was started with --defaults unset"):
        echo(source, output, started, defaults='{"max_tokens": 1}')
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(BatchError, match="the input is not the one"):
        echo(source, output, started)
    with pytest.raises(BatchError, match="has files that no run"):
        echo(source, tmp_path, started)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ordered": True}, "--ordered is not supported with --engine ray"),
        ({"error_file": "errors.jsonl"}, "--error-file is not supported with --engine ray"),
        ({"defaults": '{"stream": true}'}, "--defaults .* may only contain fields that lines can share"),
    ],
)
def test_options_incompatible_with_ray_are_refused(cluster: Nodes, tmp_path, started, options, message) -> None:
    with pytest.raises(BatchError, match=message):
        echo(tmp_path / "input.jsonl", tmp_path / "answers", started, **options)


def test_unreadable_input_and_failed_starts_are_errors(node: str, tmp_path: Path, started: Path) -> None:
    with pytest.raises(BatchError, match=r"--input .*absent.jsonl cannot be read"):
        echo(tmp_path / "absent.jsonl", tmp_path / "answers", started)
    source = tmp_path / "input.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with pytest.raises(BatchError, match="no checkpoint at 'missing'"):
        run_ray_batch(
            BatchConfig(input=source, output=tmp_path / "answers"),
            ONE,
            EngineConfig(model_path="missing"),
            launch=launcher(started),
        )


def test_a_missing_cluster_is_an_error_at_once(tmp_path: Path) -> None:
    """In a separate process: this one is connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "sglang_jax", "batch", "--engine", "ray", "--address", f"127.0.0.1:{port}"]
    files = ["--input", str(tmp_path / "input.jsonl"), "--output", str(tmp_path / "answers")]
    ended = subprocess.run([*command, *files], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert f"Error: cannot connect to Ray at 127.0.0.1:{port}: [Errno 111] Connection refused" in ended.stderr
