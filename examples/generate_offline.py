"""One prompt, one answer, no server.

Run it with `python examples/generate_offline.py`.
"""

from sglang_jax import Engine, SamplingParams


def main() -> None:
    with Engine(model_path="demo") as engine:
        output = engine.generate("The capital of France is", SamplingParams(temperature=0, max_new_tokens=24))
    print(output.text)
    print(f"{output.completion_tokens} tokens, ended by {output.finish.kind}")


if __name__ == "__main__":
    main()
