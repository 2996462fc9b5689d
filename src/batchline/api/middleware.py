"""Wraps every route: request ids, deadlines, CORS, the request log, and the error envelope for every exception."""

import asyncio
import logging
import traceback
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.cors import Cors
from batchline.api.request_context import RequestContext
from batchline.api.responses import error_response
from batchline.domain import ids
from batchline.domain.errors import (
    ApiError,
    BadGateway,
    Damaged,
    GatewayTimeout,
    InternalError,
    ObjectsDown,
    StoreDown,
    Unavailable,
)
from batchline.ports import Clock, Random
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
_READS = frozenset({"GET", "HEAD"})
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes that load balancers and Prometheus read again and again. A read is logged as debug whatever its status is."""
_POLLED_ROUTES = frozenset(
    {
        *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/progress"),
        *("/v1/batches/{batch_id}/results", "/console/batches", "/console/batches/{batch_id}/events"),
        *("/console/admin", "/console/admin/upstreams"),
    }
)
"""Routes that clients and open pages of the console read again and again, even if the batch no longer exists. A read is
logged as debug unless its status is 5xx."""
_UNKNOWN_ROUTE = "unknown"
_LOGGED_CHARACTERS = 200


class Middleware:
    """Runs one request in its context, and answers if the route raises.

    ``route_names`` has the paths that the metrics name, by the endpoint that the router chose.
    """

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
        route_names: Mapping[object, str],
    ) -> None:
        self._app = app
        self._route_names = route_names
        self._cors = cors
        self._clock = clock
        self._random = random
        self._metrics = metrics
        self._stall_seconds = stall_seconds
        self._drain_bytes = drain_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = ids.request_id(self._random.bytes(16))
        began = self._clock.steady()
        context = RequestContext(
            scope,
            receive,
            send,
            headers={"x-request-id": request_id} | self._cors.headers(Headers(scope=scope).get("origin")),
            stall_seconds=self._stall_seconds,
            drain_bytes=self._drain_bytes,
        )
        try:
            await self._answer(scope, context, request_id)
        finally:
            self._log_request(scope, context, request_id, self._clock.steady() - began)

    async def _answer(self, scope: Scope, context: RequestContext, request_id: str) -> None:
        try:
            await self._app(scope, context.receive, context.send)
        except asyncio.CancelledError:
            # Only the shutdown of the server cancels a request. The client gets an answer, and no caller above has to
            # see the cancellation.
            await self._send_error(scope, context, Unavailable("The service is shutting down. Try again."))
        except Exception as error:  # noqa: BLE001 - the outermost handler: every exception becomes an answer
            # The answer is kept in no variable here. It may be the exception itself, whose traceback refers to this
            # call, and then the bodies in that traceback would be held until the next garbage collection.
            await self._send_error(scope, context, _api_error(error, request_id))

    async def _send_error(self, scope: Scope, context: RequestContext, error: ApiError) -> None:
        """Answer with an error: with the page that the route has for it, else with its envelope.

        If an answer has begun it stays incomplete, and the server closes the connection.
        """
        if error.bound is not None:
            self._metrics.refusals.labels(error.bound).inc()
        if context.status is None:
            answer = scope["state"].get("error_page", error_response)
            await answer(error)(scope, context.receive, context.send)

    def _log_request(self, scope: Scope, context: RequestContext, request_id: str, seconds: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = self._route_names.get(scope.get("endpoint"), _UNKNOWN_ROUTE)
        self._metrics.http_request_seconds.observe((seconds,), route, method, str(context.status or "none"))
        fields = {
            "method": scope["method"],
            "path": scope["raw_path"].decode("latin-1")[:_LOGGED_CHARACTERS],
            "status": context.status,
            "ms": round(seconds * 1000, 1),
            "request_id": request_id,
            "project_id": scope["state"].get("project_id"),
        }
        is_poll = method in _READS and _is_polled(route, context.status)
        log.log(logging.DEBUG if is_poll else logging.INFO, "request", extra=fields)


def _is_polled(route: str, status: int | None) -> bool:
    """Return whether a read with this status is one of many alike, so that a line for each would fill the log."""
    return route in _PROBES or (route in _POLLED_ROUTES and status is not None and status < 500)


def _api_error(error: Exception, request_id: str) -> ApiError:
    """Return the error that the client gets for an exception, and log it unless the client is at fault."""
    if isinstance(error, StoreDown | ObjectsDown):
        log.warning("storage unavailable, answering 503", extra=_trace(error, request_id))
        return Unavailable()
    if isinstance(error, Damaged):
        log.warning(
            "stored file is damaged, answering 500 or closing the connection if the answer has begun",
            extra={"request_id": request_id},
        )
        return InternalError()
    if not isinstance(error, ApiError):
        log.error("unexpected error, answering 500", extra=_trace(error, request_id))
        return InternalError()
    if isinstance(error, BadGateway | GatewayTimeout | Unavailable):
        log.warning("request failed, answering with the reason", extra=_reason(error, request_id))
    elif error.status >= 500:
        log.warning("request failed", extra=_trace(error, request_id))
    return error


def _reason(error: ApiError, request_id: str) -> dict[str, str]:
    """Return the text of an error that says all: it never repeats what the client sent."""
    return {"request_id": request_id, "error": type(error).__name__, "reason": error.message}


def _trace(error: Exception, request_id: str) -> dict[str, str]:
    """Return the types and places of an exception and its causes.

    Texts are left out, since they may repeat what the client sent, except those of storage errors, which never do.
    """
    names, reason = [], ""
    link: BaseException | None = error
    while link is not None:
        names.append(type(link).__name__)
        reason = str(link) if isinstance(link, StoreDown | ObjectsDown) else reason
        link = link.__cause__
    places = "".join(traceback.format_tb(error.__traceback__))
    return {"request_id": request_id, "error": " < ".join(names), "reason": reason, "trace": places}
