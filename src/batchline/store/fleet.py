"""Stores the processes of the fleet: the report of each, and its share of every cap."""

from collections.abc import Mapping

from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.domain.fleet import Member, Report, shares_of
from batchline.store.sql import Database, Row, Script, change, rows


class SqlFleet:
    """The Fleet port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        def script() -> Script[dict[str, int]]:
            yield from rows("lock_fleet")
            yield from change("delete_expired_processes")
            members = [_member(row) for row in (yield from rows("processes"))]
            others = [member for member in members if member.report.owner != report.owner]
            shares = shares_of(report, caps=caps, others=others)
            reserved = {name: share.reserved for name, share in shares.items()}
            yield from change(
                "upsert_process",
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
        return [_member(row).report for row in found]


def _member(row: Row) -> Member:
    return Member(report=decode_json(row["report"], type=Report), reserved=decode_json(row["reserved"]))
