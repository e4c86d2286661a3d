"""`eval gsm8k` and `eval mmlu`: the accuracy of generated answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from pydantic import BaseModel, ConfigDict, Field

from sglang_jax.cli.bench.commands import LoadProgress
from sglang_jax.cli.eval.answering import Asking, ask_engine, ask_server
from sglang_jax.cli.eval.gsm8k import read_gsm8k
from sglang_jax.cli.eval.mmlu import read_mmlu
from sglang_jax.cli.eval.task import Reply, Result, Score, Task, Verdict, judge, score, score_by_subject
from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import Command, flag_name, options_of, with_model
from sglang_jax.cli.result_file import check_result_file, writing
from sglang_jax.cli.server_client import first_model, open_client
from sglang_jax.cli.starting import print_loading, start_engine
from sglang_jax.config import EngineConfig, Environment, PositiveInt

ALL_ANSWERED, SOME_FAILED = 0, 1

ERRORS_SHOWN = 5
"""How many different errors are printed; all are in the file of `--json`."""


class EvalConfig(BaseModel):
    """Which questions are asked, of whom, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_shots: Annotated[int, Field(ge=0)] | None = Field(
        None, description="solved examples before each question; default: 5, and 0 for mmlu with --chat"
    )
    num_questions: PositiveInt | None = Field(None, description="maximum questions; default: all")
    base_url: str | None = Field(
        None, description="URL of a running server to ask; default: load the model in this process"
    )
    api_key: str | None = Field(
        None, description="API key, if the server requires one; also read from SGLANG_JAX_API_KEY"
    )
    num_threads: PositiveInt = Field(64, description="maximum concurrent requests to the server")
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 is greedy")
    max_new_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of an answer; default: gsm8k 512; mmlu 4, and 2048 with --chat"
    )


class Gsm8kConfig(EvalConfig):
    data: Path = Field(description="JSON lines file of GSM8K's authors, such as test.jsonl: `question` and `answer`")


class MmluConfig(EvalConfig):
    data: tuple[Path, ...] = Field(
        min_length=1,
        description="folder of MMLU's authors with test/ and dev/, or a CSV file of questions; may be repeated",
    )


@dataclass(frozen=True, slots=True)
class Answers:
    """What one run brought. `seconds`: from the first request to the last reply."""

    model: str
    replies: Sequence[Reply]
    seconds: float


def _common_options(command: Command) -> Command:
    """Adds the options that are not fields of a config."""
    for option in (
        click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                     help="write the score and every answer to this file"),
        click.option("--chat/--completion", default=False, show_default="completion",
                     help="ask in a chat message, or let the model continue a text"),
        click.argument("model", required=False),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command(cls=GroupedCommand, short_help="Score answers to the word problems of GSM8K.")
@_common_options
@options_of("json", "chat", "completion", evaluation=Gsm8kConfig, engine=EngineConfig)
def eval_gsm8k(
    evaluation: Gsm8kConfig, engine: EngineConfig, model: str | None, chat: bool, json_file: Path | None
) -> int:
    """Score MODEL (as for --model-path; with --base-url, the name in requests) on GSM8K: word problems whose answers
    are numbers. The last number of a reply counts."""
    task = read_gsm8k(
        evaluation.data, num_shots=evaluation.num_shots, num_questions=evaluation.num_questions, chat=chat
    )
    return _evaluate(task, evaluation, with_model(engine, model), chat=chat, json_file=json_file)


@click.command(cls=GroupedCommand, short_help="Score answers to the multiple-choice questions of MMLU.")
@_common_options
@options_of("json", "chat", "completion", evaluation=MmluConfig, engine=EngineConfig)
def eval_mmlu(
    evaluation: MmluConfig, engine: EngineConfig, model: str | None, chat: bool, json_file: Path | None
) -> int:
    """Score MODEL (as for --model-path; with --base-url, the name in requests) on MMLU: multiple-choice questions by
    subject. The letter at the start of a completion counts, or the one after `Answer:` with --chat."""
    task = read_mmlu(evaluation.data, num_shots=evaluation.num_shots, num_questions=evaluation.num_questions, chat=chat)
    return _evaluate(task, evaluation, with_model(engine, model), chat=chat, json_file=json_file)


