"""The routes of synchronous calls: ``/v1/chat/completions`` and the other paths that upstreams serve."""

from functools import partial

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.auth import Auth
from batchline.api.content import json_content
from batchline.api.event_stream import STREAM_HEADERS, first_of, wait_for_disconnect
from batchline.api.request_context import body_size, read_body
from batchline.api.throttle import BodyBytes, BodyReservation, Throttle
from batchline.domain.errors import InvalidCredentials, InvalidRequest, TooLarge
from batchline.domain.events import error_event
from batchline.domain.outcomes import Success
from batchline.domain.records import Owner
from batchline.pipeline.inference import Call, EventRelay, Inference


class InferenceRoutes:
    """Passes calls to an upstream and its answers, whole or streamed, to the client."""

    def __init__(
        self,
        *,
        auth: Auth,
        throttle: Throttle,
        body_bytes: BodyBytes,
        inference: Inference,
        max_request_bytes: int,
    ) -> None:
        self._auth, self._throttle, self._body_bytes = auth, throttle, body_bytes
        self._inference = inference
        self._max_request_bytes = max_request_bytes

    async def call(self, path: str, request: Request) -> ASGIApp:
        """Answer a call of the route with this path. Nothing of the path that the client sent reaches an upstream."""
        budgets = self._inference.budgets
        read_at = budgets.sequence
        owner = await self._auth.owner_with_funds(request)
        budgets.of(owner.organization_id).update_balance(owner.funds, read_at=read_at)
        await self._inference.refresh_day(owner)
        return partial(self._answer, path, request, owner)

    async def _answer(
        self, path: str, request: Request, owner: Owner, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a call. It takes a slot of its project until its client has read the answer.

        A call that is not streamed goes on if the client disconnects, since it is charged in any case (E2).
        """
        room = self._body_bytes.reserve(owner.project_id, body_size(request), max_size=self._max_request_bytes)
        with self._throttle.slot(owner.project_id), room as reservation:
            call = self._inference.prepare(owner, path, await self._read(request, reservation))
            answer = await (self._send_stream(call, receive, send) if call.streams else self._inference.answer(call))
            if answer is not None:
                reservation.add_answer(len(answer.body))
                await json_content(answer.body, status=answer.status)(scope, receive, send)

    async def _read(self, request: Request, reservation: BodyReservation) -> bytes:
        body = await read_body(
            request,
            max_bytes=self._max_request_bytes,
            too_large=TooLarge(f"The request's body exceeds {self._max_request_bytes} bytes"),
            cut_off=InvalidRequest("The request's body was cut off"),
            on_bytes=reservation.cover,
        )
        await self._check_after_body(request)
        return body

    async def _check_after_body(self, request: Request) -> None:
        """Check the key again if the body took long, and take over the balance, which others may have spent."""
        budgets = self._inference.budgets
        read_at = budgets.sequence
        owner = await self._auth.owner_after_body(request)
        if owner is not None:
            budgets.of(owner.organization_id).update_balance(owner.funds, read_at=read_at)

    async def _send_stream(self, call: Call, receive: Receive, send: Send) -> Success | None:
        """Send the events of an answer. Return the answer, which is not sent then, if it is not a stream."""
        async with self._inference.stream(call) as answer:
            if isinstance(answer, Success):
                return answer
            if not await self._pass_on(answer, call.owner, receive, send):
                await answer.read_on()
                return None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _pass_on(self, events: EventRelay, owner: Owner, receive: Receive, send: Send) -> bool:
        """Send events until they end, the client disconnects or its key becomes invalid. Return whether they ended."""
        ended = await first_of(
            _send_events(events, send),
            wait_for_disconnect(receive),
            self._auth.wait_until_invalid(owner, clock=self._inference.clock),
        )
        if ended == _KEY_INVALID:
            await send({"type": "http.response.body", "body": error_event(InvalidCredentials()), "more_body": False})
        return ended == _EVENTS_SENT


_EVENTS_SENT, _, _KEY_INVALID = range(3)
"""The coroutine that ended first, which is the reason why no more events are sent."""


async def _send_events(events: EventRelay, send: Send) -> None:
    """Send events one by one, each once the client can take it: a slow client slows the upstream down."""
    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    async for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
