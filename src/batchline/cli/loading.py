"""Loads settings. For a wrong one, reports where it was set and what was expected."""

import os
import re
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
"""Variables with which client commands find a server. They are not settings, but they are known variables."""
BASE_URL_VARIABLES = (RUN_VARIABLES[0], "OPENAI_BASE_URL")
KEY_VARIABLES = (RUN_VARIABLES[1], "OPENAI_API_KEY")
"""Variables that name the server and the key. Those of OpenAI's clients are used if the first ones are not set."""


def load_settings(**flags: str | None) -> Settings:
    """Load the settings from the given flags, the environment and the TOML file. Raise UsageError."""
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    _refuse_tables_in_variables()
    try:
        settings = Settings(**given)
    except ValidationError as invalid:
        raise click.UsageError("\n".join(_explain(error, given) for error in invalid.errors())) from None
    except (OSError, ValueError) as unreadable:
        raise click.UsageError(f"{_file(given)}{_unreadable(unreadable)}") from None
    if settings.config is not None and not settings.config.is_file():
        raise click.UsageError(f"{source_of('config', given)}: there is no file {settings.config}")
    _warn_of_unknown_variables()
    return settings


def _refuse_tables_in_variables() -> None:
    """Refuse tables in variables: they would be read as JSON, and errors in them would be reported for the file."""
    for name in TABLES:
        if _environment().get(variable(name)):
            raise click.UsageError(f"{variable(name)}: {name} are tables of the TOML file, not a variable")


def _warn_of_unknown_variables() -> None:
    """Warn of variables that are not settings: they have no effect, which the user would notice late."""
    known = [*map(variable, Settings.model_fields), *RUN_VARIABLES]
    for unknown in sorted(name for name in _environment() if name.startswith(variable(""))):
        if unknown not in known:
            hint = _nearest(unknown, map(variable, FLAGS))
            click.echo(f"Warning: {unknown} is not a setting of this version and is ignored{hint}", err=True)


def _explain(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """Describe an error without the value itself: it may be a secret, or a URL that contains one."""
    if not error["loc"]:
        return _explain_conflict(error, given)
    place = tuple(map(str, error["loc"]))
    source = source_of(place[0], given) if len(place) == 1 else f"{_dotted(place)} in {_file(given)}"
    name, fields = _find_field(place)
    if error["type"] == "extra_forbidden":
        return f"{source}: there is no such setting{_suggestion(name, fields, error)}"
    return f"{source}: {_fault(error)}. Expected: {fields[name].description}"


def _fault(error: ErrorDetails) -> str:
    """Return what is wrong with a value, in words of this program rather than of its libraries."""
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    limit = next((f"{words} {context[name]}" for name, words in _LIMITS.items() if name in context), None)
    return limit or _FAULTS.get(error["type"], "the value is not valid")


_LIMITS = {
    "ge": "the value must be at least",
    "gt": "the value must be greater than",
    "le": "the value must be at most",
    "lt": "the value must be less than",
    "expected": "the value must be",
    "min_length": "the shortest length is",
    "max_digits": "the highest number of digits is",
    "decimal_places": "the highest number of decimals is",
}
_FAULTS = {
    "bool_parsing": "the value is neither on nor off",
    "bool_type": "the value is neither on nor off",
    "decimal_parsing": "the value is not a number",
    "float_parsing": "the value is not a number",
    "float_type": "the value is not a number",
    "int_from_float": "the value is not a whole number",
    "int_parsing": "the value is not a whole number",
    "int_type": "the value is not a whole number",
    "missing": "it is missing",
    "string_pattern_mismatch": "the value does not have the right form",
    "string_type": "the value is not a text",
}


def _unreadable(error: OSError | ValueError) -> str:
    """Return the place and the reason why the file cannot be read, to follow its name.

    A TOML error is not repeated, since it may have a part of a value.
    """
    if isinstance(error, OSError):
        return f": the file cannot be read: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return ": the file cannot be read as TOML: it is not in UTF-8"
    place = re.search(r"\(at (.+)\)", str(error))
    reason = next((f": {words}" for start, words in _TOML_FAULTS.items() if str(error).startswith(start)), "")
    return f"{f', {place[1]}' if place else ''}: the file cannot be read as TOML{reason}"


_TOML_FAULTS = {
    "Cannot declare": "a table is given twice",
    "Cannot mutate": "a key or table is given twice",
    "Cannot overwrite": "a key or table is given twice",
    "Duplicate inline": "a key is given twice",
    "Expected '='": "a key has no = after it",
    "Expected newline": "a value has something after it",
    "Invalid initial": "a key is missing",
    "Invalid statement": "neither a key nor a table begins here",
    "Invalid value": "a value is missing, or is a text without quotes",
    "Unclosed array": "a bracket is not closed",
    "Unterminated string": "a text has no quotes at its end",
}
"""Says in plain words what the parser found, by the words that its error begins with."""


def _explain_conflict(error: ErrorDetails, given: Mapping[str, Any]) -> str:
    """Describe an error between tables that are each valid. Its text begins with the table to correct."""
    place, _, text = str(error["ctx"]["error"]).partition(": ")
    return f"{place} in {_file(given)}: {text}"


def _find_field(place: tuple[str, ...]) -> tuple[str, Mapping[str, FieldInfo]]:
    """Return the name of a setting and the fields it belongs to: those of the service or of a table's entry."""
    if place[0] in TABLES and len(place) > 2:
        return place[2], TABLES[place[0]].model_fields
    return place[0], Settings.model_fields


def _suggestion(name: str, fields: Mapping[str, FieldInfo], error: ErrorDetails) -> str:
    if name in Settings.model_fields:
        return "; settings of the service must be above the first table of the file"
    if len(error["loc"]) > 1 and isinstance(error["input"], dict):
        return '; a name with dots must be in quotes, as in [models."small-1.5"]'
    return _nearest(name, fields)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def source_of(name: str, given: Mapping[str, Any]) -> str:
    """Return where the user has to correct the setting: the flag, the variable, or the line of the file."""
    if name in given:
        return flag(name)
    if variable(name) in _environment():
        return variable(name)
    return f"{name} in {_file(given)}"


def _file(given: Mapping[str, Any]) -> str:
    return str(given.get("config") or _environment()[variable("config")])


def _dotted(place: tuple[str, ...]) -> str:
    """Return a path as TOML writes it, with quotes around parts that are not bare keys."""
    return ".".join(part if part.replace("-", "").replace("_", "").isalnum() else f'"{part}"' for part in place)


def _environment() -> dict[str, str]:
    return {name.upper(): value for name, value in os.environ.items()}
