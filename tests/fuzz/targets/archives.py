"""A backup file. Every second input gets correct checksums and a correct seal first, as an attacker would make them."""

import asyncio
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from zlib import crc32

from msgspec.json import encode as encode_json

from batchline.backup import archive, backup, rows
from batchline.backup.archive import open_archive
from batchline.backup.manifest import TransferError
from batchline.backup.restore import Restore, SqliteRows
from batchline.objects.keys import components
from batchline.objects.local import LocalObjects
from batchline.system import SystemClock, SystemRandom, ThreadPool
from tests.support.busy_folder import Busy, Folder
from tests.support.restore_targets import back_up

_BLOCK = tarfile.BLOCKSIZE
_OWN_ENTRIES = {"backup.tar", "again.tar", "restored", "work", "script.sqlite"}
_SQL_MARK = b"-- sql\n"


class ArchiveTarget:
    """A backup is restored as a whole into its folder, or refused with a message and nothing restored.

    An input that begins with ``-- sql`` is a script instead, which changes the database of a good backup.
    """

    name = "archives"
    modules: tuple[ModuleType, ...] = (archive, rows)
    dictionary: tuple[bytes, ...] = (
        *(
            b"manifest.json",
            b"batchline.sqlite",
            b"objects/uploads/file-1",
            b"objects/../x",
            b"seal.json",
            b"\x00" * 512,
        ),
        *(
            b'{"format":1,',
            b'"lost":["uploads/file-1"]',
            b"SQLite format 3\x00",
            b"0000000\x00",
            b"77777777777",
            b"ustar  \x00",
        ),
        *(
            b"UPDATE files SET object_key = ",
            b"'../x'",
            b"'uploads/file-1'",
            b"x'ff'",
            b"NULL",
            b";\n",
            b"DELETE FROM files;\n",
        ),
        *(
            b"CREATE TRIGGER t AFTER UPDATE ON files BEGIN SELECT 1; END;\n",
            b"CREATE VIEW v AS SELECT 1;\n",
            b"DROP TABLE ",
        ),
        *(
            b"PRAGMA user_version = 1;\n",
            b"UPDATE batches SET ",
            b"work_key = ",
            b"status = 'in_progress';\n",
            b"INSERT INTO ",
        ),
        *(
            b"files",
            b"batches",
            b"segments",
            b"identity",
            b"CAST(x'c3' AS TEXT)",
            b"-1",
            b"9e99",
            b"ALTER TABLE files ADD x;\n",
        ),
    )

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._threads = ThreadPool(2, name="fuzz")
        self._good = self._make_backup()
        self.seeds: tuple[bytes, ...] = tuple(self._variants())

    def _make_backup(self) -> bytes:
        """Return a backup with rows in every state."""
        folder, file = Folder(self._folder / "data"), self._folder / "backup.tar"
        Busy(folder)
        back_up(folder.path, file)
        shutil.rmtree(folder.path)
        return file.read_bytes()

    def _variants(self) -> Iterator[bytes]:
        """Yield the good backup, some that were cut or changed, and some without a first, second or last member."""
        yield self._good
        yield _cut(self._good, len(self._good) - 2000)
        yield _cut(self._good, 700)
        yield _cut(self._good, len(self._good) // 2)
        for place, content in ((0, b'{"format":2}'), (0, b"{"), (0, b'{"format":"x"}'), (-1, b"{}"), (-1, b"[")):
            headers, blocks = _members(self._good)
            blocks[place] = content
            yield _joined(headers, blocks) if place == 0 else _unsealed(_joined(headers, blocks, seal=False))
        headers, blocks = _members(self._good)
        blocks[-2] += b"changed"
        yield _unsealed(_joined(headers, blocks, seal=False))
        for place in (0, 1, -1):
            headers, blocks = _members(self._good)
            del headers[place], blocks[place]
            yield _joined(headers, blocks)
        for name in ("objects/../x", "other", "objects/uploads/file-added"):
            headers, blocks = _members(self._good)
            headers.insert(2, tarfile.TarInfo(name))
            blocks.insert(2, b"added")
            yield _joined(headers, blocks)

    def run(self, data: bytes) -> None:
        if data.startswith(_SQL_MARK):
            data = _resealed(self._with_script(data))
        elif _is_resealed(data):
            data = _resealed(data)
        file, target = self._folder / "backup.tar", self._folder / "restored"
        file.write_bytes(data)
        target.mkdir()
        (self._folder / "work").mkdir()
        try:
            asyncio.run(self._restore(file, target))
            self._check_restored(target)
        except TransferError:
            assert not (target / "batchline.sqlite").exists()
        finally:
            # Nothing may be written beside the folder.
            assert {entry.name for entry in self._folder.iterdir()} <= _OWN_ENTRIES
            shutil.rmtree(target)
            shutil.rmtree(self._folder / "work")

    def _check_restored(self, target: Path) -> None:
        """What was restored has no trigger, and can be backed up again unless its rows are of no use."""
        with closing(sqlite3.connect(target / "batchline.sqlite")) as database:
            assert database.execute("SELECT count(*) FROM sqlite_schema WHERE type = 'trigger'").fetchone() == (0,)
        with suppress(TransferError):
            again = self._folder / "again.tar"
            backup.back_up(target, again, overwrite=True, clock=SystemClock(), progress=lambda _done, _total: None)

    def close(self) -> None:
        self._threads.close()
        shutil.rmtree(self._folder)

    async def _restore(self, file: Path, target: Path) -> None:
        with open_archive(file, lambda _done, _total: None) as opened:
            for entry in opened.objects():
                components(entry.key)
            objects = LocalObjects(target / "objects", self._threads, SystemRandom())
            await Restore(
                rows=SqliteRows(target),
                objects=objects,
                folder=self._folder / "work",
                threads=self._threads,
                random=SystemRandom(),
                progress=lambda _done, _total: None,
            ).run(opened)

    def _with_script(self, script: bytes) -> bytes:
        """Return the good backup with its database changed by a script, as far as the script can be run."""
        headers, blocks = _members(self._good)
        path = self._folder / "script.sqlite"
        path.write_bytes(blocks[1])
        for statement in script.decode("latin-1").replace("\0", "").split(";\n"):
            with closing(sqlite3.connect(path)) as database:
                try:
                    with database:
                        database.executescript(_bounded(statement))
                except (sqlite3.Error, ValueError):
                    pass
        blocks[1] = path.read_bytes()
        return _joined(headers, blocks)


def _bounded(statement: str) -> str:
    """Return a statement that opens no other file and does not run for long."""
    unwanted = ("ATTACH", "RECURSIVE", "VACUUM", "RANDOMBLOB", "ZEROBLOB", "READFILE", "JOURNAL")
    return "" if any(word in statement.upper() for word in unwanted) else statement


def _members(data: bytes) -> tuple[list[tarfile.TarInfo], list[bytes]]:
    """Return the headers and the contents of a tar file, as far as they can be read; checksums are not checked."""
    headers, blocks, at = [], [], 0
    while at + _BLOCK <= len(data) and data[at : at + _BLOCK] != bytes(_BLOCK):
        try:
            header = tarfile.TarInfo.frombuf(_checksummed(data[at : at + _BLOCK]), "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError):
            break
        size = max(0, min(header.size, len(data) - at))
        headers.append(header)
        blocks.append(data[at + _BLOCK : at + _BLOCK + size])
        at += _BLOCK + size + -size % _BLOCK
    return headers, blocks


def _checksummed(header: bytes) -> bytes:
    blank = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(blank) + header[156:]


def _is_resealed(data: bytes) -> bool:
    return crc32(data) % 2 == 1


def _cut(data: bytes, length: int) -> bytes:
    """Return the beginning of an archive, about so long, that is not made whole again."""
    while _is_resealed(data[:length]):
        length -= 1
    return data[:length]


def _unsealed(data: bytes) -> bytes:
    """Return an archive with more blocks at its end, such that its own seal is kept."""
    while _is_resealed(data):
        data += bytes(_BLOCK)
    return data


def _resealed(data: bytes) -> bytes:
    return _joined(*_members(data))


def _joined(headers: list[tarfile.TarInfo], blocks: list[bytes], *, seal: bool = True) -> bytes:
    """Return a tar file with correct checksums; if its last member is a seal, with a correct one."""
    if seal and headers and headers[-1].name == "seal.json":
        whole = sha256()
        for header, block in zip(headers[:-1], blocks[:-1], strict=True):
            whole.update(f"{header.name}\n{len(block)}\n".encode("utf-8", "surrogateescape") + block)
        blocks[-1] = encode_json({"members": len(headers) - 1, "sha256": whole.hexdigest()})
    parts = []
    for header, block in zip(headers, blocks, strict=True):
        header.size = len(block)
        try:
            head = header.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        except (ValueError, OverflowError):
            continue
        parts += [head, block, bytes(-len(block) % _BLOCK)]
    return b"".join(parts) + bytes(2 * _BLOCK)
