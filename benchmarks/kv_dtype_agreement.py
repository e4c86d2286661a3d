"""How often an 8-bit cache changes the next token of the embedded model.

    python benchmarks/kv_dtype_agreement.py [--model-path demo] [--backend jax|torch] [--prompts 20] [--tokens 64]

A cache in bfloat16 decodes greedily after each prompt. Every other type then computes the same tokens, and reports
the most likely next token at each position. "agrees": the share of positions where that is the token that bfloat16
chose. float32 is there for comparison: rounding of any kind changes that many. The tokens are fixed, so that one
difference causes no others.
"""

from __future__ import annotations

import argparse

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

SUBJECTS = (
    "the capital of France", "how a bicycle stays upright", "why the sky is blue", "prime numbers", "photosynthesis",
    "the French Revolution", "how bread rises", "gravity", "the water cycle", "what a compiler does",
    "the moon landing", "volcanoes", "the history of tea", "how vaccines work", "black holes",
    "the Pythagorean theorem", "how to plant a tree", "the Silk Road", "electric motors", "the human heart",
)  # fmt: skip

KINDS = {
    "float32": {"dtype": "float32"},
    "fp8_e4m3": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
ON_TORCH = {"sage": {"dtype": "bfloat16", "attention_backend": "sage"}}


def engine(model_path: str, backend: str, **options: str) -> Engine:
    config = {"model_path": model_path, "backend": backend, "max_running_requests": 8, "skip_warmup": True}
    return Engine(config=EngineConfig.model_validate(config | options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--backend", choices=["jax", "torch"], default="jax")
    parser.add_argument("--prompts", type=int, default=len(SUBJECTS), help=f"how many, at most {len(SUBJECTS)}")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each")
    arguments = parser.parse_args()
    greedy = SamplingParams(temperature=0.0, max_new_tokens=arguments.tokens, ignore_eos=True)
    with engine(arguments.model_path, arguments.backend, dtype="bfloat16") as exact:
        messages = [[{"role": "user", "content": f"Tell me about {subject}."}] for subject in SUBJECTS]
        texts = [exact.tokenizer.render_chat(message) for message in messages[: arguments.prompts]]
        prompts = [exact.encode(text, add_special_tokens=False) for text in texts]
        chosen = [output.output_ids for output in exact.generate(prompts, greedy)]
    whole = [[*prompt, *output] for prompt, output in zip(prompts, chosen, strict=True)]
    last = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    kinds = KINDS | (ON_TORCH if arguments.backend == "torch" else {})
    for kind, options in kinds.items():
        agreed = 0
        with engine(arguments.model_path, arguments.backend, **options) as other:
            for prompt, tokens in zip(prompts, whole, strict=True):
                # the logprobs of a prompt's token are those after all tokens before it
                output = other.generate(tokens, last, return_logprob=True, top_logprobs_num=1, logprob_start_len=0)
                places = output.prompt_logprobs[len(prompt) :]
                agreed += sum(place.top[0][1] == place.token_id for place in places)
        places_of_all = sum(map(len, chosen))
        print(f"{kind:>9}: agrees at {agreed} of {places_of_all} places, {100 * agreed / places_of_all:.1f} %")


if __name__ == "__main__":
    main()
