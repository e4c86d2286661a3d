"""The cache report for operators, and the options that stress the cache."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import msgspec
import pytest
from helpers.scheduling import Bench
from helpers.simulation import STATE

from sglang_jax.cli.cache_report import as_svg, as_text
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.cache_report import MAX_NODES, CacheReport, CacheSummary, summarize_cache
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn


def used() -> Bench:
    """Prompts that share a prefix, a session, and a running request."""
    bench = Bench(pages=64, page_size=4, window=None, more=((6, 64), (STATE, 24)))
    for tail in range(4):
        bench.add([*range(1, 21), 30 + tail, 1, 2, 3, 4], 3)
        bench.run()
    bench.scheduler.sessions.open(OpenSession("talk", "ann", True))
    bench.add([7] * 9, 4, session=SessionTurn("talk", "ann", "1"))
    bench.run()
    bench.add([9] * 8, sampling=SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(5):
        bench.scheduler.step()
    return bench


def test_a_report_adds_up_and_holds_no_prompt_tokens() -> None:
    bench = used()
    report = bench.scheduler.report_cache()
    assert [(group.name, group.unit) for group in report.groups] == [
        ("full", "page"),
        ("swa", "page"),
        ("mamba", "slot"),
    ]
    for group in report.groups:
        held = group.evictable + group.session + group.protected + group.request_owned
        assert group.total == group.free + held + group.retired
        assert group.session > 0
    nodes = {node.id: node for node in report.nodes}
    assert len(nodes) == report.num_nodes == bench.scheduler.cache.tree.num_nodes
    assert all(node.parent in {0, *nodes} for node in report.nodes)
    assert max(node.hits for node in report.nodes) >= 2
    full = report.groups[0]
    assert sum(node.pages[0] for node in report.nodes) == full.evictable + full.session + full.protected
    (session,) = report.sessions
    assert (session.id, session.owner, session.tokens) == ("talk", "ann", 13)
    assert session.kept_tokens == 12
    assert session.idle_seconds is not None
    assert msgspec.json.decode(msgspec.json.encode(report), type=CacheReport) == report


def test_a_large_tree_is_reported_in_part_with_the_ancestors() -> None:
    bench = Bench(pages=900, page_size=1, context=64)
    for number in range(MAX_NODES + 60):
        bench.add([1 + number % 39, 1 + number // 39, 5], 1)
    bench.run()
    report = bench.scheduler.report_cache()
    assert report.num_nodes > MAX_NODES >= len(report.nodes)
    seen = {0}
    for node in report.nodes:
        assert node.parent in seen
        seen.add(node.id)


def test_a_summary_has_the_most_used_nodes_and_all_pages() -> None:
    bench = used()
    cache = bench.scheduler.cache
    summary = summarize_cache(cache)
    for pool, group in zip(summary.groups, bench.scheduler.report_cache().groups, strict=True):
        assert pool.total == pool.free + pool.cached + pool.session + pool.used
        assert (pool.name, pool.unit, pool.total) == (group.name, group.unit, group.total)
        assert (pool.free, pool.cached, pool.session) == (group.free, group.evictable, group.session)
        assert pool.used > 0
    assert summary.num_nodes == len(summary.nodes) == cache.tree.num_nodes
    assert msgspec.json.decode(msgspec.json.encode(summary), type=CacheSummary) == summary


def test_a_summary_visits_few_nodes_and_chooses_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_jax.scheduler.cache_report.SUMMARY_NODES", 12)
    bench = Bench(pages=900, page_size=1, context=64)
    for number in range(150):
        bench.add([1 + number % 7, 10 + number % 5, 20 + number // 35, 5], 1)
    bench.run()
    for number in range(3):
        bench.add([2, 12, 21, 30 + number], sampling=SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(5):
        bench.scheduler.step()
    nodes = list(bench.scheduler.cache.tree.nodes())
    best = sorted(((node.locks, node.hits) for node in nodes), reverse=True)[:12]
    chosen = summarize_cache(bench.scheduler.cache).nodes
    assert [(one.requests + one.sessions, one.hits) for one in chosen] == best
    assert best[0][0] == 3
    seen = {0}
    for one in chosen:
        assert one.parent in seen
        seen.add(one.id)
    monkeypatch.setattr("sglang_jax.scheduler.cache_report.VISITED_NODES", 5)
    few = summarize_cache(bench.scheduler.cache).nodes
    assert 0 < len(few) <= 5 < len(nodes)


def test_text_and_picture_of_a_report() -> None:
    report = {"replica": 0, **msgspec.to_builtins(used().scheduler.report_cache())}
    text = as_text(report)
    for words in ("Replica 0", "full pages", "mamba slots", "tombstones", "talk", "ann", "hits"):
        assert words in text, text
    picture = ET.fromstring(as_svg([report, {**report, "replica": 1}]))
    boxes = picture.findall(".//{*}rect")
    assert len(boxes) == 2 * len(report["nodes"])
    assert {box.get("stroke") for box in boxes} == {"black", "blue", "white"}
    assert all(0 <= float(box.get("x") or -1) <= 1200 for box in boxes)
    assert ET.fromstring(as_svg([])) is not None
    empty = {"replica": 0, **msgspec.to_builtins(Bench().scheduler.report_cache())}
    assert "0 nodes" in as_text(empty)


def test_ids_cannot_write_to_a_terminal() -> None:
    bench = Bench()
    bench.scheduler.sessions.open(OpenSession("a\x1b[2J\nb\u202e", "\x07eve"))
    lines = as_text({"replica": 0, **msgspec.to_builtins(bench.scheduler.report_cache())}).splitlines()
    assert lines[-1].startswith(r"a\x1b[2J\nb\u202e")
    assert r"\x07eve" in lines[-1]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("more", [(), ((6, 64), (STATE, 24))], ids=["keys", "keys, windows and states"])
def test_outputs_are_the_same_under_stress(more: tuple) -> None:
    """Every second step retracts a request, every third evicts all cached prefixes that are not in use; all requests
    finish."""
    bench = Bench(pages=64, page_size=4, more=more, options={"test_retract": 2, "test_evict": 3})
    for number in range(6):
        bench.add([*range(1, 20), 30 + number], 12, seed=number)
    bench.run()
    assert bench.scheduler.log.counts.retractions >= 6
    assert bench.scheduler.cache.num_evicted > 0
    bench.check_outputs()
    assert all(one.kind in ("stop", "length") for one in bench.channel.finished.values())


def test_a_single_request_finishes_although_every_step_retracts() -> None:
    bench = Bench(page_size=4, chunk=3, options={"test_retract": 1})
    bench.add(list(range(1, 30)), 8)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.log.counts.retractions >= 5
