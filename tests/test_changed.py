"""`tests/changed.py`: the test files that a change affects."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def changed() -> ModuleType:
    spec = spec_from_file_location("changed", Path(__file__).parent / "changed.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "touched", "untouched"),
    [
        ("sglang_jax/mem_cache/page_pool.py", "mem_cache/test_page_pool.py", "checkpoint/test_gguf_file.py"),
        # Through other modules, through a helper, through an entry point, and by a process that a test starts.
        ("sglang_jax/mem_cache/page_pool.py", "server/test_limits.py", "replies/test_parser.py"),
        ("sglang_jax/scheduler/admission.py", "scheduler/test_simulator.py", "mem_cache/test_radix_tree.py"),
        ("torch_backend/packing.py", "end_to_end/test_structured_output.py", "scheduler/test_fairness.py"),
        ("tpu/roofline.py", "tpu/test_check.py", "scheduler/test_fairness.py"),
        ("sglang_jax/kernels/no_longer_there.py", "kernels/test_pallas_attention.py", "torch_backend/test_packing.py"),
        ("tests/helpers/simulation.py", "runner/test_runner_simulation.py", "mem_cache/test_page_pool.py"),
        ("tests/mem_cache/test_page_pool.py", "mem_cache/test_page_pool.py", "mem_cache/test_radix_tree.py"),
        ("docs/api.md", "test_docs_links.py", "mem_cache/test_page_pool.py"),
    ],
)
def test_tests_that_depend_on_a_file_are_affected(changed: ModuleType, path: str, touched: str, untouched: str) -> None:
    found = changed.touched_tests([path])
    assert f"tests/{touched}" in found
    assert f"tests/{untouched}" not in found
    assert all((changed.ROOT / one).exists() for one in found)


def test_files_that_all_tests_read_affect_all(changed: ModuleType) -> None:
    for path in ("pyproject.toml", "tests/conftest.py", "Makefile"):
        assert changed.touched_tests([path, "docs/api.md"]) == ["tests"]
    assert all((changed.ROOT / one).exists() for ones in changed.READERS.values() for one in ones)
