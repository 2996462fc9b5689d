"""Checks keys of objects.

A key consists of components of letters, digits, dots, underscores and hyphens. None of them is "." or "..", so that a
key never leads outside its store.
"""

import re

TEMPORARY = "tmp"
"""The first component that no key has: objects that are being written, and those of checks, lie below it."""

_COMPONENT = re.compile(r"[A-Za-z0-9._-]+")


def components(key: str) -> list[str]:
    """Return the components of a key. Raise ValueError if it is not one."""
    parts = key.split("/")
    if parts[0] == TEMPORARY or not all(map(is_component, parts)):
        raise ValueError(f"Not a key: {key!r}")
    return parts


def is_component(part: str) -> bool:
    """Return whether a string may be one component of a key."""
    return part not in {".", ".."} and _COMPONENT.fullmatch(part) is not None
