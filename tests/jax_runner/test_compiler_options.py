"""Which steps are compiled with a remedy, and that the page of them is true."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from sglang_jax.jax_runner.buckets import Buckets
from sglang_jax.jax_runner.compiler_options import REMEDIES, Installed, Releases, Version, options_of_step

BUCKETS = Buckets.ladder(8, 64, 16)
DECODE, MIXED = BUCKETS.decode[-1].decode_only, BUCKETS.mixed[-1].decode_only
NO_OFFLOAD = {"xla_tpu_offload_gather_to_sparsecore": "false"}


@pytest.mark.parametrize(
    ("jax", "libtpu"), [((0, 11, 1), None), ((0, 12, 0), None), ((0, 10, 2), (0, 0, 46)), ((0, 11, 1), (0, 0, 51))]
)
def test_decode_steps_of_a_tpu7x_send_no_gathers_away(jax: Version, libtpu: Version | None) -> None:
    """libtpu decides where it is known."""
    assert options_of_step("tpu", "TPU7x", DECODE, Installed(jax, libtpu)) == NO_OFFLOAD


@pytest.mark.parametrize(
    ("kind", "decode_only", "jax", "libtpu"),
    [
        ("TPU7x", MIXED, (0, 11, 1), (0, 0, 51)),
        ("TPU7x", DECODE, (0, 11, 0), None),
        ("TPU7x", DECODE, (0, 10, 2), (0, 0, 42, 1)),
        ("TPU7x", DECODE, (0, 11, 1), (0, 0, 45)),
        ("TPU v6 lite", DECODE, (0, 11, 1), (0, 0, 51)),
    ],
)
def test_others_are_compiled_as_the_compiler_likes(
    kind: str, decode_only: bool, jax: Version, libtpu: Version | None
) -> None:
    assert options_of_step("tpu", kind, decode_only, Installed(jax, libtpu)) == {}


def test_releases_end_where_a_fault_is_mended() -> None:
    releases = Releases((0, 0, 46), (0, 0, 50, 1))
    found = {version: releases.have(version) for version in ((0, 0, 45, 9), (0, 0, 46), (0, 0, 50), (0, 0, 50, 1))}
    assert list(found.values()) == [False, True, True, False]


def test_what_is_installed_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.48.1.dev20260901")
    assert Installed.here().libtpu == (0, 0, 48, 1)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert Installed.here().libtpu is None


def test_the_option_is_for_tpus_alone() -> None:
    assert options_of_step("cpu", "cpu", DECODE) == {}


def test_a_chip_that_nobody_knows_has_no_remedies() -> None:
    """With --attention-backend xla such a device serves: other kernels refuse it."""
    assert options_of_step("tpu", "TPU v99", DECODE, Installed((0, 11, 1), (0, 0, 51))) == {}


def test_the_page_has_every_remedy() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text()
    for remedy in REMEDIES:
        for name, value in remedy.options.items():
            assert f"`{name}={value}`" in page
        assert remedy.libtpu is not None
        jax, libtpu = (".".join(map(str, each.since)) for each in (remedy.jax, remedy.libtpu))
        assert f"| {remedy.chip} | from {libtpu} (JAX {jax}) |" in page
