"""What attention needs to know of a step's sequences."""

from __future__ import annotations

from typing import Protocol

import jax


class Sequences(Protocol):
    """The part of `ForwardBatch` that attention reads; the fields are described there."""

    @property
    def page_table(self) -> jax.Array: ...

    @property
    def kv_lens(self) -> jax.Array: ...

    @property
    def query_starts(self) -> jax.Array: ...

    @property
    def num_decode(self) -> jax.Array: ...
