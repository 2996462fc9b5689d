"""The quarantine finds the line that crashes the upstream (D5)."""

from collections.abc import Collection

import pytest

from batchline.pipeline.dispatch.quarantine import Quarantine
from batchline.pipeline.job import Job
from tests.support.jobs import make_jobs


def numbers(jobs: list[Job]) -> list[int]:
    return [job.line.index for job in jobs]


def break_all(quarantine: Quarantine, jobs: list[Job], *, beside: list[Job], now: float = 1.0) -> None:
    """Break jobs one after the other, at one time."""
    for n, job in enumerate(jobs):
        quarantine.note_break(job, now, beside=[*jobs[n + 1 :], *beside])
        quarantine.finish(job)


def close(quarantine: Quarantine, *, in_flight: Collection[Job] = (), now: float = 0.25) -> tuple[list[Job], bool]:
    """End the window, and return the jobs that broke and whether they are suspects."""
    verdict = quarantine.close_window(now, in_flight=in_flight)
    assert not (verdict.own and verdict.suspects)
    return verdict.own or verdict.suspects, bool(verdict.suspects)


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
        assert quarantine.note_break(job, 0.0, beside=[*jobs[n + 1 :], *innocent])
        assert quarantine.window_open
    assert close(quarantine) == (jobs, together)
    assert not quarantine.window_open
    assert close(quarantine) == ([], False)


def test_every_window_counts_for_itself() -> None:
    """D5: what was in flight at an earlier crash does not excuse the next."""
    quarantine = Quarantine()
    first, *jobs = make_jobs(3)
    quarantine.note_break(first, 0.0, beside=make_jobs(63))
    assert close(quarantine) == ([first], False)
    assert quarantine.note_break(jobs[0], 0.0, beside=jobs[1:])
    assert quarantine.note_break(jobs[1], 0.0, beside=[])
    assert close(quarantine) == (jobs, True)


def test_a_line_that_breaks_with_nothing_beside_it_waits_for_no_verdict() -> None:
    """D5: it broke alone, so it spends its own attempt."""
    quarantine = Quarantine()
    (job,) = make_jobs(1)
    assert not quarantine.note_break(job, 0.0, beside=[])
    assert not quarantine.window_open
    assert close(quarantine) == ([], False)


def test_only_what_was_in_flight_at_the_first_break_counts() -> None:
    """D5: a fast upstream that drops a connection now and then has not crashed, however many follow in the window."""
    quarantine = Quarantine()
    first, *innocent = make_jobs(4)
    assert quarantine.note_break(first, 0.0, beside=innocent)
    for later in make_jobs(40):
        assert not quarantine.note_break(later, 0.0, beside=innocent), "sent after the first break"
        assert not quarantine.crash_seen
    assert close(quarantine) == ([first], False)


def test_a_crash_is_seen_as_soon_as_half_broke() -> None:
    """D5: from then on nothing may run into the restart; the window's end ends that too."""
    quarantine = Quarantine()
    jobs = make_jobs(6)
    seen = []
    for n, job in enumerate(jobs[:4]):
        quarantine.note_break(job, 0.0, beside=jobs[n + 1 :])
        seen.append(quarantine.crash_seen)
    assert seen == [False, False, True, True]
    assert close(quarantine) == (jobs[:4], True)
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


def alive_with_suspects(count: int) -> tuple[Quarantine, list[Job]]:
    """Break so many lines together while eight others stand, and suspect them."""
    quarantine, jobs, others = Quarantine(), make_jobs(count), make_jobs(8)
    break_all(quarantine, jobs, beside=others, now=0.0)
    verdict = quarantine.close_window(0.25, in_flight=others)
    assert (verdict.suspects, verdict.crashed, quarantine.alive) == (jobs, False, True)
    quarantine.suspect(jobs)
    return quarantine, jobs


@pytest.mark.rule("D9", "While lines are tried apart that broke at an upstream that is alive, others run.")
def test_suspects_run_beside_others_if_connections_outlasted_the_breaks() -> None:
    """D5, D9: still only one group of suspects at a time."""
    quarantine, jobs = alive_with_suspects(8)
    assert quarantine.occupied
    assert not quarantine.holds_all
    assert start_all(quarantine, in_flight=100) == jobs[:2]


