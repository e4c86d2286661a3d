"""The page on GPUs lists the steps that are captured."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_jax.config import EngineConfig
from torch_backend.graphs import mixed_buckets, row_buckets

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "gpu.md").read_text().split())


def numbers(pattern: str) -> set[int]:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return {int(number) for number in re.findall(r"\d+", found[1])}


def test_the_rows_of_captured_steps() -> None:
    most = int(numbers(r"by default as many as run at once, but at most (\d+)").pop())
    assert f"up to {most}" in str(EngineConfig.model_fields["cuda_graph_max_bs"].description)
    assert numbers(rf"For {most} these are steps of ([\d, ]+) rows") == set(row_buckets(most))
    last = numbers(r"beyond, up to (\d+), there is one").pop()
    (each,) = numbers(r"there is one every (\d+) rows")
    assert set(row_buckets(last)) == {*row_buckets(most), *range(most, last + 1, each)}


def test_the_steps_with_prompts() -> None:
    found = mixed_buckets(200, 8192)
    assert {bucket.decode for bucket in found} == {*numbers(r"decode rows \(([\d, ]+) and the same maximum\)"), 200}
    prompts = numbers(r"prompt tokens \(([\d, ]+);")
    assert {bucket.prompt for bucket in found} == prompts
    for size in (16, 17, 100, 128, 129):
        first = min(prompt for prompt in prompts if prompt >= size)
        assert {bucket.prompt for bucket in mixed_buckets(200, size)} == {one for one in prompts if one <= first}
