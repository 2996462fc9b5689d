"""A service whose database or objects are not where they were: it refuses to start, and nothing is lost (F1)."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.service import Service, await_end, chat_lines, results_of, running_mock, running_service, submit

_LINES = chat_lines(f"line {n}" for n in range(20))


@pytest.mark.rule("F1", "Objects without their database are refused, and stay.")
def test_a_database_that_was_moved_away_is_missed_and_nothing_is_deleted(tmp_path: Path) -> None:
    """F1: the start is refused with or without an empty database in its place. Put back, it has everything."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        batch = await_end(service.client(), submit(service.client(), _LINES).id)
        assert service.terminate() == 0
        database, before = service.data_dir / "batchline.sqlite", _objects(service)
        database.rename(tmp_path / "away")
        assert "does not exist, but the folder" in _refusal(service)
        assert not database.exists()
        service.new_account("somebody")
        assert "belongs to another database" in _refusal(service)
        assert _objects(service) == before
        (tmp_path / "away").replace(database)
        service.restart()
        results_of(service.client(), service.client().batches.retrieve(batch.id), _LINES)
        assert service.client().files.content(batch.input_file_id).content == _LINES


@pytest.mark.rule("F1", "A database without its objects is refused until an operator adopts what is there.")
def test_a_folder_that_was_moved_away_is_missed(tmp_path: Path) -> None:
    """F1: with `batchline adopt` the service starts without them."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        await_end(service.client(), submit(service.client(), _LINES).id)
        service.terminate()
        (service.data_dir / "objects").rename(tmp_path / "away")
        assert "keeps its objects elsewhere" in _refusal(service)
        adopted = CliRunner().invoke(main, ["adopt", "--yes", f"--data-dir={service.data_dir}"])
        assert adopted.exit_code == 0, adopted.output
        service.restart()
        shutil.rmtree(tmp_path / "away")


def test_a_log_without_its_database_is_not_deleted(tmp_path: Path) -> None:
    """SQLite would create an empty database and delete the log, in which the last commits are."""
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        service.kill()
        database, log = (service.data_dir / f"batchline.sqlite{suffix}" for suffix in ("", "-wal"))
        written = log.read_bytes()
        assert written
        database.rename(tmp_path / "away")
        listed = CliRunner().invoke(main, ["keys", "list", f"--data-dir={service.data_dir}"])
        assert "Put the database back" in listed.output
        assert log.read_bytes() == written
        (tmp_path / "away").replace(database)
        service.restart()


def _refusal(service: Service) -> str:
    """Start the service, which must end by itself, and return what it said."""
    service.start()
    assert service.program.wait() == 1
    assert "Traceback" not in service.program.log
    return service.program.log


def _objects(service: Service) -> dict[Path, bytes]:
    found = (service.data_dir / "objects").rglob("*")
    return {path: path.read_bytes() for path in found if path.is_file()}
