"""Refused restores: the target is in use, or the backup is not whole. Nothing is changed then."""

import asyncio
import json
import os
import re
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest

from tests.support.postgres_server import Postgres
from tests.support.restore_targets import Target
from tests.support.s3_server import Seaweed


def _untouched(target: Target) -> bool:
    """Not even a folder was created."""
    return not target.data_dir.exists()


def test_a_folder_with_a_service_in_it_is_refused(archive: Path, to_folder: Target) -> None:
    assert to_folder.restore(archive).exit_code == 0
    database = (to_folder.data_dir / "batchline.sqlite").read_bytes()
    assert "holds batchline.sqlite already" in to_folder.refusal(archive)
    assert (to_folder.data_dir / "batchline.sqlite").read_bytes() == database


def test_a_folder_of_something_else_is_refused(archive: Path, to_folder: Target) -> None:
    to_folder.data_dir.mkdir()
    (to_folder.data_dir / "thesis.tex").write_text("years of work")
    assert "holds thesis.tex already" in to_folder.refusal(archive)
    assert not (to_folder.data_dir / "batchline.sqlite").exists()


def test_objects_of_somebody_else_are_refused_and_stay(archive: Path, to_folder: Target) -> None:
    """A service on PostgreSQL has objects in its folder but no database."""
    other = to_folder.data_dir / "objects" / "uploads" / "file-other"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"theirs")
    assert "There are objects already" in to_folder.refusal(archive)
    assert other.read_bytes() == b"theirs"
    assert not (to_folder.data_dir / "batchline.sqlite").exists()


def test_a_bucket_with_objects_is_refused_and_they_stay(archive: Path, tmp_path: Path, bucket: Seaweed) -> None:
    target = Target(tmp_path / "restored", storage_url=bucket.new_url())
    target.in_objects(lambda objects: objects.put("results/batch_other/1-output", b"theirs"))
    assert "There are objects already" in target.refusal(archive)
    assert target.read("results/batch_other/1-output") == b"theirs"


def test_a_place_of_another_database_is_refused_even_if_it_is_empty(archive: Path, target: Target) -> None:
    """F1: the service that wrote the marker may have just been started."""
    target.in_objects(lambda objects: objects.put("identity/other-1", b""))
    assert "belongs to another database, with the id other" in target.refusal(archive)
    assert target.in_objects(lambda objects: objects.names("identity")) == ["other-1"]


def _execute(url: str, sql: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(sql)
        await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("used", "message"),
    [
        (
            "INSERT INTO organizations (id, name, created_at) VALUES ('o', 'o', 0)",
            "holds organizations, files",
        ),
        (
            "INSERT INTO processes (owner, lease_until, report, reserved) "
            "VALUES ('w', clock_timestamp() + interval '1 hour', '', '')",
            "A service is running on the PostgreSQL database",
        ),
    ],
)
def test_a_database_that_is_used_is_refused(
    archive: Path, tmp_path: Path, postgres: Postgres, used: str, message: str
) -> None:
    url = postgres.new_database()
    _execute(url, used)
    target = Target(tmp_path / "restored", database_url=url)
    assert message in target.refusal(archive)
    assert not (target.data_dir / "objects" / "uploads").exists()


