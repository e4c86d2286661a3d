"""transformers' `generate` as a worker of decode_cpu.py, which runs it: the reference of the embedded model.

`--save FOLDER` writes the model as a folder of bfloat16 safetensors instead, for engines that read no GGUF file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from decode_protocol import FirstTokens, Run, Times, answer_batches
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_jax.checkpoint import open_checkpoint


def load(path: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of Llama's architecture with its weights dequantised."""
    checkpoint = open_checkpoint(path)
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
    ).to(dtype)
    reader = checkpoint.reader
    for name in reader.names():
        model.get_parameter(name).data.copy_(torch.from_numpy(np.array(reader.read(name), np.float32)))
    model.tie_weights()
    return model.eval()


def runner(model: LlamaForCausalLM) -> Run:
    def run(prompts: list[list[int]], output: int) -> Times:
        ids = torch.tensor(prompts)
        clock = FirstTokens(1)

        def saw_token(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            clock.saw(0)
            return torch.zeros(len(ids), dtype=torch.bool)

        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            stopping_criteria=[saw_token],
        )
        times = clock.end()
        assert found.shape[1] == ids.shape[1] + output
        return times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    if arguments.save is not None:
        load(arguments.model, dtype).save_pretrained(arguments.save)
    else:
        answer_batches(lambda: runner(load(arguments.model, dtype)))


if __name__ == "__main__":
    main()
