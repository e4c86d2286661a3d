"""`serve`: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence

import click

from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import options_of, with_dashes, with_model
from sglang_jax.config import ServerConfig

NAMES_FLAG = "--served-model-name"


class ServeCommand(GroupedCommand):
    """A command whose `--served-model-name` takes several values, which click's options cannot."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.with_one_name_per_flag(ctx, args))

    def with_one_name_per_flag(self, ctx: click.Context, args: Sequence[str]) -> list[str]:
        """Returns the arguments with the flag before each name. The last name is the model if there is no other, as in
        `--served-model-name NAME MODEL`. Raises `UsageError` for unknown options."""
        expanded: list[str] = []
        names_end = None
        taking = False
        for word in args:
            if taking and not word.startswith("-"):
                expanded += [NAMES_FLAG, word]
                names_end = len(expanded)
                continue
            taking = with_dashes(word) == NAMES_FLAG
            if not taking:
                expanded.append(word)
        if names_end is None:
            return list(args)
        values, _, _ = self.make_parser(ctx).parse_args(args=list(expanded))
        model_is_given = any(values.get(name) is not None for name in ("model_path", "config"))
        if not model_is_given and not isinstance(values.get("model"), str) and expanded.count(NAMES_FLAG) > 1:
            del expanded[names_end - 2]
        return expanded


@click.command(cls=ServeCommand, short_help="Serve a model over HTTP.")
@click.argument("model", required=False)
@options_of(config=ServerConfig)
def serve(config: ServerConfig, model: str | None) -> int:
    """Serve MODEL (as for --model-path) over HTTP: OpenAI's routes and SGLang's native ones."""
    config = with_model(config, model)
    from sglang_jax.batch.served.routes import serve_batches  # imported late: --help must be fast
    from sglang_jax.server.serve import run

    return run(config, make_service=serve_batches)
