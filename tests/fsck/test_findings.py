"""A report counts every finding, names a bounded number of them, and tells problems from leftovers."""

from msgspec.structs import replace

from batchline.fsck.findings import TITLES, Checked, Finding, FsckReport, Kind, RepairStatus

_PROBLEM = Finding(kind=Kind.SEGMENT, problem="is missing", next="Restore it.")


def test_every_kind_has_a_title() -> None:
    assert TITLES.keys() == set(Kind)


def test_only_so_many_findings_of_a_kind_are_kept() -> None:
    report = FsckReport(checked=Checked())
    report.add([_PROBLEM] * 1500)
    report.add([replace(_PROBLEM, kind=Kind.WORK)])
    assert report.found == {Kind.SEGMENT: 1500, Kind.WORK: 1}
    assert report.remaining == 1501
    assert len(report.of_kind(Kind.SEGMENT)) == 1000
    assert len(report.of_kind(Kind.WORK)) == 1


def test_what_was_repaired_and_what_is_left_over_is_no_problem() -> None:
    report = FsckReport(checked=Checked())
    report.add([replace(_PROBLEM, repair_status=RepairStatus.REPAIRED), replace(_PROBLEM, kind=Kind.LEFTOVER)])
    assert report.is_clean
    report.add([replace(_PROBLEM, repair_status=RepairStatus.HANDED_OVER)])
    assert not report.is_clean


def test_the_same_finding_is_recognized_whatever_came_of_it() -> None:
    assert _PROBLEM.same_as(replace(_PROBLEM, repair_status=RepairStatus.NOT_POSSIBLE))
    assert not _PROBLEM.same_as(replace(_PROBLEM, shard=1))
