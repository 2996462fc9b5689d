"""The processes of one machine that run lines together: what each does, and its part of every cap."""

from collections.abc import Mapping

from batchline.domain.fleet import Member, Report, shares_of


class Roster:
    """A Fleet in the memory of the process that started the others. Nobody is forgotten for being silent: when one of
    them is over is known here, and until then it may have in flight what it was allowed."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def join(self, owner: str) -> None:
        """Whoever works already makes room for it."""
        self._members[owner] = Member(report=Report(owner=owner, works=True))

    def living(self) -> list[str]:
        return list(self._members)

    async def tell(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        others = [member for owner, member in self._members.items() if owner != report.owner]
        shares = shares_of(report, caps=caps, others=others)
        reserved = {name: share.reserved for name, share in shares.items()}
        self._members[report.owner] = Member(report=report, reserved=reserved)
        return {name: share.allowed for name, share in shares.items()}

    async def leave(self, owner: str) -> None:
        self._members.pop(owner, None)

    async def reports(self) -> list[Report]:
        return [member.report for member in self._members.values()]
