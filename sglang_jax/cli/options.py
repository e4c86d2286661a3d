"""Makes command-line flags from the fields of pydantic models, so that each option is declared once. See
docs/architecture.md for why `pydantic_settings.CliApp` cannot."""

from __future__ import annotations

import functools
import logging
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sglang_jax import logs
from sglang_jax.config import (
    PASS_SUMMARIES,
    Choice,
    EngineConfig,
    LogFormat,
    OptionGroup,
    OtherEnvironment,
    ServerConfig,
    group_of,
    group_of_keyword,
)
from sglang_jax.config.suggestions import did_you_mean, value_not_implemented
from sglang_jax.spellings import (
    ALIASES,
    NEEDLESS,
    OTHER_ALIASES,
    OTHER_SHORT_FLAGS,
    REFUSED,
    SHORT_FLAGS,
    OtherFlag,
    refusal,
    refused_value,
)

HIDDEN_PREFIX = "hidden_"
"""Prefix of hidden options' parameter names: two options with the same name would share a value in click."""

NOTES = f"{__name__}.notes"
"""The key in a command's context for notes on options without effect."""

logger = logging.getLogger(__name__)

Command = Callable[..., Any]
Config = TypeVar("Config", bound=EngineConfig)


def flag_name(field: str) -> str:
    """Returns the flag of a field: `--page-size` for `page_size`."""
    return "--" + field.replace("_", "-")


def option_by_all_names(field: str, **attributes: Any) -> Callable[[Command], Command]:
    """Returns a click option for an engine's field with all its aliases (`--page-size`, `--block-size`), for commands
    that do not build an engine's config."""
    return click.option(flag_name(field), *_other_names(field, ALIASES, frozenset()), field, **attributes)


def with_dashes(token: str) -> str:
    """Normalizes an option's name for click: `--page_size` is `--page-size`."""
    return token.replace("_", "-")


def options_of(*taken: str, **models: type[BaseModel]) -> Callable[[Command], Command]:
    """Gives a click command one flag per field of `models`, and `--config FILE`, and calls it with each model under its
    keyword here. Fields of an engine's model also have their aliases (`sglang_jax.spellings`), except those in `taken`,
    which are options of the command itself. The keyword of another model may be the name of its group in help. Flags
    override the file, and the file overrides defaults. An invalid value ends the command with a line that names the
    flag or key, the value and the limit."""
    owners = {field: keyword for keyword, model in models.items() for field in model.model_fields}
    aliases = {model: ALIASES if issubclass(model, EngineConfig) else OTHER_ALIASES for model in models.values()}
    field_of = {
        alias: field
        for model in models.values()
        for field in model.model_fields
        for alias in aliases[model].get(field, ())
    }
    if len(owners) != sum(len(model.model_fields) for model in models.values()):
        raise TypeError(f"two of {', '.join(model.__name__ for model in models.values())} have a field in common")

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, config: Path | None, **parameters: Any) -> Any:
            file_values = {} if config is None else read_config_file(config, list(owners), field_of)
            given: dict[str, dict[str, Any]] = {keyword: {} for keyword in models}
            for field, keyword in owners.items():
                value = parameters.pop(field)
                if value is not None and value != ():  # nothing was given
                    given[keyword][field] = value
                elif field in file_values:
                    given[keyword][field] = file_values[field]
            from_file = {field for field in file_values if field in given[owners[field]]}
            built: dict[str, BaseModel] = {}
            try:
                for keyword, model in models.items():
                    built[keyword] = _build(model, given[keyword], config, from_file)
                if any(issubclass(model, EngineConfig) for model in models.values()):
                    _notes().extend(OtherEnvironment.read().notes())
            finally:
                _print_notes(built.values())
            return command(**built, **parameters)

        decorated: Command = run
        own = {*owners, *taken}
        for keyword, model in reversed(models.items()):
            engine = issubclass(model, EngineConfig)
            for name in reversed(model.model_fields):
                group = group_of(name) if engine else group_of_keyword(keyword)
                decorated = _option(name, model, group, _other_names(name, aliases[model], own))(decorated)
            if engine:
                decorated = _explained_options(own)(decorated)
                decorated = _list_passes(decorated)
        return click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="YAML or JSON file of these options, named with dashes or underscores; flags win over it",
        )(decorated)

    return decorate


