"""Options of the form NAME=VALUE: a patch of request bodies, and metadata."""

from typing import Any

import click
from msgspec import DecodeError
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.domain.merge_patch import MergePatch


class Assignment(click.ParamType[tuple[str, str]]):
    """A name and a value."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Split at the first equals sign."""
        if isinstance(value, tuple):
            return value
        name, found, text = value.partition("=")
        if not found or not name:
            self.fail("expected NAME=VALUE", param, ctx)
        return name, text


set_option = click.option(
    "--set",
    "assignments",
    type=Assignment(),
    multiple=True,
    help="Set a field of every body, such as model=NAME or response_format.type=json_object; null removes it. "
    "Can be repeated.",
)
metadata_option = click.option(
    "--metadata", type=Assignment(), multiple=True, help="Metadata of the batch. Can be repeated."
)


def patch_of(assignments: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return a JSON merge patch (RFC 7396). A value is JSON if it can be read as such, else a text.

    Raise UsageError if it cannot be applied.
    """
    patch: dict[str, Any] = {}
    for name, text in assignments:
        *path, last = name.split(".")
        place = patch
        for part in path:
            inner = place.setdefault(part, {})
            if not isinstance(inner, dict):
                raise click.UsageError(f"--set {name}: {part} is set to a value and to an object")
            place = inner
        place[last] = _value(text)
    try:
        MergePatch.parse(encode_json(patch))
    except ValueError:
        raise click.UsageError("--set: a value is nested too deep") from None
    return patch


def _value(text: str) -> Any:
    try:
        return decode_json(text.encode())
    except (DecodeError, UnicodeEncodeError):
        return text
