"""``batchline fsck``: checks that everything that is stored agrees. The service may run meanwhile."""

import asyncio
from typing import Any

import click
from msgspec.structs import asdict

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import json_flag, progress_line, say, show_json
from batchline.cli.text import counted, format_size, printable
from batchline.fsck.findings import TITLES, Checked, Finding, Fix, FsckReport, Kind, RepairStatus

_AMOUNTS = ("batches", "segments", "files", "objects", "organizations", "bytes")
"""The numbers of ``Checked``, in the order in which they are shown."""
_DONE = {
    Fix.REMAKE_RESULT: "It was made again from the segments of the batch.",
    Fix.CORRECT_COUNTS: "The counts were set to those of the result files.",
    Fix.CORRECT_DRAINED: "It was set by the states of its shards.",
    Fix.CORRECT_TIMES: "The later time was moved to the earlier one.",
    Fix.CLOSE_SHARDS: "The shards were closed.",
    Fix.OPEN_LANES: "The lane was opened.",
    Fix.HAND_OVER: "It was closed, so that the service repairs it with its batch.",
    Fix.SET_TO_LEDGER: "They were set to the sums of the ledger.",
}
_HANDED_OVER = "Run the check again when the batch has ended."


class _CannotCheck(click.ClickException):
    """Nothing was checked, or not everything."""

    exit_code = 2


@click.command(short_help="Check that everything that is stored agrees.", cls=Command)
@click.option("--repair", is_flag=True, help="Repair what can be repaired safely. Nothing of a client is deleted.")
@json_flag
@settings_options("data_dir", "database_url", "database_pooler", "storage_url", "work_retention_seconds", "config")
@click.pass_context
def fsck(context: click.Context, /, *, repair: bool, as_json: bool, **flags: Any) -> None:
    """Check that everything that is stored agrees: rows, objects, checksums, counts, money.

    Use the settings of the service, which may run meanwhile. All results and the work of batches are read; of uploads,
    which have no checksum, only the size is checked. The exit code is 0 if nothing is wrong, 1 if something is or
    remains wrong, and 2 if it could not be checked.
    """
    settings = load_settings(**flags)
    from batchline.app import StartupError  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.app.maintenance import check_stored_data  # noqa: PLC0415

    try:
        with progress_line() as show:
            checked = Checked(on_progress=lambda checked: show(_progress(checked)))
            report = asyncio.run(check_stored_data(settings, checked, repair=repair))
    except (StartupError, OSError) as error:
        raise _CannotCheck(str(error)) from None
    if as_json:
        show_json(_document(report, repair=repair))
    else:
        _show(report, repair=repair)
    context.exit(0 if report.is_clean else 1)


def _progress(checked: Checked) -> str:
    return f"Checking: {counted(checked.batches, 'batch')}, {format_size(checked.bytes)}"


def _show(report: FsckReport, *, repair: bool) -> None:
    checked = report.checked
    amounts = ", ".join(f"{name}: {getattr(checked, name)}" for name in _AMOUNTS if name != "bytes")
    say(f"Checked {amounts}; {format_size(checked.bytes)} were read.", indent=2)
    for kind in Kind:
        if report.found[kind]:
            _show_kind(report, kind)
    click.echo(f"\n{_summary(report, repair=repair)}" if report.found else _summary(report, repair=repair))


def _show_kind(report: FsckReport, kind: Kind) -> None:
    named = report.of_kind(kind)
    click.echo(f"\n{TITLES[kind]} ({report.found[kind]})")
    for finding in named:
        name = finding.batch or finding.organization
        say(printable(f"  {f'{name}: ' if name else ''}{_sentence(finding.problem, name is None)}"), indent=4)
        say(printable(f"    {_next(finding)}"), indent=4)
    if more := report.found[kind] - len(named):
        click.echo(f"  and {more} more")


def _sentence(problem: str, is_start: bool) -> str:
    text = f"{problem[0].upper()}{problem[1:]}" if is_start and problem.startswith("the ") else problem
    return text if text.endswith(".") else f"{text}."


def _next(finding: Finding) -> str:
    if finding.repair_status is RepairStatus.REPAIRED:
        done = "It is gone with the other repairs." if finding.fix is None else _DONE[finding.fix]
        return f"Repaired. {done}"
    if finding.repair_status is RepairStatus.HANDED_OVER:
        return f"{finding.next} {_HANDED_OVER}"
    if finding.repair_status is RepairStatus.NOT_POSSIBLE and finding.fix is not None:
        return "It could not be repaired: what it would be made from is damaged too. Restore it from a backup."
    return finding.next


def _summary(report: FsckReport, *, repair: bool) -> str:
    wrong = report.repaired + report.remaining
    if not wrong:
        return "Nothing is wrong."
    problems = counted(wrong, "problem")
    if not repair:
        return f"{problems} found."
    return f"{problems} found, {report.repaired} repaired, {report.remaining} left."


def _document(report: FsckReport, *, repair: bool) -> object:
    return {
        "clean": report.is_clean,
        "repair": repair,
        "checked": {name: getattr(report.checked, name) for name in _AMOUNTS},
        "found": {kind.value: report.found[kind] for kind in Kind},
        "repaired": report.repaired,
        "remaining": report.remaining,
        "findings": [_row(finding) for finding in report.findings],
    }


def _row(finding: Finding) -> object:
    fields = asdict(finding)
    del fields["fix"]
    return {"note": finding.is_note, **fields}