def _list_passes(command: Command) -> Command:
    def callback(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            width = max(len(each.value) for each in PASS_SUMMARIES)
            for each, summary in PASS_SUMMARIES.items():
                click.echo(f"{each.value:{width}}  {summary}")
            context.exit()

    return click.option(
        "--list-passes",
        cls=GroupedOption,
        group=OptionGroup.DEVELOPMENT,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=callback,
        help="show the passes that rewrite a model of --model-impl transformers, in order, and exit",
    )(command)


def one_model(positional: str | None, by_flag: str | None) -> str | None:
    if positional is not None and by_flag is not None and positional != by_flag:
        raise click.UsageError(f"two models are given: {positional} and --model-path {by_flag}")
    return positional if by_flag is None else by_flag


def with_model(config: Config, model: str | None) -> Config:
    """Returns the options with the model of the positional argument. Raises `UsageError` if they name another one."""
    chosen = one_model(model, config.model_path if "model_path" in config.model_fields_set else None)
    return config if chosen is None else config.model_copy(update={"model_path": chosen})


def _option(
    name: str, model: type[BaseModel], group: OptionGroup, other_names: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Returns a click option that is None unless given: pydantic has the default and the limits."""
    field = model.model_fields[name]
    kind = _plain_type(field.annotation)
    names = (flag_name(name), *other_names, name)
    help_text = fields_as_flags(field.description or "", model) + _default_text(field)
    if kind is bool:
        return click.option(*names, cls=_FieldOption, group=group, is_flag=True, default=None, help=help_text)
    several = typing.get_origin(kind) is tuple
    word = _parameter_type(typing.get_args(kind)[0] if several else kind)
    return click.option(
        *names, cls=_FieldOption, group=group, type=word, multiple=several, default=None, help=help_text
    )


class GroupedOption(click.Option):
    """An option of a group in help. Options of any other class are in `OptionGroup.COMMAND`."""

    def __init__(self, *arguments: Any, group: OptionGroup, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.group = group


class _FieldOption(GroupedOption):
    """The option of a field. Messages use only its first name."""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        return f"'{self.opts[0]}'"


def _other_names(field: str, aliases: Mapping[str, Sequence[str]], own: Set[str]) -> list[str]:
    short = [SHORT_FLAGS[field]] if field in SHORT_FLAGS else []
    return short + [flag_name(alias) for alias in aliases.get(field, ()) if alias not in own]


def _explained_options(own: Set[str]) -> Callable[[Command], Command]:
    """Adds hidden options of other engines: some have no effect and print a note, others are refused with a reason."""

    def decorate(command: Command) -> Command:
        for name, flag in NEEDLESS.items():
            if name not in own:
                command = _hidden_option(name, flag, _note)(command)
        return refused_options({name: flag for name, flag in REFUSED.items() if name not in own})(command)

    return decorate


def _pairs(model: type[BaseModel], aliases: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    return [(field, alias) for field in model.model_fields for alias in aliases.get(field, ())]


def refused_options(table: Mapping[str, OtherFlag]) -> Callable[[Command], Command]:
    """Adds hidden options that are refused with a reason."""

    def decorate(command: Command) -> Command:
        for name, flag in table.items():
            command = _hidden_option(name, flag, _refuse)(command)
        return command

    return decorate


def _hidden_option(
    name: str, flag: OtherFlag, answer: Callable[[str, OtherFlag], None]
) -> Callable[[Command], Command]:
    def callback(context: click.Context, parameter: click.Parameter, value: object) -> None:
        if value is not None:
            answer(flag_name(name), flag)

    return click.option(
        *([OTHER_SHORT_FLAGS[name]] if name in OTHER_SHORT_FLAGS else []),
        flag_name(name),
        HIDDEN_PREFIX + name,
        is_flag=not flag.takes_value,
        default=None,
        hidden=True,
        expose_value=False,
        callback=callback,
    )


def _note(name: str, flag: OtherFlag) -> None:
    _notes().append(f"{name} has no effect: {flag.note}")


def _notes() -> list[str]:
    """The notes for `_print_notes`, which are kept because the log format is not known yet."""
    notes: list[str] = click.get_current_context().meta.setdefault(NOTES, [])
    return notes


def _print_notes(configs: Iterable[BaseModel]) -> None:
    """Prints the notes; as log lines if the log is JSON, because its reader parses every line."""
    notes: list[str] = click.get_current_context().meta.pop(NOTES, [])
    servers = [config for config in configs if isinstance(config, ServerConfig)]
    if notes and servers and servers[0].log_format is LogFormat.JSON:
        logs.configure(servers[0].log_level.upper(), as_json=True)
        for note in notes:
            logger.warning("%s", note)
    else:
        for note in notes:
            click.echo(note, err=True)


def _refuse(name: str, flag: OtherFlag) -> None:
    raise click.UsageError(f"{name} is {flag.note}")


class _ChoiceType(click.Choice[str]):
    def __init__(self, kind: type[Choice]) -> None:
        super().__init__([member.value for member in kind])
        self._kind = kind

    def normalize_choice(self, choice: object, ctx: click.Context | None) -> str:
        return str(choice)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._kind(value).value
        except ValueError:
            note = refused_value(self._kind.__name__, str(value))
            if note is not None:
                name = "" if param is None else f"{param.opts[0]} "
                raise click.UsageError(f"{name}{value} is {note}; choose from {', '.join(self.choices)}") from None
            return super().convert(value, param, ctx)


def _parameter_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Choice):
        return _ChoiceType(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return click.Choice([member.value for member in kind])
    if kind is Path:
        return click.Path(path_type=Path)
    return {int: click.INT, float: click.FLOAT}.get(kind, click.STRING)


def _plain_type(annotation: Any) -> Any:
    """Returns the type for the command line: int for `Annotated[int, ...] | None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return _plain_type(members[0])
    return annotation


def _default_text(field: FieldInfo) -> str:
    """Returns the help text of a default. None depends on the model or device, and the description explains it."""
    if field.default in (PydanticUndefined, None, ()) or isinstance(field.default, bool):
        return ""
    return f"  [default: {field.default}]"


def read_config_file(path: Path, known: list[str], field_of: Mapping[str, str]) -> dict[str, Any]:
    """Returns the file's values by field name. `known`: the fields; `field_of`: fields by their aliases."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config {path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise click.UsageError(f"--config {path} must contain a mapping of options, got a {type(content).__name__}")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        field = name if name in known else field_of.get(name, name)
        if field not in known:
            if (reason := refusal(name)) is not None:
                raise click.UsageError(f"--config {path}: {name} is {reason}")
            if name in NEEDLESS:
                _note(f"--config {path}: {name}", NEEDLESS[name])
                continue
            show = (lambda one: one.replace("_", "-")) if "-" in str(key) else str  # in the user's style
            meant = did_you_mean(field, known, others=[*NEEDLESS, *REFUSED], show=show)
            raise click.UsageError(f"--config {path} has an unknown option {key!r}" + (f"; {meant}" if meant else ""))
        if field in values:
            raise click.UsageError(f"--config {path} sets {field} twice")
        values[field] = value
    return values


def _build(model: type[BaseModel], values: dict[str, Any], config: Path | None, from_file: set[str]) -> BaseModel:
    try:
        return model(**values)
    except ValidationError as error:
        lines = [_error_line(problem, model, config, from_file) for problem in error.errors()]
        raise click.UsageError("\n".join(lines)) from error


def _error_line(problem: Any, model: type[BaseModel], config: Path | None, from_file: set[str]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return fields_as_flags(message, model)
    field = str(problem["loc"][0])
    if problem["type"] == "missing":
        return f"Missing option {flag_name(field)}"
    where = f"{field} in {config}" if field in from_file else flag_name(field)
    if (note := value_not_implemented(model, field, problem["input"])) is not None:
        return f"{where}: {problem['input']} is {note}; must be {message.removeprefix('Input should be ')}"
    if message.startswith("Input should be "):
        return f"{where} must be {message.removeprefix('Input should be ')}, got {problem['input']!r}"
    return f"Invalid value for {where}: {problem['input']!r}: {message[0].lower()}{message[1:]}"


def fields_as_flags(message: str, model: type[BaseModel]) -> str:
    """Replaces names of fields of `model` in an error by their flags, except within paths, words or quotation marks,
    and names that may be plain words (`device`)."""
    names = [re.escape(name) for name in model.model_fields if "_" in name]
    return re.sub(
        rf"(?<![\w/.'\"-])({'|'.join(names)})(?![\w/'\"(=-]|\.\w)", lambda match: flag_name(match[1]), message
    )
