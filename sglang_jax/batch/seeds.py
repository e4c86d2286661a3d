"""Seeds for lines without one: derived only from the line's position in the input."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from sglang_jax.scheduler.request_builder import arrival_seed

_SEVERAL_PROMPTS = re.compile(rb'\[\s*["\[]')

_fields = msgspec.json.Decoder(dict[str, Raw])
_encoder = msgspec.json.Encoder()


def seed_of(random_seed: int, number: int) -> Raw:
    """Returns the seed of a line as JSON. Seeds are far apart, as n completions use n successive ones."""
    return Raw(str(arrival_seed(random_seed, number + 1)).encode())


def add_seed(body: dict[str, Raw], seed: Raw) -> None:
    """Adds a seed to a body without one. Several prompts get none, because equal prompts would get equal answers."""
    prompts = [bytes(body[name]) for name in ("prompt", "text", "input_ids") if name in body]
    if any(_SEVERAL_PROMPTS.match(prompt) for prompt in prompts):
        return
    if "text" not in body and "input_ids" not in body:
        if _is_null(body, "seed"):
            body["seed"] = seed
    elif _is_null(body, "sampling_params"):
        body["sampling_params"] = Raw(_encoder.encode({"seed": seed}))
    elif bytes(body["sampling_params"]).startswith(b"{"):
        sampling = _fields.decode(body["sampling_params"])
        if _is_null(sampling, "seed") and _is_null(sampling, "sampling_seed"):
            body["sampling_params"] = Raw(_encoder.encode({**sampling, "seed": seed}))


def _is_null(fields: dict[str, Raw], name: str) -> bool:
    return name not in fields or bytes(fields[name]) == b"null"
