"""Which proofs `make proofs` records, and which records `make check` reports as outdated."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path

import proofs
import pytest
from proofs import PROOFS, ROOT, Clone, Proof, Record

COVERED = Proof("sums", ("true",), ("code", "table.json"))


def git(clone: Clone, *arguments: str) -> None:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=clone.root, check=True, capture_output=True)


def commit(clone: Clone, file: str, text: str) -> None:
    path = clone.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(clone, "add", "--all")
    git(clone, "commit", "--message", file)


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where a git hook runs the tests
        monkeypatch.delenv(name, raising=False)
    clone = Clone(tmp_path)
    git(clone, "init")
    commit(clone, "code/sum.py", "1")
    commit(clone, "tests/proofs.json", "{}")
    return clone


def test_a_green_proof_is_recorded(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "processor", lambda: "a processor")
    assert proofs.run_proofs(clone, [COVERED]) == 0
    [(name, fields)] = json.loads((clone.root / "tests/proofs.json").read_text()).items()
    assert name == "sums"
    assert re.fullmatch(r"[0-9a-f]{40}", fields["commit"])
    assert date.fromisoformat(fields["date"])
    assert fields["processor"] == "a processor"
    assert isinstance(fields["seconds"], int)
    assert set(fields) == {"commit", "date", "processor", "seconds"}


def test_a_red_proof_is_not_recorded_and_the_next_one_runs(clone: Clone, capfd: pytest.CaptureFixture[str]) -> None:
    red = Proof("red", ("sh", "-c", "exit 3"), ("code",))
    assert proofs.run_proofs(clone, [red, COVERED]) == 1
    assert set(clone.records()) == {"sums"}
    said = capfd.readouterr()
    assert said.err.startswith("red: red: its command ended with status 3 after 0 s\n")
    assert "1 of 2 proofs are green" in said.out


def test_a_red_proof_keeps_the_earlier_record(clone: Clone) -> None:
    before = Record("0" * 40, "2026-01-01", "a processor", 7)
    clone.write("sums", before)
    assert proofs.run_proofs(clone, [replace(COVERED, command=("false",))]) == 1
    assert clone.records() == {"sums": before}


@pytest.mark.parametrize("file", ["code/sum.py", "code/new.py", "table.json"])
def test_uncommitted_sources_are_not_recorded(clone: Clone, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    (clone.root / file).write_text("2")
    assert proofs.run_proofs(clone, [COVERED]) == 1
    assert clone.records() == {}
    assert f"sums: not run, because its sources are not committed: {file}" in capsys.readouterr().err


def test_a_proof_that_changes_its_sources_is_not_recorded(clone: Clone, capsys: pytest.CaptureFixture[str]) -> None:
    assert proofs.run_proofs(clone, [replace(COVERED, command=("sh", "-c", "echo > table.json"))]) == 1
    assert clone.records() == {}
    assert "sums: not recorded, because its sources changed while it ran: table.json" in capsys.readouterr().err


def test_only_changed_sources_make_a_record_stale(clone: Clone) -> None:
    assert proofs.stale(clone, [COVERED]) == ["proof sums: no record"]
    proofs.run_proofs(clone, [COVERED])
    record = clone.records()["sums"]
    commit(clone, "codes/other.py", "1")  # shares a prefix with a covered folder
    clone.write("sums", replace(record, date="2001-01-01"))  # age by itself is not an error
    assert proofs.stale(clone, [COVERED]) == []
    (clone.root / "code/new.py").write_text("1")
    start = f"proof sums: changed since 2001-01-01 ({record.commit[:8]}): "
    assert proofs.stale(clone, [COVERED]) == [f"{start}code/new.py"]
    commit(clone, "code/sum.py", "2")
    commit(clone, "code/third.py", "2")
    assert proofs.stale(clone, [COVERED]) == [f"{start}code/new.py, code/sum.py and 1 more"]


def test_a_removed_source_counts_as_changed(clone: Clone) -> None:
    proofs.run_proofs(clone, [COVERED])
    git(clone, "rm", "code/sum.py")
    git(clone, "commit", "--message", "removed")
    assert [line.rpartition(": ")[2] for line in proofs.stale(clone, [COVERED])] == ["code/sum.py"]


def test_a_missing_commit_is_named(clone: Clone) -> None:
    clone.write("sums", Record("0123456789" * 4, "2026-01-01", "a processor", 7))
    assert proofs.stale(clone, [COVERED]) == ["proof sums: its commit 01234567 is not in this clone"]


def test_benchmarks_share_a_line(clone: Clone) -> None:
    both = [replace(COVERED, name=f"bench-{name}") for name in ("first", "second")]
    assert proofs.stale(clone, both) == ["proofs bench-*: 2 of 2 have no record of these sources"]
    proofs.run_proofs(clone, both[:1])
    assert proofs.stale(clone, both) == ["proofs bench-*: 1 of 2 have no record of these sources"]
    proofs.run_proofs(clone, both[1:])
    assert proofs.stale(clone, both) == []


def test_proofs_are_chosen_by_name_or_pattern() -> None:
    def names(*wanted: str) -> list[str]:
        return [proof.name for proof in proofs.chosen(PROOFS, wanted)]

    assert names() == [proof.name for proof in PROOFS]
    assert names("docs", "ray-test") == ["ray-test", "docs"]
    assert len(names("bench-tpu*")) == 8
    with pytest.raises(SystemExit, match="ONLY must name proofs, got nope: choose from ray-test, "):
        names("docs", "nope")


def test_the_table_has_every_slow_target_and_benchmark() -> None:
    names = [proof.name for proof in PROOFS]
    assert len(set(names)) == len(names)
    makefile = (ROOT / "Makefile").read_text()
    targets = [name for name in names if not name.startswith("bench-")]
    assert set(targets) >= {"soak", "soak-server", "ray-test", "package-test", "test-cpus", "tpu-check", "docs"}
    for name in targets:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    # soak_server is a target, a test runs facts_task, and decode_cpu, embeddings and faults start the others
    others = {"soak_server", "facts_task", "memory_limit", "embeddings_engine", "embeddings_sentence_transformers"}
    others |= {"decode_engine", "decode_llama_cpp", "decode_transformers", "decode_vllm"}
    assert {f"bench-{script.replace('_', '-')}" for script in scripts - others} == set(names) - set(targets)


def test_covered_paths_exist() -> None:
    missing = {(proof.name, path) for proof in PROOFS for path in proof.covers if not (ROOT / path).exists()}
    assert missing == set()


def test_records_are_of_proofs() -> None:
    records = Clone(ROOT).records()
    assert set(records) <= {proof.name for proof in PROOFS}
    for record in records.values():
        assert re.fullmatch(r"[0-9a-f]{40}", record.commit)
        assert date.fromisoformat(record.date)
