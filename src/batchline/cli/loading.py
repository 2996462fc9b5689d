"""Settings from wherever they were written, and for a wrong one, where that is and what was expected."""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import click
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from batchline.cli.options import FLAGS, TABLES, flag, variable
from batchline.settings import Settings

RUN_VARIABLES = tuple(map(variable, ("base_url", "api_key", "project_id")))
"""Where `batchline run` finds a server: not settings of the service, and no strangers to it either."""


def load_settings(**flags: str | None) -> Settings:
    """Settings from the flags that were given, the environment and the TOML file."""
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    _refuse_tables_in_variables()
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


def _refuse_tables_in_variables() -> None:
    """A variable would be read as JSON, and its faults told as if they stood in the file."""
    for name in TABLES:
        if _environment().get(variable(name)):
            raise click.UsageError(f"{variable(name)}: {name} are tables of the TOML file, not a variable")


def _warn_of_strangers() -> None:
    """A variable that is no setting does nothing, which its owner would find out late."""
    known = [*map(variable, Settings.model_fields), *RUN_VARIABLES]
    for stranger in sorted(name for name in _environment() if name.startswith(variable(""))):
        if stranger not in known:
            hint = _nearest(stranger, map(variable, FLAGS))
            click.echo(f"Warning: {stranger} is no setting of this version and is ignored{hint}", err=True)


def _explain(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """The value itself is never repeated: it may be a secret, or a URL that carries one."""
    if not error["loc"]:
        return _explain_tables_at_odds(error, given)
    place = tuple(map(str, error["loc"]))
    source = _source(place[0], given) if len(place) == 1 else f"{_dotted(place)} in {_file(given)}"
    name, fields = _looked_up(place)
    if error["type"] == "extra_forbidden":
        return f"{source}: there is no such setting{_what_was_meant(name, fields, error)}"
    return f"{source}: {error['msg']}. Expected: {fields[name].description}"


def _explain_tables_at_odds(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """Each table is fine by itself; the text begins with the one to put right."""
    place, _, text = str(error["ctx"]["error"]).partition(": ")
    return f"{place} in {_file(given)}: {text}"


def _looked_up(place: tuple[str, ...]) -> tuple[str, Mapping[str, FieldInfo]]:
    """A setting's name, and among which fields it must stand: those of the service, or those of a table's entry."""
    if place[0] in TABLES and len(place) > 2:
        return place[2], TABLES[place[0]].model_fields
    return place[0], Settings.model_fields


def _what_was_meant(name: str, fields: Mapping[str, FieldInfo], error: ErrorDetails) -> str:
    if name in Settings.model_fields:
        return "; settings of the service stand above the first table of the file"
    if len(error["loc"]) > 1 and isinstance(error["input"], dict):
        return '; a name with dots stands in quotes, as in [models."small-1.5"]'
    return _nearest(name, fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _source(name: str, given: Mapping[str, Any]) -> str:
    """Where a person has to look to put the setting right."""
    if name in given:
        return flag(name)
    if variable(name) in _environment():
        return variable(name)
    return f"{name} in {_file(given)}"


def _file(given: Mapping[str, Any]) -> str:
    return str(given.get("config") or _environment()[variable("config")])


def _dotted(place: tuple[str, ...]) -> str:
    """As TOML writes it, with quotes around what is not a bare key."""
    return ".".join(part if part.replace("-", "").replace("_", "").isalnum() else f'"{part}"' for part in place)


def _environment() -> dict[str, str]:
    return {name.upper(): value for name, value in os.environ.items()}
