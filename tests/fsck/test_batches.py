"""Each kind of damage of a batch is found and named, and nothing is found where there is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from batchline.domain.checksum import checksum_of
from batchline.fsck.findings import Finding, Kind, RepairStatus
from tests.support.clocks import SettableClock
from tests.support.stored_data import StoredData

Plant = Callable[[StoredData], str]
"""Damages something, and returns a part of the problem that must be reported."""


def the_finding(data: StoredData, **options: Any) -> Finding:
    """Return the only problem that a check finds."""
    report = data.check(**options)
    problems = [finding for finding in report.findings if not finding.is_note]
    assert len(problems) == 1, problems
    assert not report.is_clean
    return problems[0]


def test_nothing_is_wrong_with_what_a_killed_service_leaves(any_data: StoredData) -> None:
    report = any_data.check()
    assert [finding for finding in report.findings if not finding.is_note] == []
    assert report.is_clean
    assert report.checked.batches == 7
    assert report.checked.organizations == 1
    assert report.checked.segments > 0
    assert report.checked.bytes > 1_000_000


def _output_is_missing(data: StoredData) -> str:
    data.delete(data.result("large")["object_key"])
    return ") is missing"


def _output_is_cut(data: StoredData) -> str:
    data.cut(data.result("large")["object_key"])
    return ") has fewer than the"


def _output_is_longer(data: StoredData) -> str:
    key = data.result("large")["object_key"]
    data.put(key, data.read(key) + b"\n")
    return ") has more than the"


def _output_has_a_flipped_bit(data: StoredData) -> str:
    data.flip(data.result("large")["object_key"])
    return ") is not what was written: its checksum differs"


def _errors_of_cancelled_are_missing(data: StoredData) -> str:
    data.delete(data.result("cancelled", "error_file_id")["object_key"])
    return ") is missing"


def _errors_of_expired_are_cut(data: StoredData) -> str:
    data.cut(data.result("expired", "error_file_id")["object_key"])
    return ") has fewer"


def _output_without_a_checksum_is_damaged(data: StoredData) -> str:
    """A version before checksums wrote it."""
    row = data.result("small")
    data.change("UPDATE files SET checksum = NULL WHERE id = $1", row["id"])
    content = data.read(row["object_key"])
    data.put(row["object_key"], content.replace(b'"response":', b'"response"+', 1))
    return ") has a line that is not JSON"


def _counts_are_wrong(data: StoredData) -> str:
    data.change("UPDATE batches SET completed = 39, failed = 2 WHERE id = $1", data.batches["large"])
    return "it counts"


def _tokens_are_wrong(data: StoredData) -> str:
    data.change("UPDATE batches SET input_tokens = input_tokens + 1 WHERE id = $1", data.batches["small"])
    return "tokens, its output file has"


def _errors_by_code_are_wrong(data: StoredData) -> str:
    data.change("UPDATE line_errors SET count = count + 1 WHERE batch_id = $1", data.batches["expired"])
    return "its errors by code sum to"


def _an_ended_batch_can_run(data: StoredData) -> str:
    data.change("UPDATE shards SET state = 'open', owner = NULL WHERE batch_id = $1", data.batches["small"])
    return "it is completed, but has shards that could still run"


def _a_running_batch_counts_as_drained(data: StoredData) -> str:
    data.change("UPDATE batches SET drained = (1 = 1) WHERE id = $1", data.batches["running"])
    return "it counts as drained, but has shards that can run"


def _a_drained_batch_does_not_count_as_such(data: StoredData) -> str:
    data.change("UPDATE shards SET state = 'closed', owner = NULL WHERE batch_id = $1", data.batches["slow"])
    return "no shard of it can run any more, but it does not count as drained"


def _its_time_runs_backwards(data: StoredData) -> str:
    data.change("UPDATE batches SET completed_at = finalizing_at - 1 WHERE id = $1", data.batches["small"])
    return "its completed_at is before its finalizing_at"


def _a_lane_is_closed(data: StoredData) -> str:
    shard = data.shard("slow", "leased")
    data.change(
        "UPDATE shards SET state = 'open', owner = NULL WHERE batch_id = $1 AND n = $2", shard["batch_id"], shard["n"]
    )
    data.change("UPDATE lanes SET open = (1 = 0)")
    return "no worker finds them: their lane is closed"


def _shards_are_withheld_for_no_reason(data: StoredData) -> str:
    shard = data.shard("slow", "leased")
    data.change(
        "UPDATE shards SET state = 'withheld', owner = NULL WHERE batch_id = $1 AND n = $2",
        shard["batch_id"],
        shard["n"],
    )
    return "they are withheld although the batch is not held"


_REPAIRED: dict[Plant, Kind] = {
    _output_is_missing: Kind.RESULT,
    _output_is_cut: Kind.RESULT,
    _output_is_longer: Kind.RESULT,
    _output_has_a_flipped_bit: Kind.RESULT,
    _errors_of_cancelled_are_missing: Kind.RESULT,
    _errors_of_expired_are_cut: Kind.RESULT,
    _output_without_a_checksum_is_damaged: Kind.RESULT,
    _tokens_are_wrong: Kind.COUNTS,
    _errors_by_code_are_wrong: Kind.COUNTS,
    _an_ended_batch_can_run: Kind.STATE,
    _its_time_runs_backwards: Kind.STATE,
    _a_running_batch_counts_as_drained: Kind.STATE,
    _a_drained_batch_does_not_count_as_such: Kind.STATE,
    _a_lane_is_closed: Kind.LANE,
    _shards_are_withheld_for_no_reason: Kind.LANE,
}


@pytest.mark.parametrize("plant", _REPAIRED, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.rule("F6", "Damage that can be repaired is found, named and repaired.")
def test_damage_is_found_and_repaired(data: StoredData, plant: Plant) -> None:
    problem = plant(data)
    found = the_finding(data)
    assert found.kind is _REPAIRED[plant]
    assert found.batch in data.batches.values()
    assert problem in found.problem
    assert found.repair_status is RepairStatus.NOT_TRIED
    repaired = data.check(repair=True)
    assert [finding.repair_status for finding in repaired.findings if not finding.is_note] == [RepairStatus.REPAIRED]
    assert repaired.is_clean
    assert data.check().found.total() == 0


def test_both_counts_are_corrected_at_once(data: StoredData) -> None:
    _counts_are_wrong(data)
    report = data.check(repair=True)
    assert {finding.kind for finding in report.findings} == {Kind.COUNTS}
    assert report.is_clean
    assert data.batch("large")["completed"] == 40
    assert data.check().found.total() == 0


def _a_segment_is_missing(data: StoredData) -> str:
    data.delete(data.segment("running", inline=False)["object_key"])
    return "is missing"


def _a_segment_has_a_flipped_bit(data: StoredData) -> str:
    data.flip(data.segment("running", inline=False)["object_key"])
    return "is not what was recorded: its checksum differs"


def _a_segment_is_cut(data: StoredData) -> str:
    data.cut(data.segment("running", inline=False)["object_key"])
    return "has fewer than the"


def _a_segment_in_a_row_has_a_flipped_bit(data: StoredData) -> str:
    row = data.segment("slow", inline=True)
    data.change("UPDATE segments SET data = $1 WHERE id = $2", b"X" + row["data"][1:], row["id"])
    return "its checksum differs"


def _a_segment_has_fewer_lines(data: StoredData) -> str:
    data.change("UPDATE segments SET lines = lines + 1 WHERE batch_id = $1", data.batches["running"])
    return "were recorded"


def _a_work_file_has_a_flipped_bit(data: StoredData) -> str:
    data.flip(data.batch("running")["work_key"])
    return "is not what was written"


def _a_bit_is_cleared(data: StoredData) -> str:
    shard = data.shard("running", "leased")
    data.change(
        "UPDATE shards SET settled = $1 WHERE batch_id = $2 AND n = $3",
        bytes(len(shard["settled"])),
        shard["batch_id"],
        shard["n"],
    )
    return "have a result, but do not count as recorded"


_HANDED_OVER: dict[Plant, Kind] = {
    _a_segment_is_missing: Kind.SEGMENT,
    _a_segment_has_a_flipped_bit: Kind.SEGMENT,
    _a_segment_is_cut: Kind.SEGMENT,
    _a_segment_in_a_row_has_a_flipped_bit: Kind.SEGMENT,
    _a_segment_has_fewer_lines: Kind.SEGMENT,
    _a_work_file_has_a_flipped_bit: Kind.WORK,
    _a_bit_is_cleared: Kind.LINES,
}


@pytest.mark.parametrize("plant", _HANDED_OVER, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.rule("F6", "Damage of a batch that has not ended is left to the service, which repairs the batch.")
def test_damage_of_a_running_batch_is_handed_to_the_service(data: StoredData, plant: Plant) -> None:
    problem = plant(data)
    found = the_finding(data)
    assert found.kind is _HANDED_OVER[plant]
    assert problem in found.problem
    assert the_finding(data, repair=True).repair_status is RepairStatus.HANDED_OVER


def test_each_shard_of_a_lost_work_file_is_named(data: StoredData) -> None:
    data.delete(data.batch("running")["work_key"])
    report = data.check(repair=True)
    shards = data.rows("SELECT n FROM shards WHERE batch_id = $1 ORDER BY n", data.batches["running"])
    assert [finding.shard for finding in report.findings] == [row["n"] for row in shards]
    assert {finding.kind for finding in report.findings} == {Kind.WORK}
    assert "makes the work file again from the input file" in report.findings[0].next


def test_counts_of_shards_that_disagree_with_the_segments_are_named(data: StoredData) -> None:
    shard = data.shard("running", "leased")
    data.change(
        "UPDATE shards SET completed = completed + 1 WHERE batch_id = $1 AND n = $2", shard["batch_id"], shard["n"]
    )
    found = data.check(repair=True).findings
    assert [(finding.kind, finding.repair_status) for finding in found] == [
        (Kind.COUNTS, RepairStatus.HANDED_OVER),
        (Kind.USAGE, RepairStatus.NOT_POSSIBLE),
    ]


def _a_segment_of_an_ended_batch_is_missing(data: StoredData) -> str:
    data.delete(data.segment("large", inline=False)["object_key"])
    return "is missing"


def _it_has_no_time(data: StoredData) -> str:
    data.change("UPDATE batches SET finalizing_at = NULL WHERE id = $1", data.batches["small"])
    return "it is completed, but has no finalizing_at"


def _it_has_two_ends(data: StoredData) -> str:
    data.change("UPDATE batches SET failed_at = completed_at WHERE id = $1", data.batches["small"])
    return "it is completed, but has a failed_at"


def _it_was_never_stopped(data: StoredData) -> str:
    data.change("UPDATE batches SET stop = NULL WHERE id = $1", data.batches["expired"])
    return "it is expired, but was not stopped for that reason"


def _its_output_has_no_row(data: StoredData) -> str:
    data.change("UPDATE batches SET error_file_id = 'file-nothing' WHERE id = $1", data.batches["small"])
    return "its error file file-nothing has no row"


def _its_usage_was_booked_twice(data: StoredData) -> str:
    data.change("UPDATE ledger SET requests = requests + 1 WHERE batch_id = $1", data.batches["small"])
    return "its ledger entries have 6 requests"


def _a_result_and_its_segments_are_lost(data: StoredData) -> str:
    data.delete(data.result("large")["object_key"])
    _forget_work(data, "large")
    return ") is missing"


_NAMED: dict[Plant, set[Kind]] = {
    _a_segment_of_an_ended_batch_is_missing: {Kind.SEGMENT},
    _it_has_no_time: {Kind.STATE},
    _it_has_two_ends: {Kind.STATE},
    _it_was_never_stopped: {Kind.STATE},
    _its_output_has_no_row: {Kind.RESULT},
    _its_usage_was_booked_twice: {Kind.USAGE},
    _a_result_and_its_segments_are_lost: {Kind.RESULT},
}


@pytest.mark.parametrize("plant", _NAMED, ids=lambda plant: plant.__name__.strip("_"))
@pytest.mark.rule("F6", "Damage that cannot be repaired is named, and stays a problem.")
def test_damage_that_cannot_be_repaired_is_named(data: StoredData, plant: Plant) -> None:
    problem = plant(data)
    report = data.check(repair=True)
    assert not report.is_clean
    assert any(problem in finding.problem for finding in report.findings)
    assert {finding.kind for finding in report.findings if finding.batch} == _NAMED[plant]
    assert {finding.repair_status for finding in report.findings if finding.batch} == {RepairStatus.NOT_POSSIBLE}


def _forget_work(data: StoredData, name: str) -> None:
    """Delete the work of a batch, as prune does."""

    async def forget(store: Any) -> None:
        await store.delete_work(data.batches[name])

    data.in_store(forget)


def _rewrite(data: StoredData, name: str, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Write another output file, with a row that agrees with it."""
    row = data.result(name)
    content = b"".join(change(data.read(row["object_key"]).splitlines(keepends=True)))
    data.put(row["object_key"], content)
    data.change(
        "UPDATE files SET bytes = $1, checksum = $2 WHERE id = $3", len(content), checksum_of(content), row["id"]
    )