@pytest.mark.parametrize("survivors", [0, 7])
def test_too_few_connections_outlast_the_breaks(survivors: int) -> None:
    """D5: the upstream may be down, and suspects run with nothing else in flight."""
    quarantine, jobs, others = Quarantine(), make_jobs(8), make_jobs(survivors)
    break_all(quarantine, jobs, beside=others, now=0.0)
    assert quarantine.close_window(0.25, in_flight=others).crashed
    quarantine.suspect(jobs)
    assert quarantine.holds_all
    assert start_all(quarantine, in_flight=1) == []


@pytest.mark.parametrize(("suspect", "alive"), [(False, True), (True, False)])
def test_an_answer_to_another_line_shows_that_the_upstream_is_alive(suspect: bool, alive: bool) -> None:
    """D5, D9: it was sent after the breaks, or outlasted them. An answer to a suspect may come from a restarted one."""
    quarantine, (other,) = Quarantine(), make_jobs(1)
    quarantine.suspect(make_jobs(8))
    other.suspect = suspect
    assert quarantine.holds_all
    quarantine.on_answer(other, 1.0)
    assert quarantine.holds_all == (not alive)


@pytest.mark.parametrize(("seconds", "is_alive"), [(0.01, False), (0.2, True)])
def test_answers_that_were_read_at_once_may_have_been_sent_before_the_crash(seconds: float, is_alive: bool) -> None:
    quarantine, jobs, others = Quarantine(), make_jobs(8), make_jobs(8)
    break_all(quarantine, jobs, beside=others, now=0.0)
    for job in others:
        quarantine.on_answer(job, seconds)
    close(quarantine)
    assert quarantine.alive == is_alive


@pytest.mark.parametrize(("seconds", "is_alive"), [(599.0, False), (600.0, True)])
def test_after_a_refused_connection_answers_show_nothing_for_ten_minutes(seconds: float, is_alive: bool) -> None:
    """D5: a server that crashes may restart within a second, and answers then."""
    quarantine, _ = alive_with_suspects(8)
    (other,) = make_jobs(1)
    quarantine.on_refused(10.0)
    assert quarantine.holds_all
    quarantine.on_answer(other, 10.0 + seconds)
    assert quarantine.alive == is_alive


def test_an_upstream_that_was_alive_crashes_if_everything_breaks() -> None:
    """D5: suspects and the lines beside them."""
    quarantine, _ = alive_with_suspects(8)
    group = start_all(quarantine, in_flight=8)
    others = make_jobs(8)
    break_all(quarantine, [*group, *others], beside=[])
    verdict = quarantine.close_window(1.25, in_flight=())
    assert (verdict.suspects, verdict.crashed) == ([*group, *others], True)
    assert quarantine.holds_all


@pytest.mark.rule("D5", "A line that breaks again while others beside it do not is the cause of its own breaks.")
def test_a_group_that_breaks_again_beside_others_spends_attempts_and_is_suspected_no_more() -> None:
    quarantine, _ = alive_with_suspects(8)
    group, others = start_all(quarantine, in_flight=8), make_jobs(8)
    break_all(quarantine, group, beside=others)
    assert close(quarantine, in_flight=others, now=1.25) == (group, False)
    assert [(job.suspect, job.breaks_alone) for job in group] == [(False, True)] * 2


def test_no_group_starts_before_it_is_decided_about_the_one_before() -> None:
    """D5: otherwise its breaks would be taken for those of the group before it."""
    quarantine, _ = alive_with_suspects(8)
    group, others = start_all(quarantine, in_flight=8), make_jobs(8)
    break_all(quarantine, group, beside=others)
    assert start_all(quarantine, in_flight=8) == []
    close(quarantine, in_flight=others, now=1.25)
    assert len(start_all(quarantine, in_flight=8)) == 2


def test_lines_sent_and_broken_within_the_window_break_by_themselves_too() -> None:
    quarantine, (first, later), others = Quarantine(), make_jobs(2), make_jobs(8)
    quarantine.note_break(first, 0.0, beside=others)
    assert not quarantine.note_break(later, 0.1, beside=others)
    close(quarantine, in_flight=others)
    assert (first.breaks_alone, later.breaks_alone) == (True, True)


def test_the_suspects_of_each_batch_are_counted() -> None:
    """D11: they wait for their next attempt."""
    quarantine = Quarantine()
    first, second = make_jobs(3), make_jobs(2)
    quarantine.suspect([*first, *second])
    assert quarantine.by_batch == {first[0].batch.id: 3, second[0].batch.id: 2}
