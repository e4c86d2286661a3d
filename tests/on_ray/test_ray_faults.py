"""A run on a cluster whose engines, actors and nodes are lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ray_cluster import FATAL, Nodes, launch_and_die, launcher, meanwhile, starts, until

from sglang_jax.batch.options import BatchConfig, RayOptions
from sglang_jax.batch.ray.run import run_ray_batch
from sglang_jax.config import EngineConfig
from sglang_jax.errors import BatchError

SMALL = {"rows_per_batch": 8, "batches_per_replica": 4, "rows_per_file": 16}
CORE_KILLER = 258
"""Token with which a prompt ends the echo engine's process."""


def plain_lines(count: int) -> list[str]:
    return [
        json.dumps({"custom_id": f"row {row}", "prompt": f"this is {row}!", "max_tokens": 40}) for row in range(count)
    ]


def texts(answers: list[dict]) -> dict[str, str]:
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in answers}


def test_rows_of_a_killed_node_are_answered_elsewhere(cluster: Nodes, tmp_path, started, output, read_output) -> None:
    for _ in range(3):
        cluster.add(num_cpus=2)
    (tmp_path / "input.jsonl").write_text("\n".join(plain_lines(1500)))
    killed: list[str] = []

    def kill_a_busy_node() -> None:
        victim = starts(started)[0].node_id
        cluster.kill(victim)
        killed.append(victim)

    with meanwhile(lambda: output.is_dir() and len(list(output.iterdir())) >= 3, kill_a_busy_node):
        status = run_ray_batch(
            BatchConfig(input=tmp_path / "input.jsonl", output=output),
            RayOptions(min_replicas=2, max_replicas=2, cpus_per_replica=2, **SMALL),
            EngineConfig(model_path="echo:0.01"),
            launch=launcher(started),
        )
    answers, errors = read_output()
    assert (status, errors) == (0, [])
    assert texts(answers) == {f"row {row}": f"this is {row}!" for row in range(1500)}
    assert len(starts(started)) == 3  # the third engine took the place of the lost one
    assert [start.node_id for start in starts(started)].count(killed[0]) == 1


def test_rows_wait_for_an_engine_where_a_lost_node_leaves_no_room(
    cluster: Nodes, tmp_path, started, output, read_output
) -> None:
    """Two nodes with an engine each, one of which is lost: its batches restart when the other engine is idle."""
    for _ in range(2):
        cluster.add(num_cpus=2)
    (tmp_path / "input.jsonl").write_text("\n".join(plain_lines(600)))

    def kill_a_busy_node() -> None:
        cluster.kill(starts(started)[0].node_id)

    with meanwhile(lambda: output.is_dir() and len(list(output.iterdir())) >= 3, kill_a_busy_node):
        status = run_ray_batch(
            BatchConfig(input=tmp_path / "input.jsonl", output=output),
            RayOptions(min_replicas=2, cpus_per_replica=2, **SMALL),
            EngineConfig(model_path="echo:0.01"),
            launch=launcher(started),
        )
    answers, errors = read_output()
    assert (status, errors) == (0, [])
    assert texts(answers) == {f"row {row}": f"this is {row}!" for row in range(600)}


def test_lines_that_kill_engines_and_actors_fail_and_the_job_continues(
    cluster: Nodes, tmp_path, started, output, read_output
) -> None:
    cluster.add(num_cpus=2)
    lines = plain_lines(64)
    lines[10] = json.dumps(
        {"custom_id": "core", "url": "/generate", "body": {"input_ids": [CORE_KILLER], "sampling_params": {}}}
    )
    lines[40] = json.dumps({"custom_id": "actor", "prompt": FATAL})
    (tmp_path / "input.jsonl").write_text("\n".join(lines))
    status = run_ray_batch(
        BatchConfig(input=tmp_path / "input.jsonl", output=output, max_retries=1),
        RayOptions(rows_per_batch=4, batches_per_replica=2, rows_per_file=4, max_replicas=1),
        EngineConfig(model_path="echo"),
        launch=launcher(started),
    )
    answers, errors = read_output()
    codes = {line["custom_id"]: line["error"]["code"] for line in errors}
    assert status == 1
    assert codes.pop("core") == "engine_dead"
    assert codes.pop("actor") == "replica_lost"
    assert set(codes.values()) <= {"replica_lost"}
    neighbours = set(codes) - {"actor"}
    assert neighbours <= {f"row {row}" for row in range(64)}
    assert len(neighbours) <= 3 + 4, "more failed than were in work with the line that ended the actor"
    whole = {f"row {row}": f"this is {row}!" for row in range(64) if row not in (10, 40)}
    assert texts(answers) == {name: text for name, text in whole.items() if name not in neighbours}


def test_an_actor_that_is_always_lost_while_its_engine_starts_ends_the_run(cluster: Nodes, tmp_path, output) -> None:
    cluster.add(num_cpus=2)
    (tmp_path / "input.jsonl").write_text("\n".join(plain_lines(8)))
    with pytest.raises(BatchError, match="the actor or a node was lost each of the 5 times an engine started"):
        run_ray_batch(
            BatchConfig(input=tmp_path / "input.jsonl", output=output),
            RayOptions(max_replicas=1),
            EngineConfig(model_path="echo"),
            launch=launch_and_die,
        )


def test_a_run_resumes_after_its_driver_was_killed(cluster: Nodes, tmp_path, started, output, read_output) -> None:
    cluster.add(num_cpus=2)
    (tmp_path / "input.jsonl").write_text("\n".join(plain_lines(600)))
    command = [sys.executable, "-m", "helpers.ray_command", cluster.address, str(tmp_path / "input.jsonl"), str(output)]
    driver = subprocess.Popen([*command, str(started)])
    until(lambda: output.is_dir() and len(list(output.iterdir())) >= 5)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    # The lines that were surely written. A file without them was noted as started, and the next run removes it.
    noted = [path.name.removesuffix(".parquet") for path in Path(f"{output}.run/finished").iterdir()]
    certain = {name: (output / f"{name}.jsonl").read_bytes() for name in noted if not name.endswith(".pending")}
    assert certain
    assert subprocess.run([*command, str(started)], check=False).returncode == 0
    answers, errors = read_output()
    assert errors == []
    assert texts(answers) == {f"row {row}": f"this is {row}!" for row in range(600)}
    assert {name: (output / f"{name}.jsonl").read_bytes() for name in certain} == certain
    number_of_starts = len(starts(started))
    assert subprocess.run([*command, str(started)], check=False).returncode == 0
    assert len(starts(started)) == number_of_starts, "an engine was started for nothing"
