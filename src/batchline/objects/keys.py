"""What may be a key: components of letters, digits, dot, underscore and hyphen, none of which leads anywhere else."""

import re

TEMPORARY = "tmp"
"""The first component that no key has: below it lies what is on its way or only tried out."""

_COMPONENT = re.compile(r"[A-Za-z0-9._-]+")


def components(key: str) -> list[str]:
    """Raises ValueError when it is no key."""
    parts = key.split("/")
    if parts[0] == TEMPORARY or not all(map(is_component, parts)):
        raise ValueError(f"Not a key: {key!r}")
    return parts


def is_component(part: str) -> bool:
    return part not in {".", ".."} and _COMPONENT.fullmatch(part) is not None
