"""Four ways to sample from the same prompt, and the logprobs of one of them.

Run it with `python examples/custom_sampling.py`.
"""

from sglang_jax import Engine, SamplingParams

PROMPT = "Once upon a time there was"

WAYS = {
    "greedy": SamplingParams(temperature=0, max_new_tokens=24),
    "nucleus, seeded": SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_new_tokens=24),
    "no repetition": SamplingParams(temperature=0.7, top_k=50, repetition_penalty=1.3, seed=7, max_new_tokens=24),
    "up to a full stop": SamplingParams(temperature=0.8, min_p=0.1, seed=7, stop=["."], include_stop=True),
}


def main() -> None:
    with Engine(model_path="demo") as engine:
        outputs = engine.generate([PROMPT] * len(WAYS), list(WAYS.values()))
        for way, output in zip(WAYS, outputs, strict=True):
            print(f"{way}: {output.text!r}")

        output = engine.generate(PROMPT, WAYS["greedy"], return_logprob=True, top_logprobs_num=2)
        for entry in output.logprobs[:5]:
            others = ", ".join(f"{engine.decode([token])!r} {logprob:.2f}" for logprob, token in entry.top)
            print(f"{engine.decode([entry.token_id])!r} {entry.logprob:.2f} (most likely: {others})")


if __name__ == "__main__":
    main()
