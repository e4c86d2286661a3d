"""The page on models names every family, and its table matches the errors of the code."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_jax.architectures.registry import known_families

DOCS = Path(__file__).parent.parent / "docs"


def test_every_family_has_a_command() -> None:
    page = (DOCS / "models.md").read_text()
    sections = re.split(r"^#+ ", page, flags=re.MULTILINE)
    for family in known_families():
        named = [section for section in sections if f"`{family.class_name}`" in section]
        assert named, family.class_name
        assert any("sglang-jax serve" in section for section in named), family.class_name


def test_the_table_matches_the_errors_of_the_code() -> None:
    """`python tests/helpers/model_table.py` writes it."""
    from helpers.model_table import model_table, table_of  # here, because it imports transformers

    assert table_of((DOCS / "models.md").read_text()) == model_table()


def test_families_of_only_transformers_are_not_native() -> None:
    page = " ".join((DOCS / "transformers.md").read_text().split())
    listed = re.search(r"Tested families without a native implementation: ([^.]+)\.", page)
    assert listed is not None
    native = {family.class_name.lower() for family in known_families()}
    names = listed[1].split(", ")
    assert "StableLM" in names
    assert not [name for name in names if f"{re.sub('[^a-z0-9]', '', name.lower())}forcausallm" in native]
