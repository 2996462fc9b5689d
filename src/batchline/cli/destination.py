"""Decides how a command writes the file that the user named.

A regular file is replaced as a whole by a new one, and so is the target of a symbolic link. A device, a named pipe or
an open descriptor such as ``/dev/stdout`` is never replaced or deleted: the content is written to a temporary file
first, and copied at the end.
"""

import os
import shutil
import stat
from pathlib import Path

import click
from msgspec import Struct

STANDARD = "-"
"""The name of stdin or stdout."""
_STREAMS = {"/dev/stdout", "/dev/stderr"}
_DESCRIPTORS = {"/dev/fd", "/proc/self/fd"}
"""Folders in which a process finds its open files."""


class Destination(Struct, frozen=True, kw_only=True):
    """The place to which a command writes a file."""

    name: str
    """The name that the user gave it, for messages."""
    path: Path
    """The regular file to write. It may be replaced and deleted."""
    special_file: Path | None = None
    """The device, pipe or descriptor that gets the content of the regular file; None if there is none."""

    def deliver(self, *, advice: str) -> None:
        """Copy the content to the special file, if there is one. Raise ClickException with the advice.

        A special file is opened even if there is no content: who reads a pipe waits for its end.
        """
        if self.special_file is None:
            return
        try:
            # Neither created nor truncated: it is only written to, and stdout may have earlier content.
            descriptor = os.open(self.special_file, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with os.fdopen(descriptor, "wb") as target:
                if self.path.exists():
                    with self.path.open("rb") as content:
                        shutil.copyfileobj(content, target)
        except OSError as error:
            raise click.ClickException(f"{self.name} cannot be written: {error.strerror}. {advice}.") from None


def file_destination(path: Path) -> Destination:
    """Return the destination of a file that the command named itself."""
    return Destination(name=str(path), path=path)


def stdout_destination(staged: Path) -> Destination:
    """Return the destination of what is copied to stdout at the end, by the caller. ``staged`` has it until then."""
    return Destination(name=STANDARD, path=staged)


def find_destination(named: Path, *, staged: Path) -> Destination:
    """Return the destination of a file that the user named. Raise UsageError if it cannot be written.

    ``staged`` is a temporary file for what goes to a device, a pipe or a descriptor.
    """
    mode = _mode(named)
    if stat.S_ISDIR(mode):
        raise click.UsageError(f"{named} is a folder, not a file")
    if stat.S_ISSOCK(mode):
        raise click.UsageError(f"{named} is a socket, not a file")
    if _is_descriptor(named) or (mode and not stat.S_ISREG(mode)):
        _require_access(named, os.W_OK)
        return Destination(name=str(named), path=staged, special_file=named)
    path = Path(os.path.realpath(named)) if named.is_symlink() else named
    if not path.parent.is_dir():
        raise click.UsageError(f"there is no folder {path.parent}; create it first")
    _require_access(path.parent, os.W_OK | os.X_OK)
    return Destination(name=str(named), path=path)


def _mode(path: Path) -> int:
    """Return the type and mode of what a path leads to, or 0 if there is nothing. Raise UsageError."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror}") from None


def _is_descriptor(path: Path) -> bool:
    """Return whether a path names an open file of this process, which must not be replaced even if it is regular."""
    absolute = path.absolute()
    return str(absolute) in _STREAMS or str(absolute.parent) in _DESCRIPTORS


def _require_access(path: Path, access: int) -> None:
    if not os.access(path, access):
        raise click.UsageError(f"{path} cannot be written: there is no permission, or nothing is there")
