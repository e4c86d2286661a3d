"""A client's side of sessions over a scheduler."""

from __future__ import annotations

from helpers.scheduling import Bench

from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import OpenSession
from sglang_jax.scheduler.messages import SessionTurn
from sglang_jax.scheduler.sessions import Session


class Talk:
    """One session."""

    def __init__(self, bench: Bench, name: str = "s", *, streaming: bool = True, timeout: float | None = None) -> None:
        self.bench = bench
        self.name = name
        self.history: list[int] = []
        bench.scheduler.sessions.open(OpenSession(name, "me", streaming, timeout))

    @property
    def session(self) -> Session:
        return self.bench.scheduler.sessions._open["me", self.name]

    def send(
        self,
        tail: list[int],
        new_tokens: int = 6,
        after: str | None = None,
        owner: str = "me",
        stop: tuple[str, ...] = (),
        **asked: int,
    ) -> int:
        """Sends a turn; its number. `stop`: strings that its client searches for; `asked`: fields of the request."""
        turn = SessionTurn(self.name, owner, str(self.bench._next_id), after)
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=5, ignore_eos=True, stop=stop)
        return self.bench.add([*self.history, *tail], sampling=sampling, sent=tail, session=turn, **asked)

    def turn(self, tail: list[int], new_tokens: int = 6, **asked: int) -> int:
        """A whole turn; its number."""
        number = self.send(tail, new_tokens, **asked)
        self.bench.run()
        self.history = [*self.bench.prompts[number], *self.bench.channel.output(number)]
        check_everything(self.bench.scheduler.cache)
        return number

    def stopped_turn(self, tail: list[int], seen: int, lag: int, new_tokens: int = 120) -> None:
        """A turn whose client finds a stop string that ends with the `seen`-th token, and reports it `lag` tokens
        later; the core may have ended the turn by then."""
        number = self.send(tail, new_tokens, stop=("a stop string",))
        while len(self.bench.channel.streams.get(number, [])) < min(seen + lag, new_tokens):
            self.bench.scheduler.step()
        if seen + lag > new_tokens:
            self.bench.run()
        self.history = [*self.bench.prompts[number], *self.bench.channel.streams[number][:seen]]
        self.bench.scheduler.stop(number, seen)
        self.bench.run()
        check_everything(self.bench.scheduler.cache)
