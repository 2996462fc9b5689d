"""Computes the figures of runs, mostly medians, and formats them as tables."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from msgspec import Struct

from bench.round_trip import RoundTripTimes, Step
from bench.runs import Run

MB = 1e6


class StepFigures(Struct, frozen=True, kw_only=True):
    """The steps of a round trip through batchline."""

    upload_mb_per_second: float
    create_lines_per_second: float
    download_mb_per_second: float
    tail_ms: float | None
    """From the upstream's last answer to the state ``completed``."""
    longest_tail_ms: float | None
    polls: int
    poll_p50_ms: float
    poll_p99_ms: float
    poll_max_ms: float


class Figures(Struct, frozen=True, kw_only=True):
    """Medians over the runs of one system under one plan; the maximum for figures that have a bound."""

    system: str
    runs: int
    lines: int
    lines_per_second: float
    answers_per_second: float
    """Answers of the upstream per second, from the first request to its last answer."""
    cpu_us: float
    servers_cpu_us: float
    cpu_us_spread: tuple[float, float]
    machine_cores: float
    rss_mb: float
    uss_mb: float
    pss_mb: float
    servers_pss_mb: float
    peak_in_flight: int
    failed: int
    repeated: int
    steps: StepFigures | None


def figures(runs: Sequence[Run]) -> Figures:
    """Return the figures of runs of one system under one plan."""

    def middle(of: Callable[[Run], float]) -> float:
        return median(map(of, runs))

    times = [run.times for run in runs if run.times is not None]
    costs = [run.cpu_us for run in runs]
    return Figures(
        system=runs[0].system,
        runs=len(runs),
        lines=int(middle(lambda run: run.lines)),
        lines_per_second=middle(lambda run: run.lines_per_second),
        answers_per_second=middle(_answers_per_second),
        cpu_us=median(costs),
        servers_cpu_us=middle(lambda run: run.servers_cpu_seconds / run.lines * 1e6),
        cpu_us_spread=(min(costs), max(costs)),
        machine_cores=middle(lambda run: run.machine_cores),
        rss_mb=middle(lambda run: run.peak.rss / MB),
        uss_mb=middle(lambda run: run.peak.uss / MB),
        pss_mb=middle(lambda run: run.peak.pss / MB),
        servers_pss_mb=middle(lambda run: run.servers_peak.pss / MB),
        peak_in_flight=max(run.seen.peak_in_flight for run in runs),
        failed=max(run.outcome.failed if run.outcome else 0 for run in runs),
        repeated=max(run.seen.repeated for run in runs),
        steps=_step_figures(times, lines=runs[0].lines) if times else None,
    )


def _answers_per_second(run: Run) -> float:
    return run.seen.answered / (run.seen.busy_seconds or run.seconds)


def _step_figures(trips: Sequence[RoundTripTimes], *, lines: int) -> StepFigures:
    polls = sorted(1000 * seconds for trip in trips for seconds in trip.polls)
    tails = [1000 * trip.tail_seconds for trip in trips if trip.tail_seconds is not None]
    return StepFigures(
        upload_mb_per_second=median(_speed(trip.upload) for trip in trips),
        create_lines_per_second=median(lines / trip.create.seconds for trip in trips),
        download_mb_per_second=median(_speed(trip.download) for trip in trips),
        tail_ms=median(tails) if tails else None,
        longest_tail_ms=max(tails, default=None),
        polls=len(polls),
        poll_p50_ms=percentile(polls, 0.5),
        poll_p99_ms=percentile(polls, 0.99),
        poll_max_ms=polls[-1],
    )


def _speed(step: Step) -> float:
    return step.bytes / MB / step.seconds


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the value below which this fraction of the ordered values lies."""
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Table(Struct, frozen=True, kw_only=True):
    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def text(self) -> str:
        """Return the table as Markdown that is also readable in a terminal."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        rule = "|".join("-" * (width + 1) + (":" if place else "-") for place, width in enumerate(widths))
        lines = [_row(self.heads, widths), f"|{rule}|", *(_row(row, widths) for row in self.rows)]
        return "\n".join([self.title, "", *lines, ""])


def _row(cells: Iterable[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    shown = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "| " + " | ".join(shown) + " |"


def number(value: float | None) -> str:
    """Return the number as text, with its significant digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def ratio(value: float, of: float) -> str:
    return f"{value / of:.2f}x" if of else "-"
