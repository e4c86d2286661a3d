from __future__ import annotations

import functools

import pytest
from helpers.engine_fakes import load_echo, load_tokenizer

from sglang_jax.config import EngineConfig
from sglang_jax.engine import engine as engine_module
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.engine import Engine
from sglang_jax.engine.launch import launch_core


async def launch_echo(config: EngineConfig) -> AsyncEngineClient:
    return await launch_core(config, in_process=True, load=load_echo, load_tokenizer=load_tokenizer)


@pytest.fixture
def echo_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that make an `Engine` get one that echoes its prompt byte by byte."""
    monkeypatch.setattr(engine_module, "Engine", functools.partial(Engine, launch=launch_echo))
