"""The environment of every test, set before anything that reads it is imported."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["SGLANG_JAX_DEBUG_MEMORY"] = "1"
