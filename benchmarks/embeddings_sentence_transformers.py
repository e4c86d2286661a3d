"""sentence-transformers' `encode` as a worker of embeddings.py, which runs it with any interpreter that has it."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec

import numpy as np
from decode_protocol import FirstTokens, Run, Times, answer_batches

MISSING = (
    f"sentence-transformers is not installed for {sys.executable}: install it there "
    "(python -m pip install sentence-transformers==6.2.0), or name an interpreter that has it with --reference-python"
)


def load(folder: str, dtype: str, batch: int, vectors: str) -> Run:
    """A model on as many threads as OMP_NUM_THREADS says; `batch`: texts that it pads to the longest of them. Writes
    the vectors of each batch to the file `vectors`."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = SentenceTransformer(
        folder, device="cpu", local_files_only=True, model_kwargs={"dtype": getattr(torch, dtype)}
    )
    assert next(model.parameters()).dtype is getattr(torch, dtype)

    def run(texts: list[str], _: int) -> Times:
        clock = FirstTokens(0)
        found = model.encode(texts, batch_size=batch, show_progress_bar=False, convert_to_tensor=True)
        times = clock.end()
        np.save(vectors, found.float().numpy())
        return times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32, help="encode's batch_size")
    parser.add_argument("--vectors", required=True)
    arguments = parser.parse_args()
    if find_spec("sentence_transformers") is None:
        sys.exit(MISSING)
    answer_batches(lambda: load(arguments.folder, arguments.dtype, arguments.batch, arguments.vectors))


if __name__ == "__main__":
    main()
