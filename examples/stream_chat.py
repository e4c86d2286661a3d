"""A chat answer, printed as it is sampled: the chat template, then a stream.

Run it with `python examples/stream_chat.py`.
"""

from sglang_jax import Engine, SamplingParams

CONVERSATION = [
    {"role": "system", "content": "You answer in one short paragraph."},
    {"role": "user", "content": "Why does bread rise?"},
]


def main() -> None:
    with Engine(model_path="demo") as engine:
        text = engine.tokenizer.render_chat(CONVERSATION)
        # The template adds special tokens itself.
        prompt = engine.encode(text, add_special_tokens=False)
        for output in engine.generate(prompt, SamplingParams(temperature=0, max_new_tokens=96), stream=True):
            print(output.delta_text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
