"""The quarantine finds the line that crashes the upstream (D5)."""

import pytest

from batchline.pipeline.dispatch.quarantine import Quarantine
from batchline.pipeline.job import Job
from tests.support.jobs import make_jobs


def numbers(jobs: list[Job]) -> list[int]:
    return [job.line.index for job in jobs]


def start_all(quarantine: Quarantine, *, in_flight: int = 0) -> list[Job]:
    """Every suspect that may start now, with what it adds to what is in flight."""
    started: list[Job] = []
    while (job := quarantine.start_next(in_flight=in_flight + len(started))) is not None:
        started.append(job)
    return started


def test_at_first_there_are_no_suspects() -> None:
    quarantine = Quarantine()
    assert not quarantine.occupied
    assert not quarantine.window_open
    assert quarantine.start_next(in_flight=0) is None


@pytest.mark.rule("D5", "A crash is distinguished from a broken connection.")
@pytest.mark.parametrize(
    ("in_flight", "broken", "together"),
    [
        (2, 1, False),
        (2, 2, True),
        (4, 2, True),
        (5, 2, False),
        (5, 3, True),
        (64, 31, False),
        (64, 32, True),
    ],
)
def test_half_of_what_is_in_flight_breaks_together_or_it_is_nobodys_crash(
    in_flight: int, broken: int, together: bool
) -> None:
    """D5: one broken connection among many is that line's own; a crash takes most of them."""
    quarantine = Quarantine()
    jobs = make_jobs(broken)
    innocent = make_jobs(in_flight - broken)
    for n, job in enumerate(jobs):
        assert quarantine.note_break(job, beside=[*jobs[n + 1 :], *innocent])
        assert quarantine.window_open
    assert quarantine.close_window() == (jobs, together)
    assert not quarantine.window_open
    assert quarantine.close_window() == ([], False)


def test_every_window_counts_for_itself() -> None:
    """D5: what was in flight at an earlier crash does not excuse the next."""
    quarantine = Quarantine()
    first, *jobs = make_jobs(3)
    quarantine.note_break(first, beside=make_jobs(63))
    assert quarantine.close_window() == ([first], False)
    assert quarantine.note_break(jobs[0], beside=jobs[1:])
    assert quarantine.note_break(jobs[1], beside=[])
    assert quarantine.close_window() == (jobs, True)


def test_a_line_that_breaks_with_nothing_beside_it_waits_for_no_verdict() -> None:
    """D5: it broke alone, so it spends its own attempt."""
    quarantine = Quarantine()
    (job,) = make_jobs(1)
    assert not quarantine.note_break(job, beside=[])
    assert not quarantine.window_open
    assert quarantine.close_window() == ([], False)


def test_only_what_was_in_flight_at_the_first_break_counts() -> None:
    """D5: a fast upstream that drops a connection now and then has not crashed, however many follow in the window."""
    quarantine = Quarantine()
    first, *innocent = make_jobs(4)
    assert quarantine.note_break(first, beside=innocent)
    for later in make_jobs(40):
        assert not quarantine.note_break(later, beside=innocent), "sent after the first break"
        assert not quarantine.crash_seen
    assert quarantine.close_window() == ([first], False)


def test_a_crash_is_seen_as_soon_as_half_broke() -> None:
    """D5: from then on nothing may run into the restart; the window's end ends that too."""
    quarantine = Quarantine()
    jobs = make_jobs(6)
    seen = []
    for n, job in enumerate(jobs[:4]):
        quarantine.note_break(job, beside=jobs[n + 1 :])
        seen.append(quarantine.crash_seen)
    assert seen == [False, False, True, True]
    assert quarantine.close_window() == (jobs[:4], True)
    assert not quarantine.crash_seen


