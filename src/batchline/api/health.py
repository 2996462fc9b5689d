"""The routes ``/healthz``, ``/readyz`` and ``/metrics``, for the operator of the service."""

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from batchline.api.failure_limit import FailureLimit, network_of
from batchline.api.responses import error_response, json_response
from batchline.domain.errors import InvalidCredentials, MissingCredentials, StoreDown, Unavailable
from batchline.domain.records import QueueState
from batchline.pipeline.identity import IdentityCheck
from batchline.ports import Objects, Store, WatchedClock
from batchline.telemetry.metrics import Metrics

CHECK_TIMEOUT_SECONDS = 5.0
_READY_SECONDS, _NOT_READY_SECONDS = 5.0, 1.0
"""The time for which the result of the checks is reused. They write to the database and the storage, and anyone may
ask for them."""
COUNT_INTERVAL_SECONDS = 10.0
_COUNT_TIME_SHARE = 0.01
"""The most time that counting the queued lines may take, as a share of all time. It grows with their number, and on
SQLite nothing else is read meanwhile."""
_RELAY_HEADERS = (
    *("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"),
    *("true-client-ip", "cf-connecting-ip", "origin", "sec-fetch-site"),
)
"""Headers that a proxy or a browser adds: such a request only seems to come from this machine."""
_PORT = re.compile(r":[0-9]*$")

log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """The result of one readiness check: whether it passed, and the text that ``/readyz`` shows."""

    ready: bool
    text: str


_READY, _DEGRADED, _NOT_READY = "ready", "degraded", "not ready"
_OK = _Part(True, "ok")
_NOT_CHECKED = _Part(True, "not checked")


