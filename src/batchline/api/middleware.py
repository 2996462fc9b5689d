"""Around every route: request ids, deadlines, CORS, the log, and an answer in the envelope whatever happens."""

import asyncio
import logging
import traceback

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.cors import Cors
from batchline.api.request_context import RequestContext
from batchline.api.responses import error_response
from batchline.domain import ids
from batchline.domain.errors import ApiError, InternalError, ObjectsDown, StoreDown, Unavailable
from batchline.ports import Clock, Random
from batchline.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_LOGGED_CHARACTERS = 200


class Middleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        cors: Cors,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        stall_seconds: float,
        drain_bytes: int,
    ) -> None:
        self._app = app
        self._cors = cors
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._stall_seconds = stall_seconds
        self._drain_bytes = drain_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = ids.request_id(self._random.bytes(16))
        began = self._clock.steady()
        exchange = RequestContext(
            scope,
            receive,
            send,
            headers={"x-request-id": request_id} | self._cors.headers(Headers(scope=scope).get("origin")),
            stall_seconds=self._stall_seconds,
            drain_bytes=self._drain_bytes,
        )
        try:
            await self._answer(scope, exchange, request_id)
        finally:
            self._note(scope, exchange, request_id, self._clock.steady() - began)

    async def _answer(self, scope: Scope, exchange: RequestContext, request_id: str) -> None:
        try:
            if scope["method"] == "OPTIONS":
                await self._cors.preflight(Headers(scope=scope))(scope, exchange.receive, exchange.send)
            else:
                await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            # Only the end of the server cancels a request: its client is told, and there is nothing above to unwind.
            await self._refuse(scope, exchange, Unavailable("The service is shutting down. Try again."))
        except Exception as error:  # noqa: BLE001 - the last stop: whatever it is, the client gets an answer
            await self._refuse(scope, exchange, _refusal(error, request_id))

    async def _refuse(self, scope: Scope, exchange: RequestContext, refusal: ApiError) -> None:
        """Where an answer has begun it stays cut off, and the server closes the connection on it."""
        if exchange.status is None:
            await error_response(refusal)(scope, exchange.receive, exchange.send)

    def _note(self, scope: Scope, exchange: RequestContext, request_id: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_requests.labels(method, exchange.status or "none").inc()
        fields = {
            "method": scope["method"],
            "path": scope["raw_path"].decode("latin-1")[:_LOGGED_CHARACTERS],
            "status": exchange.status,
            "ms": round(seconds * 1000, 1),
            "request_id": request_id,
            "project_id": scope["state"].get("project_id"),
        }
        _log.info("request", extra=fields)


def _refusal(error: Exception, request_id: str) -> ApiError:
    if isinstance(error, StoreDown | ObjectsDown):
        _log.warning("storage unavailable", extra=_trace(error, request_id))
        return Unavailable()
    if not isinstance(error, ApiError):
        _log.error("request failed", extra=_trace(error, request_id))
        return InternalError()
    if error.status >= 500:
        _log.warning("request failed", extra=_trace(error, request_id))
    return error


def _trace(error: Exception, request_id: str) -> dict[str, str]:
    """Kinds and places only, as the text of an error may repeat what the client sent; storage speaks of itself."""
    kinds, reason = [], ""
    link: BaseException | None = error
    while link is not None:
        kinds.append(type(link).__name__)
        reason = str(link) if isinstance(link, StoreDown | ObjectsDown) else reason
        link = link.__cause__
    places = "".join(traceback.format_tb(error.__traceback__))
    return {"request_id": request_id, "error": " < ".join(kinds), "reason": reason, "trace": places}