@pytest.mark.rule("D5", "Suspects are tried apart, in smaller and smaller groups.")
@pytest.mark.parametrize(
    ("count", "sizes"),
    [(0, []), (1, [1]), (2, [1, 1]), (4, [1, 1, 1, 1]), (5, [2, 2, 1]), (16, [4] * 4), (64, [16] * 4)],
)
def test_suspects_are_tried_in_at_most_four_groups(count: int, sizes: list[int]) -> None:
    """D5: each once, in groups that get smaller until one line is alone."""
    quarantine = Quarantine()
    jobs = make_jobs(count)
    quarantine.suspect(jobs)
    groups = []
    while group := start_all(quarantine):
        groups.append(group)
        for job in group:
            quarantine.finish(job)
    assert [len(group) for group in groups] == sizes
    assert [job for group in groups for job in group] == jobs
    assert all(job.suspect for job in jobs)
    assert not quarantine.occupied


@pytest.mark.rule("D5", "A group begins only when nothing else is in flight.")
def test_a_group_begins_only_when_nothing_else_is_in_flight() -> None:
    """D5: neither a line from before nor one of another group."""
    quarantine = Quarantine()
    quarantine.suspect(make_jobs(8))
    assert start_all(quarantine, in_flight=1) == []
    first = start_all(quarantine)
    assert numbers(first) == [0, 1]
    quarantine.finish(first[0])
    assert start_all(quarantine, in_flight=1) == []
    quarantine.finish(first[1])
    assert numbers(start_all(quarantine)) == [2, 3]


def test_a_group_goes_on_though_slots_come_one_by_one() -> None:
    """D5: its own lines in flight do not hold up the rest of it."""
    quarantine = Quarantine()
    quarantine.suspect(make_jobs(8))
    for in_flight in (0, 1):
        assert quarantine.start_next(in_flight=in_flight) is not None
    assert quarantine.start_next(in_flight=2) is None


def test_a_group_that_was_handed_out_counts_before_it_is_in_flight() -> None:
    """D5: between the handing out and the start nothing is in flight yet, and still no second group may begin."""
    quarantine = Quarantine()
    quarantine.suspect(make_jobs(8))
    handed_out: list[Job] = []
    while (job := quarantine.start_next(in_flight=0)) is not None:
        handed_out.append(job)
    assert numbers(handed_out) == [0, 1]


def test_it_is_occupied_until_the_last_suspect_came_back() -> None:
    """D5: while it is, nothing else may start beside them."""
    quarantine = Quarantine()
    (job,) = jobs = make_jobs(1)
    quarantine.suspect(jobs)
    assert quarantine.occupied
    assert quarantine.start_next(in_flight=0) is job
    assert quarantine.occupied
    quarantine.finish(job)
    assert not quarantine.occupied
    quarantine.finish(job)
    assert not quarantine.occupied


def test_the_guilty_line_is_found_among_many() -> None:
    """D5: few crashes, and at the end it breaks alone; everyone else got an answer."""
    quarantine = Quarantine()
    jobs, guilty = make_jobs(64), 37
    quarantine.suspect(jobs)
    answered: list[Job] = []
    crashes = 0
    while group := start_all(quarantine):
        for job in group:
            quarantine.finish(job)
        if jobs[guilty] not in group:
            answered += group
        elif len(group) > 1:
            crashes += 1
            quarantine.suspect(group)
    assert sorted(numbers(answered)) == [n for n in range(64) if n != guilty]
    assert crashes == 2


def test_the_withdrawn_are_gone_from_every_group() -> None:
    """C11: lines of a stopped batch wait nowhere; those in flight are not withdrawn."""
    quarantine = Quarantine()
    jobs = make_jobs(16)
    quarantine.suspect(jobs)
    assert quarantine.start_next(in_flight=0) is jobs[0]
    withdrawn = quarantine.withdraw(lambda job: job.line.index % 2 == 0 or job.line.index in range(4, 8))
    assert numbers(withdrawn) == [2, 4, 5, 6, 7, 8, 10, 12, 14]
    assert numbers(start_all(quarantine, in_flight=1)) == [1, 3]
    for job in (jobs[0], jobs[1], jobs[3]):
        quarantine.finish(job)
    assert numbers(start_all(quarantine)) == [9, 11]
    assert numbers(quarantine.withdraw(lambda _: True)) == [13, 15]
    for job in jobs:
        quarantine.finish(job)
    assert not quarantine.occupied
