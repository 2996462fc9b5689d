"""batchline beside wrk, which does nothing but send: 64 in flight, in turns, so that a slower moment meets both."""

from typing import Any

from bench.contestants import AT_ONCE, WRK, Run, run_batchline, run_wrk, why_not
from bench.course import Course, note
from bench.figures import Table, count, figures, number, ratio
from bench.upstream import Plan

_LATENCIES = (20, 200)
_OVERHEAD_MS = 1.0
"""What an answer takes longer than the upstream's latency, about; only the length of the run depends on it."""


def measure(course: Course) -> tuple[Any, list[Table]]:
    if why := why_not(WRK):
        course.leave_out(WRK, why)
        return None, []
    turns = {latency: _take_turns(course, latency) for latency in _LATENCIES}
    heads = ("upstream", "wrk/s", "batchline/s", "ratio", "wrk CPU us", "batchline CPU us", "in flight")
    table = Table(
        title=f"Answers a second while somebody asked, {AT_ONCE} in flight; wrk before and after",
        heads=heads,
        rows=[_row(latency, runs) for latency, runs in turns.items()],
    )
    return turns, [table]


def _take_turns(course: Course, latency: int) -> list[Run]:
    seconds, plan = course.sizes.sending_seconds, Plan(latency_ms=latency)
    lines = int(seconds * AT_ONCE / (latency + _OVERHEAD_MS) * 1000)
    name = f"{latency} ms, {AT_ONCE} in flight"
    before = note(run_wrk(course.upstream, plan, seconds=seconds), name)
    with course.folder() as folder:
        ours = run_batchline(folder, course.backends[0], course.upstream, plan, lines=lines, max_concurrency=AT_ONCE)
    return [before, note(ours, name), note(run_wrk(course.upstream, plan, seconds=seconds), name)]


def _row(latency: int, runs: list[Run]) -> tuple[str, ...]:
    before, ours, after = (figures([run]) for run in runs)
    theirs = (before.answers_per_second + after.answers_per_second) / 2
    return (
        f"{latency} ms",
        f"{number(before.answers_per_second)}, {number(after.answers_per_second)}",
        number(ours.answers_per_second),
        ratio(ours.answers_per_second, theirs),
        number((before.cpu_us + after.cpu_us) / 2),
        number(ours.cpu_us),
        count(ours.peak_in_flight),
    )
