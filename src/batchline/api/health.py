"""The routes ``/healthz``, ``/readyz`` and ``/metrics``, for the operator of the service."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hmac import compare_digest
from ipaddress import IPv6Address, ip_address

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from batchline.api.responses import json_response
from batchline.domain.errors import InvalidCredentials, MissingCredentials, StoreDown, Unavailable
from batchline.ports import Clock, Objects, Store
from batchline.telemetry.metrics import Metrics

CHECK_TIMEOUT_SECONDS = 5.0
COUNT_INTERVAL_SECONDS = 10.0
_COUNT_TIME_SHARE = 0.01
"""The most time that counting the queued lines may take, as a share of all time. It grows with their number, and on
SQLite nothing else is read meanwhile."""
_RELAY_HEADERS = ("forwarded", "x-forwarded-for", "origin")
"""Headers that a proxy or a browser adds: such a request only seems to come from this machine."""

log = logging.getLogger(__name__)


class HealthRoutes:
    """Reports whether the process is alive and ready, and its metrics."""

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        metrics: Metrics,
        clock: Clock,
        admin_token: str | None,
        check_timeout_seconds: float = CHECK_TIMEOUT_SECONDS,
        count_interval_seconds: float = COUNT_INTERVAL_SECONDS,
    ) -> None:
        self._checks = {"database": store.check, "storage": objects.check}
        self._store, self._metrics, self._clock = store, metrics, clock
        self._count_due_at = -math.inf
        self._admin_token = admin_token
        self._check_timeout_seconds = check_timeout_seconds
        self._count_interval_seconds = count_interval_seconds

    async def healthz(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        failures = [
            f"{name} {why}" for name, check in self._checks.items() if (why := await self._failure(name, check))
        ]
        if failures:
            raise Unavailable(f"Not ready: {'; '.join(failures)}")
        return json_response({"status": "ready"} | dict.fromkeys(self._checks, "ok"))

    async def metrics(self, request: Request) -> Response:
        if not _is_local(request):
            self._check_token(request.headers.get("authorization", ""))
        await self._count_queue()
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _failure(self, name: str, check: Callable[[], Awaitable[None]]) -> str | None:
        """Run a check and return why it failed, or None."""
        try:
            async with asyncio.timeout(self._check_timeout_seconds):
                await check()
        except TimeoutError:
            return f"did not answer within {self._check_timeout_seconds:g} seconds"
        except Exception as error:  # noqa: BLE001 - this page must say which part failed, for every kind of error
            fields = {"part": name, "error": type(error).__name__, "reason": str(error)}
            log.warning("readiness check failed, answering 503", extra=fields)
            return "failed"
        return None

    async def _count_queue(self) -> None:
        """Count the queued lines, at most once per interval, and less often if it takes long."""
        began_at = self._clock.steady()
        if began_at < self._count_due_at:
            return
        self._count_due_at = math.inf
        try:
            with suppress(StoreDown):
                self._metrics.queue_lines.set(await self._store.count_queued_lines())
        finally:
            took = self._clock.steady() - began_at
            self._count_due_at = began_at + max(self._count_interval_seconds, took / _COUNT_TIME_SHARE)

    def _check_token(self, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise MissingCredentials
        if self._admin_token is None or not compare_digest(token.strip().encode(), self._admin_token.encode()):
            raise InvalidCredentials


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _RELAY_HEADERS):
        return False
    address = ip_address(request.client.host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
