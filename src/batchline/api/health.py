"""``/healthz``, ``/readyz`` and ``/metrics``: for whoever runs the service, not for its clients."""

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

_CHECK_SECONDS = 5.0
_COUNT_SECONDS = 10.0
_RELAYED = ("forwarded", "x-forwarded-for", "origin")
"""What a proxy or a browser's page adds: such a request only looks as if it came from this machine."""

_log = logging.getLogger(__name__)


class HealthRoutes:
    def __init__(
        self, *, store: Store, objects: Objects, metrics: Metrics, clock: Clock, admin_token: str | None
    ) -> None:
        self._checks = {"database": store.check, "storage": objects.check}
        self._store, self._metrics, self._clock = store, metrics, clock
        self._counted_at = -math.inf
        self._admin_token = admin_token

    async def healthz(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        red = [f"{name} {why}" for name, check in self._checks.items() if (why := await _failure(name, check))]
        if red:
            raise Unavailable(f"Not ready: {'; '.join(red)}")
        return json_response({"status": "ready"} | dict.fromkeys(self._checks, "ok"))

    async def metrics(self, request: Request) -> Response:
        if not _is_local(request):
            self._check_token(request.headers.get("authorization", ""))
        await self._count_queue()
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _count_queue(self) -> None:
        """Now and then: what it costs grows with what is waiting."""
        now = self._clock.steady()
        if now - self._counted_at >= _COUNT_SECONDS:
            self._counted_at = now
            with suppress(StoreDown):
                self._metrics.queue_lines.set(await self._store.count_queued_lines())

    def _check_token(self, authorization: str) -> None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise MissingCredentials
        if self._admin_token is None or not compare_digest(token.strip().encode(), self._admin_token.encode()):
            raise InvalidCredentials


async def _failure(name: str, check: Callable[[], Awaitable[None]]) -> str | None:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await check()
    except TimeoutError:
        return f"did not answer within {_CHECK_SECONDS:g} seconds"
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a part, this page must say which
        _log.warning("not ready", extra={"part": name, "error": type(error).__name__, "reason": str(error)})
        return "failed"
    return None


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in _RELAYED):
        return False
    address = ip_address(request.client.host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
