"""Which steps are compiled with a workaround, and that their documentation is complete."""

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
def test_decode_steps_of_a_tpu7x_offload_no_gathers(jax: Version, libtpu: Version | None) -> None:
    """libtpu reports where the option is known."""
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
def test_other_steps_are_compiled_with_default_options(
    kind: str, decode_only: bool, jax: Version, libtpu: Version | None
) -> None:
    assert options_of_step("tpu", kind, decode_only, Installed(jax, libtpu)) == {}


def test_a_workaround_ends_with_the_release_that_fixes_the_fault() -> None:
    releases = Releases((0, 0, 46), (0, 0, 50, 1))
    found = {version: releases.contain(version) for version in ((0, 0, 45, 9), (0, 0, 46), (0, 0, 50), (0, 0, 50, 1))}
    assert list(found.values()) == [False, True, True, False]


def test_the_installed_version_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.48.1.dev20260901")
    assert Installed.here().libtpu == (0, 0, 48, 1)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert Installed.here().libtpu is None


def test_the_option_is_only_for_tpus() -> None:
    assert options_of_step("cpu", "cpu", DECODE) == {}


def test_an_unknown_chip_has_no_workarounds() -> None:
    """With --attention-backend xla such a device serves: other kernels refuse it."""
    assert options_of_step("tpu", "TPU v99", DECODE, Installed((0, 11, 1), (0, 0, 51))) == {}


def test_the_page_lists_every_workaround() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text()
    for remedy in REMEDIES:
        for name, value in remedy.options.items():
            assert f"`{name}={value}`" in page
        assert remedy.libtpu is not None
        jax, libtpu = (".".join(map(str, each.since)) for each in (remedy.jax, remedy.libtpu))
        assert f"| {remedy.chip} | from {libtpu} (JAX {jax}) |" in page
