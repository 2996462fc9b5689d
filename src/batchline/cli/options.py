"""Settings as flags: every field of Settings is an option, and a wrong value is told where it was written."""

import os
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from batchline.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])


def settings_options(*names: str) -> Callable[[_Command], _Command]:
    """Flags for the named settings, or for all of them."""

    def decorate(command: _Command) -> _Command:
        # Click lists decorated options from the last applied to the first.
        for name in reversed(names or tuple(Settings.model_fields)):
            command = _option(name)(command)
        return command

    return decorate


def load_settings(**flags: str | None) -> Settings:
    """Settings from the flags that were given, the environment and the TOML file."""
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    try:
        settings = Settings(**given)
    except ValidationError as refused:
        raise click.UsageError("\n".join(_explain(error, given) for error in refused.errors())) from None
    except (OSError, ValueError) as unreadable:
        raise click.UsageError(f"{_source('config', given)}: the file cannot be read as TOML: {unreadable}") from None
    if settings.config is not None and not settings.config.is_file():
        raise click.UsageError(f"{_source('config', given)}: there is no file {settings.config}")
    _warn_of_strangers()
    return settings


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return f"BATCHLINE_{name.upper()}"


def default_text(field: FieldInfo) -> str:
    """A default as a person would write it."""
    if field.default is None:
        return "none"
    return ",".join(field.default) if isinstance(field.default, tuple) else str(field.default)


def _option(name: str) -> Callable[[_Command], _Command]:
    field = Settings.model_fields[name]
    return click.option(
        flag(name),
        name,
        metavar=name.rpartition("_")[2].upper(),
        help=f"{field.description} [{variable(name)}; default {default_text(field)}]",
    )


def _warn_of_strangers() -> None:
    """A variable that is no setting does nothing, which its owner would find out late."""
    known = [variable(name) for name in Settings.model_fields]
    for stranger in sorted(name for name in map(str.upper, os.environ) if name.startswith(variable(""))):
        if stranger not in known:
            near = get_close_matches(stranger, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            click.echo(f"Warning: {stranger} is no setting of this version and is ignored{hint}", err=True)


def _explain(error: ErrorDetails, given: dict[str, Any]) -> str:
    """The value itself is never repeated: it may be a secret, or a URL that carries one."""
    name = str(error["loc"][0])
    if name not in Settings.model_fields:
        near = get_close_matches(name, Settings.model_fields, n=1)
        return f"{_source(name, given)}: there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
    return f"{_source(name, given)}: {error['msg']}. Expected: {Settings.model_fields[name].description}"


def _source(name: str, given: dict[str, Any]) -> str:
    """Where a person has to look to put the setting right."""
    environment = {known.upper(): value for known, value in os.environ.items()}
    if name in given:
        return flag(name)
    if variable(name) in environment:
        return variable(name)
    return f"{name} in {given.get('config') or environment[variable('config')]}"
