"""The embedded default model in transformers, fed by our own readers: the oracle of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_jax.checkpoint import Checkpoint, open_checkpoint


def load_oracle(model_path: str = "demo") -> LlamaForCausalLM:
    """A Llama checkpoint in transformers, float32."""
    return oracle_from(open_checkpoint(model_path))


def oracle_from(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The same for an open checkpoint."""
    config, reader = checkpoint.config, checkpoint.reader
    assert reader is not None
    mixer = config.layers[0].mixer
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.layers[0].feed_forward.size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=mixer.num_heads,
            num_key_value_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            rms_norm_eps=config.final_norm.eps,
            max_position_embeddings=config.max_position,
            rope_theta=mixer.rope.theta,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    state = {name: torch.from_numpy(np.array(reader.read(name), np.float32)) for name in reader.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def assert_greedy(
    model: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int], tolerance: float = 1e-3
) -> None:
    """`output` is what the oracle decodes greedily after `prompt`.

    Checked in one pass: each output token must be the most likely one after all before it, or within `tolerance` of the
    largest logit (then the oracle's own choice depends on rounding).
    """
    ids = torch.tensor([[*prompt, *output]])
    logits = model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    behind = logits.max(dim=1).values - chosen
    worst = int(behind.argmax())
    preferred = int(logits[worst].argmax())
    assert float(behind[worst]) < tolerance, (
        f"output token {worst} is {output[worst]}, the oracle prefers {preferred} by {behind[worst]:.4f}"
    )


@torch.inference_mode()
def assert_equal_but_for_ties(
    model: LlamaForCausalLM,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    tolerance: float = 1e-3,
) -> None:
    """Two outputs after `prompt` are equal, or diverge where the oracle's logits of both tokens are within `tolerance`.

    After that they may differ.
    """
    assert len(one) == len(other)
    place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), None)
    if place is None:
        return
    logits = model(torch.tensor([[*prompt, *one[:place]]]), use_cache=False).logits[0, -1]
    difference = abs(float(logits[one[place]] - logits[other[place]]))
    assert difference < tolerance, (
        f"output token {place} is {one[place]} or {other[place]}, which the oracle tells apart by {difference:.4f}"
    )
