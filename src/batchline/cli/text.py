"""Writes numbers, sizes and times as people read them, and makes text from others safe to print on a terminal."""

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from batchline.domain.money import NANO, units

if TYPE_CHECKING:
    from batchline.backup.manifest import Manifest

_MAX_TEXT_LENGTH = 200
_SIZE_UNITS = ("KB", "MB", "GB", "TB")
_AGE_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"))


def printable(text: str) -> str:
    """Escape what is not printable: text from a client, a server or a file must not control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str, *, length: int = _MAX_TEXT_LENGTH) -> str:
    """Return the beginning of a text, with what is not printable escaped."""
    shown = printable(text[:length])
    return shown if len(text) <= length else f"{shown}..."


def format_count(number: int) -> str:
    """Return a number with separators between thousands."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 line``, ``2 lines``, ``2 batches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{format_count(number)} {noun}{ending}"


def format_units(amount: float) -> str:
    """Return an amount of units without an exponent: ``0.000003``."""
    return units(round(amount * NANO))


def format_size(size: int) -> str:
    """Return a number of bytes in the unit that fits: ``1 byte``, ``12.3 KB``, ``100 MB``."""
    if size < 1000:
        return counted(size, "byte")
    power = 1
    while power < len(_SIZE_UNITS) and size / 1000**power >= 999.5:
        power += 1
    return f"{size / 1000**power:.3g} {_SIZE_UNITS[power - 1]}"


def describe_backup(manifest: "Manifest") -> str:
    """Return what a backup holds: ``6 batches, 5 of them open; 3 files; 8 objects of 1.2 MB``."""
    open_batches = f", {format_count(manifest.open_batches)} of them open" if manifest.batches else ""
    return (
        f"{counted(manifest.batches, 'batch')}{open_batches}; {counted(manifest.files, 'file')}; "
        f"{counted(manifest.objects, 'object')} of {format_size(manifest.object_bytes)}"
    )


def format_rate(per_second: float) -> str:
    """Return a rate of lines with few digits: ``0.25/s``, ``3.1/s``, ``1,250/s``."""
    if per_second >= 10:
        return f"{per_second:,.0f}/s"
    return f"{per_second:.2g}/s" if per_second < 1 else f"{per_second:.1f}/s"


def format_duration(seconds: float) -> str:
    """Return ``3.4 s`` below ten seconds, then ``5:07`` and ``1:05:07``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit: ``12s``, ``5m``, ``3h``, ``2d``."""
    for size, unit in _AGE_UNITS:
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def wrapped(text: str, *, indent: int = 0, begun: int = 0, err: bool = False) -> str:
    """Return a text as it is printed. On a terminal it is wrapped between words, and its further lines are indented.

    ``begun`` is the number of columns that its first line has already.
    """
    if not (sys.stderr if err else sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    text = textwrap.fill(
        text,
        width,
        initial_indent=" " * begun,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return text[begun:]
