"""Shows the progress of a run: a bar on a terminal, otherwise regular lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import click
from tqdm import tqdm

from sglang_jax.batch.answers import Answer
from sglang_jax.batch.journal import Kind
from sglang_jax.batch.source import Source

REPORT_SECONDS = 30.0
"""Seconds between two lines without a terminal."""

BAR_SECONDS = 0.5
"""Seconds between two updates of the bar."""


@dataclass(slots=True)
class Figures:
    """Counters of a run. `before`: lines that earlier runs finished; `failed_before`: those of them in the error file;
    `num_read`: lines read so far, including those of earlier runs; `share_read`: the share of the input that was read,
    from 0 to 1; `seconds`: time since the engines started to serve."""

    before: int = 0
    failed_before: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_read: int = 0
    share_read: float = 0.0
    seconds: float = 0.0

    @property
    def lines_done(self) -> int:
        """Lines finished by this run and earlier ones."""
        return self.before + self.finished

    @property
    def lines_failed(self) -> int:
        return self.failed_before + self.failed

    @property
    def lines_expected(self) -> int | None:
        """Estimated lines of the input; None before anything was read."""
        return round(self.num_read / self.share_read) if self.share_read > 0 else None

    @property
    def eta_seconds(self) -> float | None:
        """Estimated seconds for the remaining lines, at the average speed; None before a line has finished."""
        if self.lines_expected is None or not self.finished:
            return None
        return max(0, self.lines_expected - self.lines_done) * self.seconds / self.finished

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> str:
        parts = [f"{count_lines(self.lines_done)} done"]
        if self.before:
            parts[0] += f" ({self.before} by earlier runs)"
        parts.append(f"{self.lines_failed} in the error file")
        if not self.finished:
            return ", ".join(parts)
        parts.append(
            f"{self.output_tokens} output tokens in {self.seconds:.1f} s ({self.output_tokens_per_second:.1f}/s)"
        )
        if self.prompt_tokens:
            hit = 100 * self.cached_tokens / self.prompt_tokens
            parts.append(f"{self.prompt_tokens} prompt tokens, {hit:.1f} % of them from the prefix cache")
        return ", ".join(parts)


def count_lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


class RunProgress:
    """Counts finished lines and shows the progress. `source`: reports how much of the input was read; `clock`:
    seconds."""

    def __init__(
        self,
        figures: Figures,
        source: Source,
        *,
        terminal: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.figures = figures
        self._source = source
        self._clock = clock
        self._begin = clock()
        self._shown_at = self._begin
        self._bar = _make_bar(figures.lines_done) if terminal else None

    def finished(self, answer: Answer) -> None:
        figures = self.figures
        figures.finished += 1
        figures.failed += answer.kind is Kind.ERROR
        figures.prompt_tokens += answer.tokens.prompt
        figures.cached_tokens += answer.tokens.cached
        figures.output_tokens += answer.tokens.output
        now = self._clock()
        if now - self._shown_at >= (REPORT_SECONDS if self._bar is None else BAR_SECONDS):
            self._shown_at = now
            self._show()

    def close(self) -> None:
        """Shows the final state and closes the bar."""
        self._measure()
        if self._bar is not None:
            self._show()
            self._bar.close()

    def _measure(self) -> None:
        self.figures.seconds = self._clock() - self._begin
        self.figures.num_read, self.figures.share_read = self._source.num_read, self._source.share_read

    def _show(self) -> None:
        self._measure()
        figures = self.figures
        if self._bar is None:
            click.echo(self._report(), err=True)
            return
        self._bar.total = figures.lines_expected
        self._bar.n = figures.lines_done
        self._bar.set_postfix_str(f"{figures.output_tokens_per_second:.0f} tok/s, {figures.lines_failed} failed")

    def _report(self) -> str:
        figures = self.figures
        expected = "?" if figures.lines_expected is None else str(figures.lines_expected)
        about = "" if figures.share_read >= 1.0 else "about "
        eta = "?" if figures.eta_seconds is None else tqdm.format_interval(figures.eta_seconds)
        return (
            f"{figures.lines_done} of {about}{expected} lines done, {figures.lines_failed} failed, "
            f"{figures.output_tokens_per_second:.1f} output tokens/s, ETA {eta}"
        )


def _make_bar(done: int) -> tqdm[None]:
    return tqdm(initial=done, unit="line", desc="Batch", dynamic_ncols=True, smoothing=0.05)