@pytest.mark.rule("C12", "A check finds lines that are missing, repeated or renamed in the result files.")
def test_lines_that_are_not_in_the_results_once_are_found(data: StoredData) -> None:
    _rewrite(data, "large", lambda lines: [lines[0], *lines[:-1]])
    problems = [finding.problem for finding in data.check(repair=True).findings if finding.kind is Kind.LINES]
    assert len(problems) == 2
    assert problems[0].startswith("lines that are in neither result file: ")
    assert problems[1].startswith("lines that are in the result files more than once: ")


@pytest.mark.parametrize("name", ["large", "small"])
@pytest.mark.parametrize("has_work", [True, False])
def test_custom_ids_are_compared_with_what_is_left_of_the_input(data: StoredData, name: str, has_work: bool) -> None:
    """The work file is deleted a day after the end; the input file of the small batch was deleted by its owner."""

    def rename(lines: list[bytes]) -> list[bytes]:
        return [lines[0].replace(b'"custom_id":"line-', b'"custom_id":"LINE-'), *lines[1:]]

    if not has_work:
        _forget_work(data, name)
    _rewrite(data, name, rename)
    found = [finding.problem for finding in data.check().findings if finding.kind is Kind.LINES]
    expected = has_work or name == "large"
    problem = "lines that have another custom_id in the results than in the input"
    assert [text.split(":")[0] for text in found] == ([problem] if expected else [])


