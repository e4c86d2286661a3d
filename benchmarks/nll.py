"""Negative log-likelihood of a text under the embedded model, in nats per token, by the format of weights and cache.

    python benchmarks/nll.py [--backend torch|jax] [--text FILE ...] [--tokens 20000] [--chunks 16 512]
        [--caches auto sage int8 fp8_e4m3] [--json FILE]

The text is cut into pieces of 1,000 tokens, which are prompts. A chunk of few tokens is computed like a decode step
of as many rows: on Torch's CPU path by matrices in blocks (see `docs/architecture.md`); a large one by packed
matrices. `sage` is `--attention-backend sage`, other caches are a `--kv-cache-dtype`. Texts that every machine has
are those of Python's documentation, `--text $(python -c 'import pydoc_data.topics as t; print(t.__file__)')`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint import resolve_tokenizer
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.config import EngineConfig

PIECE = 1000
DOCS = Path(__file__).parent.parent / "docs"


def pieces(files: list[Path], tokens: int) -> list[list[int]]:
    """The first `tokens` of the concatenated files."""
    tokenizer = load_tokenizer(resolve_tokenizer("demo"))
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text(encoding="utf-8"))
    ids = ids[:tokens]
    return [ids[first : first + PIECE] for first in range(0, len(ids), PIECE)]


def nll(backend: str, chunk: int, cache: str, prompts: list[list[int]]) -> list[float]:
    """The likelihood of each token except the first of a piece."""
    kept = {"attention_backend": cache} if cache == "sage" else {"kv_cache_dtype": cache}
    config = EngineConfig.model_validate(
        dict(
            model_path="demo",
            backend=backend,
            device="cpu",
            context_length=1024,
            chunked_prefill_size=chunk,
            debug_memory=False,
            disable_radix_cache=True,
            **kept,
        )
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    found: list[float] = []
    with Engine(config=config) as engine:
        for prompt in prompts:
            (output,) = engine.generate([prompt], params, return_logprob=True, logprob_start_len=0)
            assert output.prompt_logprobs is not None
            found += [-entry.logprob for entry in output.prompt_logprobs if entry.logprob is not None]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["jax", "torch"], default="torch")
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(DOCS.glob("*.md")), help="files of text")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 512], help="tokens of a step")
    parser.add_argument("--caches", choices=["auto", "sage", "int8", "fp8_e4m3"], nargs="+", default=["auto"])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    prompts = pieces(arguments.text, arguments.tokens)
    forms = [(cache, chunk) for cache in arguments.caches for chunk in arguments.chunks]
    by_form = {form: nll(arguments.backend, form[1], form[0], prompts) for form in forms}
    first = by_form[forms[0]]
    rows = [
        {
            "cache": cache,
            "tokens a step": chunk,
            "tokens": len(found),
            "nll": round(statistics.fmean(found), 5),
            "over the first": round(statistics.fmean(found) / statistics.fmean(first), 5),
            "largest difference of a token from the first row's": round(
                max(abs(one - other) for one, other in zip(found, first, strict=True)), 4
            ),
        }
        for (cache, chunk), found in by_form.items()
    ]
    report(f"Negative log-likelihood by the {arguments.backend} backend, SmolLM2-135M", rows, arguments.json)


if __name__ == "__main__":
    main()
