"""Backups of a running service, restored after it was killed: rules C12, D4, D5, F3."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchline.domain.states import BatchStatus
from batchline.ports import Store
from tests.support.backup_service import Original, assert_all_ends_well, backed_up_and_killed
from tests.support.postgres_server import Postgres
from tests.support.restore_targets import Target
from tests.support.s3_server import Seaweed
from tests.support.service import Mock, running_mock


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock() as running:
        yield running


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, mock: Mock) -> Original:
    return backed_up_and_killed(tmp_path_factory.mktemp("original"), mock.url, backups=3)


def test_open_batches_continue_in_another_folder(tmp_path: Path, mock: Mock, original: Original) -> None:
    """C12, D4, D5: on SQLite and a folder."""
    target = Target(tmp_path / "restored")
    printed = target.restore(original.archives[-1]).stdout
    assert "Start it with the same settings: batchline serve" in printed
    with original.served(target.data_dir, mock.url) as service:
        assert_all_ends_well(service, original)


@pytest.mark.proof
def test_open_batches_continue_on_postgresql_and_a_bucket(
    tmp_path: Path, mock: Mock, original: Original, postgres: Postgres, bucket: Seaweed
) -> None:
    """C12, D4, D5, F1: on PostgreSQL and a bucket."""
    urls = {"database_url": postgres.new_database(empty=True), "storage_url": bucket.new_url()}
    target = Target(tmp_path / "restored", **urls)
    printed = target.restore(original.archives[-1]).stdout
    assert "batchline api and batchline worker" in printed
    with original.served(tmp_path / "node", mock.url, **urls) as service:
        assert_all_ends_well(service, original)


def test_every_backup_holds_whole_what_was_finished(tmp_path: Path, original: Original) -> None:
    """C12: this includes backups taken while batches finished and their work was deleted."""
    for number, archive in enumerate(original.archives):
        target = Target(tmp_path / str(number))
        result = target.restore(archive)
        assert result.exit_code == 0, result.output
        _assert_results_are_whole(target, original)


@pytest.mark.proof
def test_every_backup_under_load_is_whole(tmp_path: Path, mock: Mock) -> None:
    """C12: each of twelve backups is whole, and the last one can be served."""
    original = backed_up_and_killed(tmp_path, mock.url, backups=12)
    test_every_backup_holds_whole_what_was_finished(tmp_path / "many", original)
    target = Target(tmp_path / "last")
    target.restore(original.archives[-1])
    with original.served(target.data_dir, mock.url) as service:
        assert_all_ends_well(service, original)


def _assert_results_are_whole(target: Target, original: Original) -> None:
    project_id = original.accounts[1]["project_id"]

    async def results(store: Store) -> dict[str, str]:
        batches = await store.batches(project_id, after=None, limit=1000)
        assert batches is not None
        keys = {}
        for batch in batches:
            if batch.status is BatchStatus.COMPLETED:
                assert batch.output_file_id is not None
                file = await store.file(project_id, batch.output_file_id, at=0)
                assert file is not None
                keys[batch.id] = file.object_key
        return keys

    finished = target.in_store(results)
    assert finished
    for batch_id, key in finished.items():
        sent = Counter(json.loads(line)["custom_id"] for line in original.lines[batch_id].splitlines())
        assert Counter(json.loads(line)["custom_id"] for line in target.read(key).splitlines()) == sent
