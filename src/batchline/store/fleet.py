"""Processes that work together: what each does, and its part of every cap."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.domain.fleet import Report, Share, share_of
from batchline.store.sql import Database, Row, Script, change, rows


class _Process(Struct, frozen=True):
    report: Report
    reserved: dict[str, int]
    """Of each cap, what nobody else may have."""


class SqlFleet:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def tell(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        def script() -> Script[dict[str, int]]:
            yield from rows("lock_fleet")
            yield from change("forget_processes")
            processes = [_process(row) for row in (yield from rows("processes"))]
            others = [process for process in processes if process.report.owner != report.owner]
            shares = {name: _share(name, cap, report, others) for name, cap in caps.items()}
            reserved = {name: share.reserved for name, share in shares.items()}
            yield from change(
                "put_process",
                owner=report.owner,
                lease=lease,
                report=encode_json(report),
                reserved=encode_json(reserved),
            )
            return {name: share.allowed for name, share in shares.items()}

        return await self._database.write(script)

    async def leave(self, owner: str) -> None:
        await self._database.write(lambda: change("delete_process", owner=owner))

    async def reports(self) -> list[Report]:
        found = await self._database.read(lambda: rows("processes"))
        return [_process(row).report for row in found]


def _share(name: str, cap: int, report: Report, others: list[_Process]) -> Share:
    return share_of(
        cap,
        workers=[report.owner, *(other.report.owner for other in others if other.report.works)],
        owner=report.owner,
        using=report.stations[name].in_flight,
        reserved_by_others=sum(other.reserved.get(name, 0) for other in others),
        live=sum(other.report.stations[name].live for other in others if name in other.report.stations),
    )


def _process(row: Row) -> _Process:
    reserved: Any = decode_json(row["reserved"])
    return _Process(decode_json(row["report"], type=Report), reserved)
