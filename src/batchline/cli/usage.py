"""``batchline usage``: sums up tokens and costs, of all projects on a data folder or of one project at a server."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.options import flag
from batchline.cli.output import Row, base_url_option, exit_codes, json_flag, moment, show_json, show_table
from batchline.cli.store import find_project, in_store, now, store_options
from batchline.domain.money import nano, units
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
_AT_SERVER = ("hour", "day", "model")
"""The groups that a server knows: it tells only the usage of the key's own project, and not by batch."""
_NUMBERS = ("requests", "input", "cached", "output", "cost")
_REUSE_NUMBERS = ("reused", "saved")


@click.command(cls=Command, epilog=exit_codes("0", "1", "2", "4"))
@click.option("--project", metavar="PROJECT", help="Count only this project (id or name). Not at a server.")
@click.option("--since", type=_MOMENT, metavar="TIME", help="Start of the period. [first day of this month]")
@click.option("--until", type=_MOMENT, metavar="TIME", help="End of the period, not included. [now]")
@click.option(
    "--by",
    "groups",
    multiple=True,
    type=click.Choice(tuple(_GROUPS)),
    help="Group by this; can be given several times. [project, model; at a server: model]",
)
@json_flag
@base_url_option
@store_options
def usage(
    project: str | None,
    since: datetime | None,
    until: datetime | None,
    groups: tuple[str, ...],
    as_json: bool,
    base_url: str | None,
    **flags: Any,
) -> None:
    """Sum up requests, tokens and costs: of all projects on the data folder, or of the key's project at a server.

    TIME is the start of a day or an hour in UTC: 2026-11-01 or 2026-11-01T15. Rows without a batch are synchronous
    calls. Lines that took an earlier answer are `reused`, and `saved` is what they would have cost.
    """
    start, end = _span(since, until)
    if _names_server(base_url, flags):
        groups = groups or ("model",)
        _refuse_at_server(project, groups)
        by_hour = "hour" in groups or start % DAY
        entries = _ask_server(base_url, start, end, bucket="hour" if by_hour else "day")
    else:
        groups = groups or ("project", "model")
        entries = _read_folder(flags, project, start, end)
    sums = _sum_up(entries, groups)
    if as_json:
        show_json([_object(group, used) for group, used in sums])
    else:
        _show(sums, groups)


def _names_server(base_url: str | None, flags: Mapping[str, Any]) -> bool:
    """Return whether to ask a server. A flag that names a folder or a database wins over a variable."""
    from batchline.cli.connection.target import named_server  # noqa: PLC0415 (imports httpx: not for --help)

    given = [name for name, value in flags.items() if value is not None]
    if base_url and given:
        raise click.UsageError(f"--base-url names a server, and {flag(given[0])} a store; remove one of them")
    return not given and named_server(base_url)[1] is not None


def _refuse_at_server(project: str | None, groups: Iterable[str]) -> None:
    others = [by for by in groups if by not in _AT_SERVER]
    if project is not None or others:
        wrong = "--project" if project is not None else f"--by {others[0]}"
        raise click.UsageError(
            f"{wrong}: a server tells only the usage of the key's own project, by {', '.join(_AT_SERVER)}. To read the "
            "data folder, name it with --data-dir"
        )


def _read_folder(flags: dict[str, Any], project: str | None, start: int, end: int) -> list[UsageEntry]:
    async def read(store: Store) -> list[UsageEntry]:
        project_id = None if project is None else (await find_project(store, project)).id
        return await store.usage(since=start, until=end, project_id=project_id)

    return in_store(flags, read)


def _ask_server(base_url: str | None, start: int, end: int, *, bucket: str) -> list[UsageEntry]:
    from batchline.cli.connection.session import connect  # noqa: PLC0415 (imports httpx: not for --help)

    with connect(base_url, {}) as session:
        found = session.retrier.few_times(lambda: session.client.usage(start_time=start, end_time=end, bucket=bucket))
    return [
        UsageEntry(
            organization="",
            project="",
            project_id="",
            model=used.model,
            batch_id=None,
            since=used.start_time,
            requests=used.requests,
            input_tokens=used.input_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.output_tokens,
            reasoning_tokens=used.reasoning_tokens,
            cost=nano(used.cost),
            reused=used.reused,
            saved=nano(used.saved),
        )
        for used in found
    ]


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
        "reused": entry.reused,
        "saved_nano": entry.saved,
    }


def _object(group: Row, used: Counter[str]) -> dict[str, str | int | None]:
    return {**group, **used, "cost": units(used["cost_nano"]), "saved": units(used["saved_nano"])}


def _show(sums: _Sums, groups: Iterable[str]) -> None:
    columns = [column for by in dict.fromkeys(groups) for column in _COLUMNS[by]]
    total = Counter[str]()
    for _, used in sums:
        # A sum of counters would leave out what is negative: a group that got more back than it was charged.
        total.update(used)
    reuses = bool(total["reused"])
    lines = [[*(_label(column, group[column]) for column in columns), *_numbers(used, reuses)] for group, used in sums]
    lines.append(["total", *[""] * (len(columns) - 1), *_numbers(total, reuses)])
    numbers = (*_NUMBERS, *_REUSE_NUMBERS) if reuses else _NUMBERS
    show_table([*columns, *numbers], lines, numbers=len(numbers))


def _label(column: str, value: str | int | None) -> str:
    if isinstance(value, int):
        return moment(value)[: len("2026-11-01")] if column == "day" else moment(value)
    return value or "-"


def _numbers(used: Counter[str], reuses: bool) -> list[str]:
    """Return the numbers in the order of ``_NUMBERS``, and those of ``_REUSE_NUMBERS`` if any line was reused."""
    counts = (used["requests"], used["input_tokens"], used["cached_tokens"], used["output_tokens"])
    reused = [str(used["reused"]), units(used["saved_nano"])] if reuses else []
    return [*map(str, counts), units(used["cost_nano"]), *reused]
