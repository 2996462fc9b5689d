"""``batchline usage``: sums up tokens and costs. The service may run meanwhile."""

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.output import Row, json_flag, moment, show_json, show_table
from batchline.cli.store import find_project, in_store, now, store_options
from batchline.domain.money import units
from batchline.domain.records import UsageEntry
from batchline.ports import Store
from batchline.settings import DAY

_MOMENT = click.DateTime(("%Y-%m-%d", "%Y-%m-%dT%H"))
_Sums = list[tuple[Row, Counter[str]]]
"""The groups, each with its sums."""

_GROUPS: dict[str, Callable[[UsageEntry], Row]] = {
    "hour": lambda entry: {"hour": entry.since},
    "day": lambda entry: {"day": entry.since - entry.since % DAY},
    "project": lambda entry: {
        "organization": entry.organization,
        "project": entry.project,
        "project_id": entry.project_id,
    },
    "model": lambda entry: {"model": entry.model},
    "batch": lambda entry: {"batch_id": entry.batch_id},
}
_COLUMNS = {
    "hour": ("hour",),
    "day": ("day",),
    "project": ("organization", "project"),
    "model": ("model",),
    "batch": ("batch_id",),
}
_NUMBERS = ("requests", "input", "cached", "output", "cost")


@click.command(cls=Command)
@click.option("--project", metavar="PROJECT", help="Count only this project (id or name).")
@click.option("--since", type=_MOMENT, metavar="TIME", help="Start of the period. [first day of this month]")
@click.option("--until", type=_MOMENT, metavar="TIME", help="End of the period, not included. [now]")
@click.option(
    "--by",
    "groups",
    multiple=True,
    type=click.Choice(tuple(_GROUPS)),
    default=("project", "model"),
    show_default=True,
    help="Group by this; can be given several times.",
)
@json_flag
@store_options
def usage(
    project: str | None,
    since: datetime | None,
    until: datetime | None,
    groups: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> None:
    """Sum up requests, tokens and costs.

    TIME is the start of a day or an hour in UTC: 2026-11-01 or 2026-11-01T15. Rows without a batch are synchronous
    calls.
    """
    start, end = _span(since, until)

    async def read(store: Store) -> list[UsageEntry]:
        project_id = None if project is None else (await find_project(store, project)).id
        return await store.usage(since=start, until=end, project_id=project_id)

    sums = _sum_up(in_store(flags, read), groups)
    if as_json:
        show_json([{**group, **used, "cost": units(used["cost_nano"])} for group, used in sums])
    else:
        _show(sums, groups)


def _span(since: datetime | None, until: datetime | None) -> tuple[int, int]:
    this_month = datetime.fromtimestamp(now(), UTC).replace(day=1, hour=0, minute=0, second=0)
    start = _seconds(since or this_month)
    end = now() + 1 if until is None else _seconds(until)
    if end <= start:
        raise click.UsageError("--until must be later than --since")
    return start, end


def _seconds(time: datetime) -> int:
    return int(time.replace(tzinfo=UTC).timestamp())


def _sum_up(entries: Iterable[UsageEntry], groups: Iterable[str]) -> _Sums:
    sums: dict[tuple[tuple[str, str | int | None], ...], Counter[str]] = {}
    for entry in entries:
        group = {name: value for by in groups for name, value in _GROUPS[by](entry).items()}
        sums.setdefault(tuple(group.items()), Counter()).update(_used(entry))
    ordered = sorted(sums, key=lambda group: ["" if value is None else value for _, value in group])
    return [(dict(group), sums[group]) for group in ordered]


def _used(entry: UsageEntry) -> dict[str, int]:
    return {
        "requests": entry.requests,
        "input_tokens": entry.input_tokens,
        "cached_tokens": entry.cached_tokens,
        "output_tokens": entry.output_tokens,
        "reasoning_tokens": entry.reasoning_tokens,
        "cost_nano": entry.cost,
    }


def _show(sums: _Sums, groups: Iterable[str]) -> None:
    columns = [column for by in dict.fromkeys(groups) for column in _COLUMNS[by]]
    total = sum((used for _, used in sums), Counter[str]())
    lines = [[*(_label(column, group[column]) for column in columns), *_numbers(used)] for group, used in sums]
    lines.append(["total", *[""] * (len(columns) - 1), *_numbers(total)])
    show_table([*columns, *_NUMBERS], lines, numbers=len(_NUMBERS))


def _label(column: str, value: str | int | None) -> str:
    if isinstance(value, int):
        return moment(value)[: len("2026-11-01")] if column == "day" else moment(value)
    return value or "-"


def _numbers(used: Counter[str]) -> list[str]:
    """Return the numbers in the order of ``_NUMBERS``."""
    counts = (used["requests"], used["input_tokens"], used["cached_tokens"], used["output_tokens"])
    return [*map(str, counts), units(used["cost_nano"])]
