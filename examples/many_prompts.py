"""Many prompts that share a prefix: the prefix is computed once, and outputs come back in the order of the prompts.

Run it with `python examples/many_prompts.py`.
"""

import time

from sglang_jax import Engine, SamplingParams

INSTRUCTIONS = "You are given the name of a country. Answer with the name of its capital and nothing else. "
COUNTRIES = ["France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Canada", "Vietnam"]


def main() -> None:
    with Engine(model_path="demo") as engine:
        prompts = [f"{INSTRUCTIONS}\nCountry: {country}\nCapital:" for country in COUNTRIES]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=8, stop=["\n"]))
        seconds = time.perf_counter() - begin

    for country, output in zip(COUNTRIES, outputs, strict=True):
        print(f"{country}: {output.text.strip()}")
    cached = sum(output.cached_tokens for output in outputs)
    total = sum(output.prompt_tokens for output in outputs)
    print(f"{len(outputs)} answers in {seconds:.2f} s; {cached} of {total} prompt tokens came from the prefix cache")


if __name__ == "__main__":
    main()
