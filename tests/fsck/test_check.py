"""Files, money, identity and objects without a row are checked too, also while a service is busy."""

from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from batchline.fsck.findings import FsckReport, Kind, RepairStatus
from batchline.system import SystemClock
from tests.support.backup_service import Load
from tests.support.restore_targets import Target, back_up
from tests.support.service import running_mock
from tests.support.stored_data import StoredData, empty_data


def _uploads(data: StoredData) -> list[str]:
    found = data.rows("SELECT object_key FROM files WHERE purpose = 'batch' AND state = 'stored' ORDER BY id")
    return [row["object_key"] for row in found]


@pytest.mark.rule("F6", "A damaged upload is named.")
def test_damaged_uploads_are_named(data: StoredData) -> None:
    missing, cut, longer, *_ = _uploads(data)
    data.delete(missing)
    data.cut(cut)
    data.put(longer, data.read(longer) + b"x")
    found = {finding.object: finding for finding in data.check(repair=True).findings}
    assert found.keys() == {missing, cut, longer}
    assert {finding.kind for finding in found.values()} == {Kind.UPLOAD}
    for key, problem in ((missing, "is missing"), (cut, "is shorter than"), (longer, "is longer than")):
        assert problem in found[key].problem
        assert key.removeprefix("uploads/") == found[key].file


def test_a_result_file_of_no_batch_is_named(data: StoredData) -> None:
    row = data.result("small")
    data.change("UPDATE files SET object_key = $1 WHERE id = $2", f"results/{data.batches['large']}/other", row["id"])
    data.change("UPDATE batches SET output_file_id = NULL, completed = 0 WHERE id = $1", data.batches["small"])
    found = [finding for finding in data.check().findings if finding.batch is None and not finding.is_note]
    assert [(finding.kind, finding.file) for finding in found] == [(Kind.RESULT, row["id"])]


@pytest.mark.rule("F6", "A balance that is not the sum of its ledger is named, and set to that sum.")
def test_a_balance_is_set_to_the_ledger(data: StoredData) -> None:
    [before] = data.rows("SELECT balance, credits FROM organizations")
    data.change("UPDATE organizations SET balance = balance + 5, credits = credits - 7")
    [found] = data.check().findings
    assert found.kind is Kind.BALANCE
    assert found.organization is not None
    assert [finding.repair_status for finding in data.check(repair=True).findings] == [RepairStatus.REPAIRED]
    assert data.rows("SELECT balance, credits FROM organizations") == [before]


@pytest.mark.rule("F6", "Objects of another database are named, and nothing else is checked or changed.")
def test_objects_of_another_database_are_named(data: StoredData) -> None:
    [marker] = data.in_objects(lambda objects: objects.names("identity"))
    data.delete(f"identity/{marker}")
    data.put(f"identity/0123-{marker.split('-')[1]}", b"of another database")
    report = data.check(repair=True)
    assert [finding.kind for finding in report.findings] == [Kind.IDENTITY]
    assert "belongs to another database" in report.findings[0].problem
    assert report.checked.batches == 0


def test_a_database_that_was_never_served_is_fine(tmp_path: Path) -> None:
    data = empty_data(tmp_path)
    data.in_store(lambda store: store.check())
    assert data.check().is_clean


def test_nothing_is_wrong_with_a_restored_backup(local_data: StoredData, tmp_path: Path) -> None:
    """Before its first start: open batches have their objects, and the work of ended ones is gone."""
    back_up(local_data.data_dir, tmp_path / "backup.tar")
    restored = replace(local_data, data_dir=tmp_path / "restored")
    assert Target(restored.data_dir).restore(tmp_path / "backup.tar").exit_code == 0
    report = restored.check()
    assert report.findings == []
    assert report.checked.batches == 7


def test_objects_without_a_row_are_counted_and_named(data: StoredData) -> None:
    """They are no problem: the sweep deletes them."""
    data.put("uploads/file-unknown", b"?")
    data.put("segments/batch_unknown/me-1", b"?")
    data.put(f"results/{data.batches['large']}/9-me-output", b"?")
    report = data.check(repair=True)
    assert report.is_clean
    assert {finding.object for finding in report.findings} == {
        "uploads/file-unknown",
        "segments/batch_unknown",
        f"results/{data.batches['large']}/9-me-output",
    }
    assert data.read("uploads/file-unknown") == b"?"


@pytest.mark.rule("F6", "A check while the service is busy finds nothing wrong.")
def test_nothing_is_wrong_while_a_service_is_busy(data: StoredData) -> None:
    """Batches are created, run, finalized and pruned, and files are deleted, during many checks."""
    reports: list[FsckReport] = []
    over = Event()

    def keep_checking() -> None:
        while not over.is_set():
            reports.append(data.check(work_retention_seconds=0, clock=SystemClock()))

    checking = Thread(target=keep_checking)
    with (
        running_mock() as mock,
        data.served(mock.url, work_retention_seconds=0) as service,
        Load(service.client()) as load,
    ):
        checking.start()
        while (load.ended < 20 or len(reports) < 4) and checking.is_alive():
            over.wait(0.05)
        over.set()
        checking.join()
    assert len(reports) >= 4
    assert [finding for report in reports for finding in report.findings if not finding.is_note] == []


@pytest.mark.parametrize("any_data", ["postgres+bucket"], indirect=True)
def test_an_unavailable_bucket_cannot_be_checked(any_data: StoredData, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: nothing is said about single objects."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    result = any_data.fsck()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "The objects cannot be used" in result.stderr
