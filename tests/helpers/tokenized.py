"""Requests as links take them, without a front end."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_jax.engine.types import SCRIPT, GenerateInput, Origin, TokenizedRequest
from sglang_jax.scheduler.messages import SessionTurn


def tokenized(
    request: GenerateInput, origin: Origin = SCRIPT, *, session: SessionTurn | None = None, **changes: Any
) -> TokenizedRequest:
    """What the front end makes of a request whose prompt is token ids."""
    fields: dict[str, Any] = {
        "request_id": request.request_id or "",
        "token_ids": np.array(request.prompt, np.int32),
        "sampling": request.sampling,
        "namespace": origin.namespace(request.extra_key),
    }
    return TokenizedRequest(request, origin=origin, session=session, **{**fields, **changes})