def test_a_backup_that_is_cut_off_is_refused_wherever_that_is(archive: Path, to_folder: Target) -> None:
    """This includes a cut between two members, and a shorter file that is a valid tar."""
    data = archive.read_bytes()
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
    sealed = members[-1].offset_data + members[-1].size
    starts = [member.offset for member in members]
    lengths = {*starts, *(start + 512 for start in starts), *range(0, sealed, sealed // 20), sealed - 1}
    for short in [*(data[:length] for length in lengths), *(data[:start] + bytes(1024) for start in starts)]:
        archive.write_bytes(short)
        message = to_folder.refusal(archive)
        assert "cut off" in message or "not a backup" in message, len(short)
        assert _untouched(to_folder)


def test_a_byte_that_changed_is_found(archive: Path, to_folder: Target) -> None:
    with tarfile.open(archive) as tar:
        places = [member.offset_data + member.size // 2 for member in tar if member.size]
    data = archive.read_bytes()
    for place in places:
        archive.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert "damaged" in to_folder.refusal(archive), place
        assert _untouched(to_folder)


def test_any_other_file_is_told_to_be_no_backup(tmp_path: Path, to_folder: Target) -> None:
    other = tmp_path / "other"
    for content in (b"", b"a text", bytes(10_240), os.urandom(10_240)):
        other.write_bytes(content)
        assert "This is not a backup of batchline." in to_folder.refusal(other)
    with tarfile.open(other, "w") as tar:
        tar.add(__file__)
    assert "This is not a backup of batchline." in to_folder.refusal(other)
    assert _untouched(to_folder)


Members = list[tuple[tarfile.TarInfo, bytes]]


def _sealed_anew(archive: Path, change: Callable[[Members], object]) -> None:
    """Write a backup with extra members and a correct seal."""
    with tarfile.open(archive) as tar:
        *members, (last, _) = [(each, (tar.extractfile(each) or BytesIO()).read()) for each in tar.getmembers()]
    change(members)
    whole = sha256()
    for each, data in members:
        whole.update(f"{each.name}\n{each.size}\n".encode() + data)
    seal = json.dumps({"members": len(members), "sha256": whole.hexdigest()}).encode()
    last.size = len(seal)
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for each, data in (*members, (last, seal)):
            tar.addfile(each, BytesIO(data))


def _add_after_database(archive: Path, member: tarfile.TarInfo, content: bytes = b"") -> None:
    _sealed_anew(archive, lambda members: members.insert(2, (member, content)))


def _named(name: str, *, kind: bytes = tarfile.REGTYPE, size: int = 0) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, size, "/etc/passwd"
    return member


def test_a_member_that_belongs_there_is_taken(archive: Path, to_folder: Target) -> None:
    """The tests below are refused for the kind of member that they add, not because they add one."""
    _add_after_database(archive, _named("objects/uploads/file-added", size=5), b"added")
    assert to_folder.restore(archive).exit_code == 0
    assert to_folder.read("uploads/file-added") == b"added"


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/outside",
        "objects/../../outside",
        "objects//outside",
        "objects/tmp/x",
        "objects/",
        "lock",
        "a\0b",
    ],
)
def test_a_member_that_leads_elsewhere_is_refused(archive: Path, to_folder: Target, name: str) -> None:
    _add_after_database(archive, _named(name, size=3), b"out")
    assert "This is not a backup of batchline." in to_folder.refusal(archive)
    assert _untouched(to_folder)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
)
def test_only_regular_files_are_taken(archive: Path, to_folder: Target, kind: bytes) -> None:
    _add_after_database(archive, _named("objects/uploads/file-x", kind=kind))
    assert "is not a regular file" in to_folder.refusal(archive)
    assert _untouched(to_folder)


def test_a_backup_without_an_object_that_is_needed_is_not_restored(archive: Path, to_folder: Target) -> None:
    """C12: the restore checks that every object was written before it inserts any row."""
    _sealed_anew(archive, lambda members: members.pop(-1))
    message = to_folder.refusal(archive)
    assert re.search(r"The object segments/\S+ is missing. Nothing was restored", message)
    assert not (to_folder.data_dir / "batchline.sqlite").exists()


def test_a_backup_that_is_not_there_is_told(tmp_path: Path, to_folder: Target) -> None:
    assert "cannot be read: No such file or directory" in to_folder.refusal(tmp_path / "none.tar")


def test_a_backup_of_a_newer_version_is_refused(archive: Path, to_folder: Target) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data.replace(b'{"format":1,', b'{"format":2,', 1))
    assert "made by a newer version of batchline" in to_folder.refusal(archive)
    assert _untouched(to_folder)


