"""The openai package against a running server (`make serve` starts one): an answer, a stream, logprobs, an error.

Needs `pip install openai`. Run it with `python examples/openai_client.py [http://127.0.0.1:30000]`.
"""

import sys

from openai import BadRequestError, OpenAI


def main(url: str = "http://127.0.0.1:30000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")  # any text, unless the server has an --api-key
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "What is the capital of Japan?"}]

    answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)
    print(answer.choices[0].message.content)
    print(f"{answer.usage.prompt_tokens_details.cached_tokens} prompt tokens came from the prefix cache")

    stream = client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:  # none in the last chunk, which has the usage
            print(choice.delta.content or "", end="", flush=True)
    print()

    scored = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    for token in scored.choices[0].logprobs.content:
        print(f"{token.token!r}: {token.logprob:.3f}")

    try:
        client.chat.completions.create(model=model, messages=question, temperature=-1)
    except BadRequestError as error:
        print(f"refused: {error.body['message']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
