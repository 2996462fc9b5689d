"""What a check repairs is as it was before, and a running service ends what was handed to it."""

import pytest
from openai.types import Batch

from batchline.fsck.findings import Kind, RepairStatus
from tests.support.service import Service, running_mock, wait_until
from tests.support.stored_data import StoredData


@pytest.mark.parametrize(("name", "column"), [("large", "output_file_id"), ("cancelled", "error_file_id")])
@pytest.mark.rule("F6", "A result file that is made again has the same bytes as before.")
def test_a_result_is_made_again_byte_for_byte(data: StoredData, name: str, column: str) -> None:
    key = data.result(name, column)["object_key"]
    before = data.read(key)
    data.delete(key)
    assert data.check(repair=True).is_clean
    assert data.read(key) == before


def test_a_result_is_made_again_although_the_other_one_has_no_row(data: StoredData) -> None:
    key = data.result("small")["object_key"]
    before = data.read(key)
    data.delete(key)
    data.change("UPDATE batches SET error_file_id = 'file-nothing' WHERE id = $1", data.batches["small"])
    statuses = {finding.file: finding.repair_status for finding in data.check(repair=True).findings}
    assert statuses["file-nothing"] is RepairStatus.NOT_POSSIBLE
    assert statuses[data.result("small")["id"]] is RepairStatus.REPAIRED
    assert data.read(key) == before


def test_a_result_is_not_made_again_from_damaged_segments(data: StoredData) -> None:
    data.delete(data.result("large")["object_key"])
    data.flip(data.segment("large", inline=False)["object_key"])
    report = data.check(repair=True)
    assert [(finding.kind, finding.repair_status) for finding in report.findings] == [
        (Kind.RESULT, RepairStatus.NOT_POSSIBLE),
        (Kind.SEGMENT, RepairStatus.NOT_POSSIBLE),
    ]


def test_a_result_is_not_replaced_by_other_bytes(data: StoredData) -> None:
    """The segments of a batch do not give what its row says."""
    row = data.result("large")
    data.change("UPDATE files SET checksum = checksum - 1 WHERE id = $1", row["id"])
    before = data.read(row["object_key"])
    assert [finding.repair_status for finding in data.check(repair=True).findings] == [RepairStatus.NOT_POSSIBLE]
    assert data.read(row["object_key"]) == before


def test_what_a_repair_shows_is_repaired_too(data: StoredData) -> None:
    """The counts can be compared only when both files can be read."""
    data.delete(data.result("small")["object_key"])
    data.change("UPDATE batches SET input_tokens = 0 WHERE id = $1", data.batches["small"])
    report = data.check(repair=True)
    assert [finding.kind for finding in report.findings][:1] == [Kind.RESULT]
    assert Kind.COUNTS in report.found
    assert report.is_clean
    assert data.check().found.total() == 0


def _set_bits_of_lost_lines(data: StoredData) -> None:
    """Let a shard say that all its lines are recorded, as a database that lost its last commits may."""
    shard = data.shard("slow", "leased")
    settled = ((1 << shard["lines"]) - 1).to_bytes(len(shard["settled"]), "little")
    data.change(
        "UPDATE shards SET settled = $1, state = 'done' WHERE batch_id = $2 AND n = $3",
        settled,
        shard["batch_id"],
        shard["n"],
    )


def test_lines_that_only_seem_to_be_recorded_are_given_back(data: StoredData) -> None:
    """Their shard is closed without their bits. A repair looks at closed shards, and lets their lines run again."""
    _set_bits_of_lost_lines(data)
    [found] = data.check(repair=True).findings
    assert (found.kind, found.repair_status) == (Kind.LINES, RepairStatus.REPAIRED)
    assert "count as recorded, but have no result" in found.problem
    assert data.shard("slow", "closed")["epoch"] > 1
    assert data.check().is_clean


def test_a_shard_without_an_owner_is_closed(data: StoredData) -> None:
    shard = data.shard("running", "leased")
    data.change("UPDATE shards SET owner = NULL WHERE batch_id = $1 AND n = $2", shard["batch_id"], shard["n"])
    [found] = data.check(repair=True).findings
    assert (found.kind, found.repair_status, found.shard) == (Kind.LEASE, RepairStatus.REPAIRED, shard["n"])
    assert data.shard("running", "closed")["n"] == shard["n"]


def _ended(service: Service, batch_id: str) -> Batch:
    client = service.client()
    over = {"completed", "expired", "cancelled", "failed"}
    wait_until(lambda: client.batches.retrieve(batch_id).status in over, what="the end of the batch")
    return client.batches.retrieve(batch_id)


@pytest.mark.rule("F6", "The service ends batches that were handed to it, and nothing is wrong after that.")
def test_the_service_ends_what_was_handed_to_it(data: StoredData) -> None:
    """C12: a lost segment, a damaged work file and lines that only seemed to be recorded: each line ends once."""
    data.delete(data.segment("running", inline=False)["object_key"])
    data.flip(data.batch("running")["work_key"])
    _set_bits_of_lost_lines(data)
    report = data.check(repair=True)
    assert {finding.repair_status for finding in report.findings} == {RepairStatus.HANDED_OVER, RepairStatus.REPAIRED}
    with running_mock() as mock, data.served(mock.url) as service:
        for name in ("running", "slow"):
            # The count of completed lines falls, because recorded results are lost.
            ended = _ended(service, data.batches[name])
            assert ended.status == "completed"
            assert ended.request_counts is not None
            assert ended.request_counts.completed == ended.request_counts.total
    assert [finding for finding in data.check().findings if not finding.is_note] == []
