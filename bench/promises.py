"""Compares what batchline promises with what it reached."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bench.figures import Table, count, number


class Promise(Struct, frozen=True, kw_only=True):
    """A figure and its goal; without a goal it is only reported."""

    what: str
    backend: str
    reached: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    under: float | None = None

    @property
    def goal(self) -> str:
        bounds = {"at least": self.at_least, "at most": self.at_most, "under": self.under}
        return next((f"{word} {bound:g}{self.unit}" for word, bound in bounds.items() if bound is not None), "")

    @property
    def kept(self) -> bool | None:
        """Whether the goal is reached; None if there is no goal."""
        if self.at_least is not None:
            return self.reached >= self.at_least
        if self.at_most is not None:
            return self.reached <= self.at_most
        return None if self.under is None else self.reached < self.under


def scoreboard(promises: Iterable[Promise], *, title: str) -> Table:
    """Return a table with a row per figure, in order, and a pair of columns per backend."""
    rows: dict[str, dict[str, Promise]] = {}
    for promise in promises:
        rows.setdefault(promise.what, {})[promise.backend] = promise
    backends = list(dict.fromkeys(backend for row in rows.values() for backend in row))
    return Table(
        title=title,
        heads=("figure", "goal", *(head for backend in backends for head in (backend, "kept"))),
        rows=[_row(what, row, backends) for what, row in rows.items()],
    )


def _row(what: str, row: dict[str, Promise], backends: Sequence[str]) -> tuple[str, ...]:
    goal = next(iter(row.values())).goal
    return (what, goal, *(cell for backend in backends for cell in _cells(row.get(backend))))


def _cells(promise: Promise | None) -> tuple[str, str]:
    if promise is None:
        return "-", ""
    verdicts = {True: "yes", False: "NO", None: ""}
    reached = count(promise.reached) if isinstance(promise.reached, int) else number(promise.reached)
    return reached + promise.unit, verdicts[promise.kept]