def test_a_result_of_another_batch_is_no_result(data: StoredData) -> None:
    def exchange(lines: list[bytes]) -> list[bytes]:
        record = json.loads(lines[0])
        return [lines[0].replace(record["id"].encode(), b"batch_req_01OTHER_0"), *lines[1:]]

    _rewrite(data, "small", exchange)
    problems = [finding.problem for finding in data.check().findings]
    assert "its result files have 1 lines that are not of this batch" in problems


@pytest.mark.parametrize("name", ["small", "slow"])
def test_tokens_that_another_version_read_from_the_answers_are_no_damage(data: StoredData, name: str) -> None:
    """The rows and the ledger agree; this version would have counted fewer tokens."""
    table = "batches" if name == "small" else "shards"
    column = "id" if name == "small" else "batch_id"
    where = "" if name == "small" else f" AND n = {data.shard(name, 'leased')['n']}"
    data.change(f"UPDATE {table} SET output_tokens = output_tokens + 1 WHERE {column} = $1{where}", data.batches[name])
    assert data.check().found.total() > 0
    data.change("UPDATE ledger SET output_tokens = output_tokens + 1 WHERE batch_id = $1", data.batches[name])
    assert data.check().found.total() == 0


def test_a_file_that_its_owner_deleted_is_no_damage(data: StoredData) -> None:
    row = data.result("large")

    async def delete(store: Any) -> None:
        await store.delete_file(row["project_id"], row["id"], at=row["created_at"])

    data.in_store(delete)
    data.delete(row["object_key"])
    assert data.check().is_clean


def test_work_that_is_due_to_be_deleted_may_be_gone(data: StoredData) -> None:
    """Prune deletes the objects of a batch before its rows."""
    data.delete(data.segment("large", inline=False)["object_key"])
    assert data.check(work_retention_seconds=0).is_clean


def test_work_that_becomes_due_to_be_deleted_during_a_check_may_be_gone(data: StoredData) -> None:
    """Prune may take longer for the objects than a check waits before it reads the rows again."""
    data.delete(data.segment("large", inline=False)["object_key"])
    clock = SettableClock(now=data.batch("large")["completed_at"] + 59.5)
    findings = data.check(work_retention_seconds=60, clock=clock).findings
    assert [finding.kind for finding in findings if finding.batch == data.batches["large"]] == []
