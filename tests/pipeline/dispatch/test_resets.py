"""Broken connections that are about the number in flight, and those that are about a line (D3, D5)."""

from batchline.pipeline.dispatch.resets import Resets
from batchline.pipeline.job import Job
from tests.support.jobs import make_jobs


def break_together(resets: Resets, jobs: list[Job], *, beside: list[Job]) -> None:
    for number, job in enumerate(jobs):
        resets.on_break(job, beside=[*jobs[number + 1 :], *beside], is_first=number == 0)


def answer(resets: Resets, jobs: list[Job]) -> list[bool]:
    return [resets.on_answer(job) for job in jobs]


def test_lines_that_break_beside_others_and_pass_later_were_too_many() -> None:
    resets, broken, beside = Resets(), make_jobs(16), make_jobs(16)
    break_together(resets, broken, beside=beside)
    resets.on_breaks_over(survived=False)
    assert not any(answer(resets, beside))
    assert not resets.known
    assert answer(resets, broken[:4]) == [False, False, False, True]
    assert resets.known


def test_connections_that_outlasted_the_breaks_need_not_be_answered_first() -> None:
    """They may break later, as others do again and again while too many are in flight."""
    resets, broken, beside = Resets(), make_jobs(16), make_jobs(16)
    break_together(resets, broken, beside=beside)
    resets.on_breaks_over(survived=True)
    break_together(resets, beside[:8], beside=beside[8:])
    assert answer(resets, broken[:4]) == [False, False, False, True]
    assert resets.known


def test_a_crash_breaks_everything_and_shows_no_limit() -> None:
    """D5: also if a few answers that came before it are read after the first breaks."""
    resets, broken, answered = Resets(), make_jobs(16), make_jobs(3)
    break_together(resets, broken[:8], beside=[*broken[8:], *answered])
    answer(resets, answered)
    for job in broken[8:]:
        resets.on_break(job, beside=[], is_first=False)
    resets.on_breaks_over(survived=False)
    answer(resets, broken)
    assert not resets.known


def test_lines_that_break_again_show_no_limit() -> None:
    resets, broken, beside = Resets(), make_jobs(4), make_jobs(8)
    break_together(resets, broken, beside=beside)
    answer(resets, [*beside, *broken[:3]])
    assert not resets.known


def test_it_is_known_until_everything_breaks() -> None:
    """Of lines that are answered while others still break, it is known at once."""
    resets, broken, beside = Resets(), make_jobs(8), make_jobs(8)
    break_together(resets, broken, beside=beside)
    answer(resets, [*beside, *broken])
    resets.on_breaks_over(survived=False)
    assert resets.known
    break_together(resets, broken, beside=[])
    resets.on_breaks_over(survived=False)
    assert not resets.known
