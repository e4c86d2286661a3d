"""transformers' `generate` on the embedded model: the reference of decode_cpu.py, which runs it.

Reads batch sizes from standard input, one per line, and answers each with a line: the output tokens per second of
that batch, run once.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_jax.checkpoint import open_checkpoint

PROMPT = 64
OUTPUT = 64


def load(dtype: torch.dtype) -> LlamaForCausalLM:
    """The embedded model with its weights dequantised."""
    checkpoint = open_checkpoint("demo")
    config = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.layers[0].feed_forward.size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.layers[0].mixer.num_heads,
            num_key_value_heads=config.layers[0].mixer.num_kv_heads,
            rms_norm_eps=config.final_norm.eps,
            max_position_embeddings=config.max_position,
            rope_theta=config.layers[0].mixer.rope.theta,
            tie_word_embeddings=True,
        )
    )
    reader = checkpoint.reader
    state = {name: torch.from_numpy(np.array(reader.read(name), np.float32)) for name in reader.names()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.to(dtype).eval()


def rate(model: LlamaForCausalLM, batch: int) -> float:
    """Output tokens per second of one batch, prefill included."""
    ids = torch.randint(100, 40_000, (batch, PROMPT))
    start = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False
    )
    seconds = time.perf_counter() - start
    assert output.shape[1] == PROMPT + OUTPUT
    return batch * OUTPUT / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    model = load(torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32)
    for line in sys.stdin:
        print(rate(model, int(line)), flush=True)


if __name__ == "__main__":
    main()
