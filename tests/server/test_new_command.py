"""A new control command needs three places: its message with a rule, what executes it, and its route."""

from __future__ import annotations

import pytest
from fastapi import APIRouter
from helpers.echo_server import serve_echo
from helpers.engine_fakes import ByteTokenizer, load_fake_model
from helpers.replica_fakes import fake_replicas

from sglang_jax.config import EngineConfig, LoadBalanceMethod, ServerConfig
from sglang_jax.engine.types import EngineClient
from sglang_jax.errors import ParameterError
from sglang_jax.scheduler.commands import COMMANDS, Each
from sglang_jax.scheduler.loop import SchedulerLoop
from sglang_jax.scheduler.messages import Command, Reply
from sglang_jax.server import control
from sglang_jax.server.context import ServerContext
from sglang_jax.server.remote_replicas import connect_engines


class Square(Command[int], tag="square", frozen=True):
    """Returns the sum of what the replicas compute."""

    number: int

    def read(self, reply: Reply) -> int:
        return int(reply.message)


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three places."""
    monkeypatch.setitem(COMMANDS, Square, Each(lambda squares: sum(squares.values())))

    execute = SchedulerLoop._execute

    def execute_square(loop: SchedulerLoop, command: Command[object]) -> Reply:
        if not isinstance(command, Square):
            return execute(loop, command)
        if command.number < 0:
            raise ParameterError("number must not be negative", param="number")
        return Reply(command.call, True, str(command.number**2))

    monkeypatch.setattr(SchedulerLoop, "_execute", execute_square)

    create_router = control.control_router

    def with_square(context: ServerContext) -> APIRouter:
        router = create_router(context)

        @router.get("/square/{number}")
        async def square(number: int) -> int:
            return await context.client.call(Square(number))

        return router

    monkeypatch.setattr(control, "control_router", with_square)
    remote = control.RemoteCall("/square/5", lambda answer, _: int(answer), method="GET")
    monkeypatch.setitem(control.REMOTE_CALLS, Square, remote)


async def test_a_command_passes_the_router_to_the_cores() -> None:
    client = await fake_replicas(2, LoadBalanceMethod.ROUND_ROBIN, EngineConfig())
    try:
        assert await client.call(Square(3)) == 2 * 9
        with pytest.raises(ParameterError, match="must not be negative") as refused:
            await client.call(Square(-3))
        assert refused.value.param == "number"
    finally:
        await client.close()


async def connect(config: ServerConfig) -> EngineClient:
    return await connect_engines(config, ByteTokenizer())


def test_a_command_passes_routes_and_servers() -> None:
    with (
        serve_echo(load_fake_model) as behind,
        serve_echo(launch=connect, connect=f"127.0.0.1:{behind.port}") as router,
    ):
        assert behind.http.get("/square/4").json() == 16
        assert behind.http.get("/square/-4").json()["error"]["param"] == "number"
        assert router.http.get("/square/4").json() == 25  # what the table sends to the other server