def _evaluate(task: Task, evaluation: EvalConfig, engine: EngineConfig, *, chat: bool, json_file: Path | None) -> int:
    """Asks, prints the score and writes the file. Returns the exit status."""
    check_result_file(json_file, "--json")
    asking = Asking(chat, evaluation.temperature, evaluation.max_new_tokens or task.max_new_tokens)
    if evaluation.base_url is None:
        answers = _ask_engine(task, engine, asking)
    else:
        answers = asyncio.run(_ask_server(task, evaluation.base_url, evaluation, engine, asking))
    results = judge(task, answers.replies)
    errors = Counter(result.reply.error for result in results if result.verdict is Verdict.FAILED)
    if errors.total() < len(results):
        click.echo(report(task, answers, results, chat=chat))
    for error, count in errors.most_common(ERRORS_SHOWN):
        click.echo(f"failed {count} times: {error}", err=True)
    if json_file is not None:
        settings = evaluation.model_dump(mode="json", exclude={"api_key"})
        if evaluation.base_url is None:
            settings["engine"] = engine.model_dump(mode="json")
        content = {**settings, **asdict(asking), **figures(task, answers, results)}
        _write(json_file, content)
    return SOME_FAILED if errors else ALL_ANSWERED


def _write(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    with writing(file, "--json"):
        # A path may have half of a surrogate pair, whose escape is the same in JSON.
        file.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


async def _ask_server(
    task: Task, base_url: str, evaluation: EvalConfig, engine: EngineConfig, asking: Asking
) -> Answers:
    others = sorted(engine.model_fields_set - {"model_path"})
    if others:
        given = ", ".join(map(flag_name, others))
        raise click.UsageError(f"{given}: only for an engine in this process, not for the server of --base-url")
    async with open_client(base_url, evaluation.api_key or Environment().api_key) as client:
        model = engine.model_path if "model_path" in engine.model_fields_set else await first_model(client)
        with _progress(task) as progress:
            replies, seconds = await ask_server(
                client, model, task, asking, at_once=evaluation.num_threads, on_done=progress.update
            )
    return Answers(model, replies, seconds)


def _ask_engine(task: Task, engine: EngineConfig, asking: Asking) -> Answers:
    print_loading(engine)
    with start_engine(engine) as running, _progress(task) as progress:
        replies, seconds = ask_engine(running, task, asking, on_done=progress.update)
    return Answers(engine.model_path, replies, seconds)


def _progress(task: Task) -> LoadProgress:
    return LoadProgress(len(task.questions), bar=sys.stderr.isatty())


def figures(task: Task, answers: Answers, results: Sequence[Result]) -> dict[str, Any]:
    """Returns what `--json` writes: the score of all and by subject, seconds, and the results one by one."""
    tokens = sum(reply.output_tokens for reply in answers.replies)
    return {
        "task": task.name,
        "model": answers.model,
        "num_shots": task.num_shots,
        **asdict(score(results)),
        "latency": answers.seconds,
        "output_tokens": tokens,
        "output_throughput": tokens / answers.seconds,
        "subjects": {subject: asdict(one) for subject, one in score_by_subject(results).items()},
        "examples": {question.subject: question.examples for question in task.questions},
        "results": [
            {
                "subject": result.question.subject,
                "question": result.question.text,
                "answer": result.question.answer,
                "reply": result.reply.text,
                "predicted": result.predicted,
                "verdict": result.verdict,
                "output_tokens": result.reply.output_tokens,
                "cut": result.reply.cut,
                "error": result.reply.error,
            }
            for result in results
        ],
    }


def report(task: Task, answers: Answers, results: Sequence[Result], *, chat: bool) -> str:
    """Returns the score as text: by subject if there are several, of all, and as lines that scripts collect."""
    whole, subjects = score(results), score_by_subject(results)
    tokens = sum(reply.output_tokens for reply in answers.replies)
    labels = json.dumps({"model": answers.model, "eval": task.name, "api": "chat" if chat else "completion"})
    lines = [*(_table(subjects) if len(subjects) > 1 else ())]
    lines += [
        f"Questions: {whole.questions}",
        f"Accuracy: {whole.accuracy:.3f}",
        f"Invalid: {whole.invalid:.3f}",
        *([f"Failed: {whole.failed:.3f}"] if whole.failed else []),
        *([f"At --max-new-tokens: {whole.cut:.3f}"] if whole.cut else []),
        f"Latency: {answers.seconds:.3f} s",
        f"Output throughput: {tokens / answers.seconds:.3f} token/s",
        f"[METRIC] {task.metric}={whole.accuracy:.3f} labels={labels}",
        f"[METRIC] {task.name}_latency={answers.seconds:.3f} labels={labels}",
    ]
    return "\n".join(lines)


def _table(subjects: Mapping[str, Score]) -> list[str]:
    width = max(map(len, subjects))
    return [
        f"{'subject':{width}}  questions  accuracy  invalid",
        *(
            f"{name:{width}}  {one.questions:>9}  {one.accuracy:>8.3f}  {one.invalid:>7.3f}"
            for name, one in subjects.items()
        ),
        "",
    ]
