"""Reads and writes backup files.

A backup is a tar of regular files in a fixed order:

    manifest.json       what the backup holds
    batchline.sqlite    all rows
    objects/<key>       every object that the rows refer to
    seal.json           the digest of everything before it; without it the backup is not whole

Nothing of a backup is used before all of it was read and its digest checked.
"""

import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import IO, NamedTuple

from msgspec import MsgspecError, Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.backup.manifest import FORMAT, Manifest, Progress, TransferError
from batchline.objects.keys import components

CHUNK_BYTES = 1024 * 1024

_MANIFEST, _DATABASE, _SEAL = "manifest.json", "batchline.sqlite", "seal.json"
_OBJECTS = "objects/"
_MAX_DOCUMENT_BYTES = 64 * CHUNK_BYTES

_NO_BACKUP = "This is not a backup of batchline."
_DAMAGED = "The backup is damaged: its bytes are not those that were written. Nothing was restored."
_CUT_OFF = "The backup is cut off or damaged: its end is missing. Nothing was restored."


class _ManifestFormat(Struct, frozen=True):
    """The part of a manifest that every version has."""

    format: int


class _Seal(Struct, frozen=True, kw_only=True):
    """The number of members before it, and their digest."""

    members: int
    sha256: str


class ArchiveWriter:
    """Writes a backup, member by member. ``on_write`` is called with the length of each piece written."""

    def __init__(self, file: IO[bytes], manifest: Manifest, *, on_write: Callable[[int], None]) -> None:
        self._file, self._on_write = file, on_write
        self._digest = _Digest()
        self._modified = manifest.taken_at
        self._add(_MANIFEST, [encode_json(manifest)])

    def add_database(self, path: Path) -> None:
        """Add the database, which comes before all objects."""
        self._add_file(_DATABASE, path)

    def add_object(self, key: str, path: Path) -> None:
        """Add one object."""
        self._add_file(_OBJECTS + key, path)

    def seal(self) -> None:
        """Add the digest of all members and the end of the tar file."""
        self._add(_SEAL, [encode_json(self._digest.seal())])
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _add_file(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            self._add(name, iter(lambda: file.read(CHUNK_BYTES), b""), size=os.fstat(file.fileno()).st_size)

    def _add(self, name: str, chunks: Iterable[bytes], *, size: int | None = None) -> None:
        member = tarfile.TarInfo(name)
        member.size = sum(map(len, chunks)) if size is None else size
        member.mode, member.mtime = 0o600, self._modified
        self._file.write(member.tobuf(tarfile.GNU_FORMAT))
        self._digest.begin(name, member.size)
        written = 0
        for chunk in chunks:
            self._file.write(chunk)
            self._digest.update(chunk)
            self._on_write(len(chunk))
            written += len(chunk)
        if written != member.size:
            raise TransferError(f"{name} changed while it was read")
        self._file.write(bytes(-written % tarfile.BLOCKSIZE))


class Entry(NamedTuple):
    """A member of the tar file: its name, and the position and size of its bytes."""

    name: str
    offset: int
    size: int

    @property
    def key(self) -> str:
        """The key of an object."""
        return self.name.removeprefix(_OBJECTS)


class Archive:
    """A backup that was read and found whole."""

    def __init__(self, file: FileIO, manifest: Manifest, database: Entry) -> None:
        self._file, self.manifest, self._database = file, manifest, database

    def objects(self) -> Iterator[Entry]:
        """Yield every object, in the order of the file."""
        for entry in _entries(self._file):
            if entry.name == _SEAL:
                return
            if entry.name.startswith(_OBJECTS):
                yield entry

    def read(self, entry: Entry, start: int) -> bytes:
        """Return a chunk of a member; no bytes at its end. Any number of threads may read."""
        return _read(self._file, entry, start)

    def extract_database(self, path: Path) -> None:
        """Write the database to a new file."""
        with path.open("xb") as file:
            for chunk in _chunks(self._file, self._database):
                file.write(chunk)


@contextmanager
def open_archive(path: Path, progress: Progress) -> Iterator[Archive]:
    """Open a backup after reading and checking all of it. Raise TransferError if it is no backup or not whole."""
    try:
        file = FileIO(path)
    except OSError as error:
        raise TransferError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield _checked(file, progress)


def _checked(file: FileIO, progress: Progress) -> Archive:
    total, digest = os.fstat(file.fileno()).st_size, _Digest()
    entries = _entries(file)
    manifest = _manifest(file, next(entries, None), digest)
    database = next(entries, None)
    if database is None or database.name != _DATABASE:
        raise TransferError(_CUT_OFF)
    digest.add(file, database)
    for entry in entries:
        if entry.name == _SEAL:
            _check_seal(file, entry, digest)
            return Archive(file, manifest, database)
        _require_object(entry)
        digest.add(file, entry)
        progress(entry.offset + entry.size, total)
    raise TransferError(_CUT_OFF)


def _manifest(file: FileIO, entry: Entry | None, digest: "_Digest") -> Manifest:
    if entry is None or entry.name != _MANIFEST:
        raise TransferError(_NO_BACKUP)
    document = _document(file, entry)
    try:
        if decode_json(document, type=_ManifestFormat).format > FORMAT:
            raise TransferError("The backup was made by a newer version of batchline; use that one.")
        manifest = decode_json(document, type=Manifest)
    except MsgspecError as error:
        raise TransferError(_DAMAGED) from error
    digest.add(file, entry)
    return manifest


def _check_seal(file: FileIO, entry: Entry, digest: "_Digest") -> None:
    try:
        sealed = decode_json(_document(file, entry), type=_Seal)
    except MsgspecError as error:
        raise TransferError(_DAMAGED) from error
    if sealed != digest.seal():
        raise TransferError(_DAMAGED)


def _require_object(entry: Entry) -> None:
    """Raise TransferError unless the member is an object under a valid key, which cannot lead to another place."""
    try:
        if entry.name.startswith(_OBJECTS):
            components(entry.key)
            return
    except ValueError:
        pass
    raise TransferError(f"{_NO_BACKUP} It holds {entry.name[:100]!r}.")


def _entries(file: FileIO) -> Iterator[Entry]:
    """Yield the members. Each must be a regular file with a short name: nothing else is ever written.

    tarfile's own reader is not used, because it remembers every member and follows headers of any size.
    """
    at = 0
    while (member := _member(os.pread(file.fileno(), tarfile.BLOCKSIZE, at), first=at == 0)) is not None:
        if member.type != tarfile.REGTYPE or member.size < 0:
            raise TransferError(f"{_NO_BACKUP} {member.name[:100]!r} in it is not a regular file.")
        yield Entry(member.name, at + tarfile.BLOCKSIZE, member.size)
        at += tarfile.BLOCKSIZE + member.size + -member.size % tarfile.BLOCKSIZE


def _member(header: bytes, *, first: bool) -> tarfile.TarInfo | None:
    """Return the member that a header describes, or None at the end of the tar file."""
    if header == bytes(tarfile.BLOCKSIZE) and not first:
        return None
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise TransferError(_NO_BACKUP if first else _CUT_OFF) from error


def _document(file: FileIO, entry: Entry) -> bytes:
    if entry.size > _MAX_DOCUMENT_BYTES:
        raise TransferError(_DAMAGED)
    return b"".join(_chunks(file, entry))


def _chunks(file: FileIO, entry: Entry) -> Iterator[bytes]:
    start = 0
    while chunk := _read(file, entry, start):
        yield chunk
        start += len(chunk)


def _read(file: FileIO, entry: Entry, start: int) -> bytes:
    wanted = min(CHUNK_BYTES, entry.size - start)
    data = os.pread(file.fileno(), wanted, entry.offset + start)
    if len(data) != wanted:
        raise TransferError(_CUT_OFF)
    return data


class _Digest:
    """The digest over the names, lengths and bytes of members, in their order."""

    def __init__(self) -> None:
        self._sha256, self._members = sha256(), 0

    def begin(self, name: str, size: int) -> None:
        self._sha256.update(f"{name}\n{size}\n".encode())
        self._members += 1

    def update(self, data: bytes) -> None:
        self._sha256.update(data)

    def add(self, file: FileIO, entry: Entry) -> None:
        self.begin(entry.name, entry.size)
        for chunk in _chunks(file, entry):
            self.update(chunk)

    def seal(self) -> _Seal:
        return _Seal(members=self._members, sha256=self._sha256.hexdigest())
