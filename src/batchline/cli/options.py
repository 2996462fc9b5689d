"""Turns settings into flags. Every setting is a flag, except the tables, which only the file can contain."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from batchline.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])

TABLES: dict[str, type[BaseModel]] = {
    name: get_args(field.annotation)[1]
    for name, field in Settings.model_fields.items()
    if get_origin(field.annotation) is dict
}
"""The model of the entries of each table of the file."""
FLAGS = {name: field for name, field in Settings.model_fields.items() if name not in TABLES}


def settings_options(*names: str) -> Callable[[_Command], _Command]:
    """Add flags for the named settings to a command, or for all settings if none is named."""

    def decorate(command: _Command) -> _Command:
        # Click lists decorated options from the last applied to the first.
        for name in reversed(names or tuple(FLAGS)):
            command = _option(name)(command)
        return command

    return decorate


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"BATCHLINE_{name.upper()}"


def default_text(field: FieldInfo) -> str:
    """Return a default value as a user would write it."""
    if field.is_required():
        return "required"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple | frozenset):
        return ",".join(field.default) or "none"
    return "none" if field.default is None else str(field.default)


def _option(name: str) -> Callable[[_Command], _Command]:
    field = FLAGS[name]
    return click.option(
        flag(name),
        name,
        metavar=name.rpartition("_")[2].upper(),
        help=f"{field.description} [{variable(name)}; default {default_text(field)}]",
    )
