"""The route ``/v1/usage``: what the project of a key has used, and what its organization has left."""

from starlette.requests import Request
from starlette.types import ASGIApp

from batchline.api.auth import Auth
from batchline.api.lists import Lists
from batchline.api.paging import choice, integer
from batchline.domain.errors import InvalidRequest
from batchline.domain.records import Owner
from batchline.domain.wire import UsageReport
from batchline.ports import Clock, Ledger

_BUCKET_SECONDS = {"hour": 3600, "day": 86_400}
_DEFAULT_SECONDS = 30 * 86_400
_MAX_ROWS = 10_000
"""Rows in one answer: 30 days by hour have 720 of them for each model."""
_LAST_SECOND = 1 << 60


class UsageRoutes:
    """Sums up the usage of a project by time and model."""

    def __init__(self, *, auth: Auth, lists: Lists, ledger: Ledger, clock: Clock, metered: bool) -> None:
        self._auth, self._lists = auth, lists
        self._ledger, self._clock, self._metered = ledger, clock, metered

    async def retrieve(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return self._lists.answer(owner, lambda: self._report(request, owner))

    async def _report(self, request: Request, owner: Owner) -> UsageReport:
        query = request.query_params
        bucket = choice(query, "bucket", tuple(_BUCKET_SECONDS)) or "day"
        start, end = self._period(request, bucket_seconds=_BUCKET_SECONDS[bucket])
        rows = await self._ledger.project_usage(
            owner.project_id,
            model=query.get("model"),
            since=start,
            until=end,
            bucket_seconds=_BUCKET_SECONDS[bucket],
            limit=_MAX_ROWS + 1,
        )
        if len(rows) > _MAX_ROWS:
            raise InvalidRequest(
                f"There are more than {_MAX_ROWS} rows; ask for a shorter time, for days, or for one model",
                param="start_time",
            )
        organization = await self._ledger.organization(owner.organization_id) if self._metered else None
        return UsageReport.from_entries(rows, organization=organization, bucket=bucket, start=start, end=end)

    def _period(self, request: Request, *, bucket_seconds: int) -> tuple[int, int]:
        """Return the start, at the beginning of its bucket, and the end of the period that is asked for."""
        query = request.query_params
        end = integer(query, "end_time")
        end = int(self._clock.now()) + 1 if end is None else min(end, _LAST_SECOND)
        start = integer(query, "start_time")
        start = max(0, end - _DEFAULT_SECONDS if start is None else start)
        if end <= start:
            raise InvalidRequest("end_time must be later than start_time", param="end_time")
        return start - start % bucket_seconds, end
