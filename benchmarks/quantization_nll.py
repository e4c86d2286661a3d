"""Loss from fewer bits per weight: negative log-likelihood of a text under the embedded model, in nats per token.

    python benchmarks/quantization_nll.py [--backend torch|jax] [--text FILE] [--tokens 20000] [--json FILE]
        [--forms float32 int8 fp8 int4 Q8_0 Q4_1 Q4_0] [--activations exact int8]

The text, by default the reference of the Python language that comes with every interpreter (`pydoc_data.topics`, in the
order of its topics), is cut into pieces of 512 tokens, which are prompts. The first token of each has no likelihood. A
line has the Python version and a digest of the tokens: figures with the same digest are comparable.

`bfloat16`, the baseline, is the file as it is loaded. `float32` is the same file without any rounding. The others
compute in bfloat16: `int8`, `fp8` and `int4`, in groups of 64 and 128, are `--quantization`; Q8_0, Q4_1 and Q4_0 are
GGUF files written for this, with the embeddings (which are also the head) of the embedded model's file, computed with
each of `--activations`: with `exact`, the engine holds their weights in bfloat16; with `int8`, in blocks, and
activations are rounded for products, as with `int8` and `int4`.

All formats are made from the weights of the embedded model's file, whose matrices are stored as Q4_1 and its
embeddings as Q8_0. Its values lie on a grid of 16 for each 32 weights. Stored as Q4_1 again they are therefore
unchanged, and the other formats round a second time, Q4_0 to another grid: the differences are those of this model's
weights, not the loss of a format on a model that was never rounded.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import pydoc_data.topics
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint import resolve_model, resolve_tokenizer
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.config import EngineConfig

PIECE = 512
FORMS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4", "cpu_activations": "int8"},
}
KINDS = ("Q8_0", "Q4_1", "Q4_0")
EMBEDDINGS = "token_embd.weight"
_OF_FILES = ("GGUF.", "general.architecture", "general.file_type")
"""Prefixes of keys that the writer itself writes, or that change."""


def pieces(text: str, tokens: int) -> list[list[int]]:
    """The first `tokens` of a text, in pieces of two or more."""
    ids = load_tokenizer(resolve_tokenizer("demo")).encode(text)[:tokens]
    cut = [ids[first : first + PIECE] for first in range(0, len(ids), PIECE)]
    return [piece for piece in cut if len(piece) > 1]


def write_gguf(target: Path, kind: GGMLQuantizationType) -> None:
    """The embedded model's file with its matrices, except the embeddings, stored as `kind`."""
    source = GGUFReader(resolve_model("demo").path)
    writer = GGUFWriter(target, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if not field.name.startswith(_OF_FILES):
            value, *_ = field.types
            of_items = field.types[-1] if value is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), value, sub_type=of_items)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind.name}"])
    for tensor in source.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2 and tensor.name != EMBEDDINGS:
            data, stored = gguf.quantize(gguf.dequantize(data, stored), kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def nll(prompts: list[list[int]], backend: str, options: dict[str, str]) -> tuple[list[float], int]:
    """The likelihood of each token except the first of a piece, and the bytes of the engine's weights."""
    given = {
        "backend": backend,
        "context_length": 2 * PIECE,
        "chunked_prefill_size": PIECE,
        "disable_radix_cache": True,
    }
    config = EngineConfig.model_validate(
        {"model_path": "demo", "skip_warmup": True, "debug_memory": False} | given | options
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    found: list[float] = []
    with Engine(config=config) as engine:
        size = engine.state()["weight_bytes"]
        for prompt in prompts:
            output = engine.generate(prompt, params, return_logprob=True, logprob_start_len=0)
            assert output.prompt_logprobs is not None
            found += [-entry.logprob for entry in output.prompt_logprobs if entry.logprob is not None]
    assert isinstance(size, int)
    return found, size


def row(form: str, size: int, file: Path | None, found: list[float], base: list[float]) -> dict[str, Any]:
    """A line of the table. The error is the standard error of the mean difference, with tokens taken as independent."""
    differences = [one - other for one, other in zip(found, base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "weights": form,
        "MB in the engine": round(size / 1e6, 1),
        "MB of the file": "" if file is None else round(file.stat().st_size / 1e6, 1),
        "tokens": len(found),
        "nll": f"{statistics.fmean(found):.5f}",
        "over bfloat16": f"{statistics.fmean(differences):+.5f}",
        "standard error": f"{error:.5f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["jax", "torch"], default="torch")
    parser.add_argument("--text", type=Path, help="a file of text; default: Python's reference")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--forms", choices=[*FORMS, *KINDS], nargs="*", default=[*FORMS, *KINDS])
    both = ["exact", "int8"]
    parser.add_argument("--activations", choices=both, nargs="+", default=both, help="in products of GGUF's formats")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    reference = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    prompts = pieces(arguments.text.read_text("utf-8") if arguments.text else reference, arguments.tokens)
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    print(f"{arguments.text or f'reference of Python {platform.python_version()}'}, tokens {digest}", flush=True)
    base, size = nll(prompts, arguments.backend, {"dtype": "bfloat16", "cpu_activations": "exact"})
    rows = [row("bfloat16", size, resolve_model("demo").path, base, base)]
    for form in arguments.forms:
        print(f"{rows[-1]['weights']}: {rows[-1]['nll']}; now {form}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = None
            options = FORMS.get(form, {})
            if form in KINDS:
                file = Path(folder, f"{form}.gguf")
                write_gguf(file, GGMLQuantizationType[form])
                options = {"model_path": str(file)}
            for activations in arguments.activations if form in KINDS else ["exact"]:
                own = {"dtype": "bfloat16", "cpu_activations": activations} | options
                found, size = nll(prompts, arguments.backend, own)
                rows.append(row(f"{form}, {activations} activations" if file else form, size, file, found, base))
    report(f"Negative log-likelihood by weights, {arguments.backend} backend, SmolLM2-135M", rows, arguments.json)


if __name__ == "__main__":
    main()