class HealthRoutes:
    """Reports whether the process is alive and ready, and its metrics.

    A worker is not ready without the storage, because it can record nothing. A process with the API is ready without
    it: it answers everything that needs only the database, and every other node that a load balancer could choose
    lacks the same bucket.
    """

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        identity: IdentityCheck,
        metrics: Metrics,
        clock: WatchedClock,
        admin_token: str | None,
        needs_storage: bool,
        check_timeout_seconds: float = CHECK_TIMEOUT_SECONDS,
        count_interval_seconds: float = COUNT_INTERVAL_SECONDS,
    ) -> None:
        self._store, self._objects, self._identity = store, objects, identity
        self._metrics, self._clock = metrics, clock
        self._count_due_at = -math.inf
        self._queue: QueueState | None = None
        self._admin_token, self._failures = admin_token, FailureLimit(clock=clock)
        self._needs_storage = needs_storage
        self._checking = asyncio.Lock()
        self._parts: dict[str, _Part] = {}
        self._status = _READY
        """The status that was answered last."""
        self._checks_due_at = -math.inf
        self._check_timeout_seconds = check_timeout_seconds
        self._count_interval_seconds = count_interval_seconds

    async def healthz(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        parts = await self._check_parts()
        failed = [name for name, part in parts.items() if not part.ready]
        status = _DEGRADED if failed else _READY
        if failed and (self._needs_storage or failed != ["storage"]):
            status = _NOT_READY
        reason = "; ".join(f"{name} {parts[name].text}" for name in failed)
        self._log_change(status, reason)
        if status == _NOT_READY:
            # It is not raised, because each exception with this status is logged, and this one is read every second.
            return error_response(Unavailable(f"Not ready: {reason}"))
        texts = {name: part.text for name, part in parts.items()}
        return json_response({"status": status} | texts | {"clock": self._clock.state.problem or "ok"})

    def _log_change(self, status: str, reason: str) -> None:
        """Log the status of the process if it is another one than before."""
        if status == self._status:
            return
        self._status = status
        if status == _READY:
            log.info("process is ready again")
        elif status == _DEGRADED:
            log.warning("process is degraded, answering what needs no storage", extra={"reason": reason})
        else:
            log.warning("process is not ready, answering 503 to readiness checks", extra={"reason": reason})

    async def metrics(self, request: Request) -> Response:
        if not _is_local(request):
            self._check_token(request)
        await self._count_queue()
        if self._queue is not None:
            self._show_queue(self._queue)
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _check_parts(self) -> dict[str, _Part]:
        """Return the state of every part, at most a few seconds old. All who ask at once wait for the same checks."""
        async with self._checking:
            if self._clock.steady() >= self._checks_due_at:
                self._parts = await self._run_checks()
            return self._parts

    async def _run_checks(self) -> dict[str, _Part]:
        parts = {"database": await self._check("database", self._store.check)}
        if parts["database"].ready:
            parts["migrations"] = await self._check("migrations", self._check_migrations)
        parts["storage"] = await self._check("storage", self._objects.check)
        if parts["database"].ready and parts["storage"].ready:
            parts["identity"] = await self._check("identity", self._identity.check)
        else:
            parts["identity"] = _NOT_CHECKED
        passed = all(part.ready for part in parts.values())
        self._checks_due_at = self._clock.steady() + (_READY_SECONDS if passed else _NOT_READY_SECONDS)
        return parts

    async def _check(self, name: str, check: Callable[[], Awaitable["_Part | None"]]) -> "_Part":
        """Run a check. One that returns nothing has passed, and one that raises or hangs has failed."""
        try:
            async with asyncio.timeout(self._check_timeout_seconds):
                return await check() or _OK
        except TimeoutError:
            return _Part(False, f"did not answer within {self._check_timeout_seconds:g} seconds")
        except Exception as error:  # noqa: BLE001 - this page must say which part failed, for every kind of error
            fields = {"part": name, "error": type(error).__name__, "reason": str(error)}
            log.warning("readiness check failed", extra=fields)
            return _Part(False, "failed")

    async def _check_migrations(self) -> "_Part":
        """Compare the schema with the program.

        An older schema lacks what the program needs. With a newer one the program goes on: while a fleet is upgraded,
        the processes of the former version must serve until those of the new one have started.
        """
        found = await self._store.schema_versions()
        if found.database == found.program:
            return _OK
        differ = f"differ: the database has version {found.database} of the tables, this process has {found.program}"
        if found.database < found.program:
            return _Part(False, f"{differ}. Run: batchline migrate")
        return _Part(True, f"{differ}. Restart it with the new version of batchline")

    def _show_queue(self, queue: QueueState) -> None:
        """Set the gauges of the queue. Ages and deadlines are those of this moment, also if the counts are older."""
        now, metrics = self._clock.now(), self._metrics
        metrics.queue_lines.set(queue.lines)
        for status, count in queue.open_batches.items():
            metrics.open_batches.labels(status).set(count)
        metrics.oldest_line_seconds.set(max(0.0, now - (queue.oldest_created_at or now)))
        metrics.nearest_deadline_seconds.set((queue.nearest_expires_at or math.inf) - now)

    async def _count_queue(self) -> None:
        """Count the queued lines and open batches, at most once per interval, and less often if it takes long."""
        began_at = self._clock.steady()
        if began_at < self._count_due_at:
            return
        self._count_due_at = math.inf
        try:
            with suppress(StoreDown):
                self._queue = await self._store.queue_state()
        finally:
            took = self._clock.steady() - began_at
            self._count_due_at = began_at + max(self._count_interval_seconds, took / _COUNT_TIME_SHARE)

    def _check_token(self, request: Request) -> None:
        """Raise MissingCredentials, InvalidCredentials or RateLimited unless a request has the token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise MissingCredentials
        network = network_of(request)
        self._failures.check(network)
        if self._admin_token is None or not compare_digest(token.strip().encode(), self._admin_token.encode()):
            self._failures.count(network)
            raise InvalidCredentials


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _RELAY_HEADERS):
        return False
    return _is_loopback(request.client.host) and _names_this_machine(request.headers.get("host", ""))


def _names_this_machine(host: str) -> bool:
    """Return whether a Host header names loopback. After DNS rebinding, a web page still sends its own name here."""
    name = _PORT.sub("", host).removeprefix("[").removesuffix("]")
    return name.lower() in {"", "localhost"} or _is_loopback(name)


def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
