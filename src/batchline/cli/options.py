"""Turns settings into flags. Every setting is a flag, except the tables, which only the file can contain."""

from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from batchline.cli.help import SettingOption
from batchline.settings import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])

TABLES: dict[str, type[BaseModel]] = {
    name: get_args(field.annotation)[1]
    for name, field in Settings.model_fields.items()
    if get_origin(field.annotation) is dict
}
"""The model of the entries of each table of the file."""
FLAGS = {name: field for name, field in Settings.model_fields.items() if name not in TABLES}


_COMMON = ("data_dir", "config", "host", "port", "upstream_url", "upstream_api_key")
"""The settings that ``--help`` lists. ``--help-all`` lists the others too."""


def settings_options(*names: str) -> Callable[[_Command], _Command]:
    """Add flags for the named settings to a command, or for all settings if none is named."""

    def decorate(command: _Command) -> _Command:
        # Click lists decorated options from the last applied to the first.
        chosen = names or tuple(FLAGS)
        common = [name for name in _COMMON if name in chosen]
        for name in reversed([*common, *(name for name in chosen if name not in common)]):
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


def metavar(name: str) -> str:
    """Return what to type as the value of a setting: ``[on|off]``, ``FILE``, ``SECONDS``."""
    if name in _METAVARS:
        return _METAVARS[name]
    kinds = _kinds(FLAGS[name].annotation)
    if bool in kinds:
        return "[on|off]"
    if SecretStr in kinds:
        return "SECRET"
    last = name.rpartition("_")[2]
    if last in _UNITS:
        return last.upper()
    return "N" if kinds & {int, float, Decimal} else "LIST" if tuple in kinds else last.upper()


_METAVARS = {"config": "FILE", "data_dir": "FOLDER", "host": "ADDRESS", "database_url": "URL"}
_UNITS = frozenset({"bytes", "percent", "port", "seconds", "url"})


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation names, without what wraps them."""
    inner = get_args(annotation)
    if get_origin(annotation) is tuple or not inner:
        return {get_origin(annotation) or annotation}
    return set().union(*map(_kinds, inner if get_origin(annotation) is not Annotated else inner[:1]))


def _option(name: str) -> Callable[[_Command], _Command]:
    field = FLAGS[name]
    return click.option(
        flag(name),
        name,
        cls=click.Option if name in _COMMON else SettingOption,
        metavar=metavar(name),
        help=f"{field.description} [{variable(name)}; default {default_text(field)}]",
    )
