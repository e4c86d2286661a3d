"""The benchmark of vectors: its texts, its check of vectors, and what it says without sentence-transformers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from helpers.tiny_models import make_tiny_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_texts_of_each_run_are_new_and_of_the_same_lengths(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path)
    module = load("embeddings")
    texts = module.Texts(tmp_path)
    first, again, second = texts.make(32, 0), texts.make(32, 0), texts.make(32, 1)
    lengths = [len(text.split()) for text in first]
    assert first == again
    assert lengths == [len(text.split()) for text in second]
    assert not {*first} & {*second}
    assert texts.count(first) == texts.count(second) == sum(lengths)
    assert module.SHORTEST <= min(lengths) < 16
    assert 256 < max(lengths) <= module.LONGEST
    assert 10 < sum(length < 64 for length in lengths) < 22  # half, by logarithm


def test_other_or_longer_vectors_end_the_benchmark(load: Callable[[str], ModuleType]) -> None:
    compare = load("embeddings").compare_vectors
    vectors = np.eye(3, 4, dtype=np.float32)
    near = np.array(vectors)
    near[1] = [0.0, 0.8, 0.6, 0.0]
    assert compare({"ours": vectors, "theirs": near}, 0.79) == {"theirs": pytest.approx(0.8)}
    with pytest.raises(SystemExit, match=r"of ours and theirs is 0\.80000, and must be 0\.9"):
        compare({"ours": vectors, "theirs": near}, 0.9)
    with pytest.raises(SystemExit, match="theirs's vectors are not normalised"):
        compare({"ours": vectors, "theirs": 2 * vectors}, 0.9)


def test_a_reference_that_is_not_installed_says_what_to_install(load: Callable[[str], ModuleType]) -> None:
    """The package may be installed for the tests, so the interpreter does not find it."""
    hidden = "import runpy, sys; sys.modules['sentence_transformers'] = None; del sys.argv[0]; "
    worker = str(BENCHMARKS / "embeddings_sentence_transformers.py")
    words = [hidden + "runpy.run_path(sys.argv[0], run_name='__main__')", worker, "folder", "--vectors", "file"]
    workers = load("decode_workers")
    contender = workers.Contender("reference", [sys.executable, "-c", *words], {"PYTHONPATH": str(BENCHMARKS)}, None)
    with pytest.raises(workers.WorkerError, match=r"sentence-transformers is not installed for .*python.*pip install"):
        workers.Worker(contender)
