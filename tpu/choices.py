"""What is chosen for a TPU where nothing was asked for."""

from __future__ import annotations

PAGE_SIZE = 64
"""Tokens of a KV page: whole tiles of every storage type, and few enough copies for a block of keys."""