@pytest.mark.parametrize("keep", [lambda data: data[:-1024], lambda data: data + b"more"])
def test_what_stands_after_the_seal_is_not_read(
    archive: Path, to_folder: Target, keep: Callable[[bytes], bytes]
) -> None:
    archive.write_bytes(keep(archive.read_bytes()))
    assert to_folder.restore(archive).exit_code == 0


def _change_database(archive: Path, tmp_path: Path, *statements: str) -> None:
    """Change the database of a backup, and seal the backup anew."""

    def change(members: Members) -> None:
        member, data = members[1]
        path = tmp_path / "changed.sqlite"
        path.write_bytes(data)
        with closing(sqlite3.connect(path)) as database, database:
            for statement in statements:
                database.execute(statement)
        members[1] = (member, path.read_bytes())
        member.size = len(members[1][1])

    _sealed_anew(archive, change)


def test_a_changed_database_with_a_new_seal_is_taken(archive: Path, to_folder: Target, tmp_path: Path) -> None:
    """The tests below are refused for their statement, not because the database was changed."""
    _change_database(archive, tmp_path, "UPDATE files SET filename = 'another'")
    assert to_folder.restore(archive).exit_code == 0


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "CREATE TRIGGER t AFTER UPDATE ON organizations BEGIN UPDATE organizations SET balance = 10; END",
            "has a trigger named 't'",
        ),
        ("CREATE TRIGGER t AFTER UPDATE ON shards BEGIN DELETE FROM files; END", "has a trigger named 't'"),
        ("CREATE VIEW v AS SELECT * FROM files", "has a view named 'v'"),
        ("CREATE VIRTUAL TABLE f USING fts5(x)", "has a virtual table named 'f'"),
    ],
)
def test_a_database_that_would_run_statements_of_its_own_is_refused(
    archive: Path, target: Target, tmp_path: Path, statement: str, named: str
) -> None:
    _change_database(archive, tmp_path, statement)
    assert named in target.refusal(archive)
    assert not (target.data_dir / "batchline.sqlite").exists()
    assert not target.in_objects(lambda objects: objects.names("uploads"))


def test_a_database_with_a_broken_schema_is_refused_even_if_sqlite_quotes_invalid_text(
    archive: Path, to_folder: Target, tmp_path: Path
) -> None:
    broken = "UPDATE sqlite_master SET name = CAST(x'bc' AS TEXT), sql = 'CREATE TABLE (' WHERE name = 'files'"
    _change_database(archive, tmp_path, "PRAGMA writable_schema = ON", broken)
    assert "The database in the backup cannot be used: its schema cannot be read" in to_folder.refusal(archive)
    assert not (to_folder.data_dir / "batchline.sqlite").exists()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE files SET object_key = '../../outside' WHERE seq = 1",
        "UPDATE files SET object_key = '' WHERE seq = 1",
        "UPDATE files SET object_key = 'in-no-folder' WHERE seq = 1",
        "UPDATE files SET object_key = x'00ff' WHERE seq = 1",
        "UPDATE batches SET work_key = '/etc/passwd' WHERE work_key IS NOT NULL",
        "UPDATE segments SET object_key = 'tmp/x' WHERE object_key IS NOT NULL",
    ],
)
def test_a_row_with_a_bad_key_is_told(archive: Path, target: Target, tmp_path: Path, statement: str) -> None:
    """F3: a message with the key, and not a traceback."""
    _change_database(archive, tmp_path, statement)
    assert "which is not a key. Nothing was restored." in target.refusal(archive)
    assert not (target.data_dir / "batchline.sqlite").exists()


def test_a_row_of_another_type_is_told(archive: Path, tmp_path: Path, postgres: Postgres) -> None:
    target = Target(tmp_path / "restored", database_url=postgres.new_database(empty=True))
    _change_database(archive, tmp_path, "UPDATE batches SET created_at = 'soon'")
    assert "batches in the backup" in target.refusal(archive)
