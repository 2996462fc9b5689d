"""An upstream that does what it is told: a script says what happens to each request.

A prompt may carry directives of its own (see ``directives``); requests without any meet the rates of the ``Plan``.
Nothing here is random: what happens depends on the seed, the request and how often it was tried, and on nothing else.
The script itself does no I/O. ``ScriptedUpstream`` plays it in this process, ``mock.serve_mock`` over HTTP.
"""

from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import format as format_json

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.mock.answers import RequestUnreadable, ScriptedRequest, error_body, page, read_request
from batchline.upstream.mock.directives import (
    MAX_ANSWER_BYTES,
    MAX_SECONDS,
    Act,
    DirectiveUnreadable,
    MockOrder,
    in_manner_of,
    order_for_try,
    parse_orders,
)

Percent = Annotated[float, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Status = Annotated[int, Meta(ge=200, le=599)]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_MiB = 1024 * 1024


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens to requests without directives, in percent of the tries; the rest are answered."""

    status: dict[Status, Percent] = {}
    cut: Percent = 0
    drop: Percent = 0
    hang: Percent = 0
    html: Percent = 0
    redirect: Percent = 0
    huge: Percent = 0
    huge_bytes: Annotated[int, Meta(ge=1, le=MAX_ANSWER_BYTES)] = 17 * _MiB
    delay: Seconds = 0
    """Of every request, unless its prompt names another."""
    retry_after: Seconds | None = None
    """Sent with 429 and 503."""

    def __post_init__(self) -> None:
        if round(sum(share for share, _ in self.shares()), 6) > 100:
            raise ValueError("the percentages add up to more than 100")

    def shares(self) -> list[tuple[float, MockOrder]]:
        statuses = [(share, MockOrder(status=status)) for status, share in sorted(self.status.items())]
        return [
            *statuses,
            (self.cut, MockOrder(act=Act.CUT)),
            (self.drop, MockOrder(act=Act.DROP)),
            (self.hang, MockOrder(act=Act.HANG)),
            (self.html, MockOrder(act=Act.HTML)),
            (self.redirect, MockOrder(act=Act.REDIRECT)),
            (self.huge, MockOrder(act=Act.HUGE, size=self.huge_bytes)),
        ]


class Ending(StrEnum):
    """How a try ends on the wire."""

    WHOLE = "whole"
    CUT = "cut"
    DROP = "drop"
    HANG = "hang"
    CRASH = "crash"


class Outcome(Struct, frozen=True, kw_only=True):
    """What one try comes to; ``status``, ``body`` and the rest are the answer's, where there is one."""

    ending: Ending = Ending.WHOLE
    delay: float = 0
    status: int = 200
    body: bytes = b""
    events: tuple[bytes, ...] = ()
    """What a streamed body is made of."""
    pause: float = 0
    """Before every event but the first."""
    content_type: str = _JSON
    request_id: str | None = None
    retry_after: float | None = None
    location: str | None = None


class Script:
    def __init__(self, plan: Plan | None = None, *, seed: int = 0) -> None:
        self._key = str(seed).encode()
        self.tries: dict[int, int] = {}
        """How often each request came, by an 8-byte digest of it."""
        self.follow(plan or Plan())

    def follow(self, plan: Plan) -> None:
        """Go on by another plan; what was tried so far still counts."""
        self.plan = plan
        self._shares = [(share, order) for share, order in plan.shares() if share > 0]

    def decide(self, path: str, body: bytes) -> Outcome:
        """What this try of a request comes to."""
        digest = self._digest(path.encode(), body)
        attempt = self.tries[digest] = self.tries.get(digest, 0) + 1
        try:
            request = read_request(path, body)
            orders = parse_orders(request.prompt()) if request else []
        except (RequestUnreadable, DirectiveUnreadable) as error:
            return Outcome(status=400, body=error_body(400, str(error)))
        if request is None:
            return Outcome(status=404, body=error_body(404, f"nothing is scripted at {path[:100]}"))
        order = self._choose(orders, digest, attempt)
        return self._perform(order, request, identity=f"{digest:016x}", attempt=attempt)

    def _digest(self, *parts: bytes) -> int:
        return int.from_bytes(blake2b(b"\0".join(parts), digest_size=8, key=self._key).digest())

    def _choose(self, orders: list[MockOrder], digest: int, attempt: int) -> MockOrder:
        """The prompt's own word on it, if it has one for any try; else what the rates draw."""
        if not orders:
            return self._draw(digest, attempt)
        told = order_for_try(orders, attempt)
        if any(order.decides for order in orders):
            return told
        return in_manner_of(told, self._draw(digest, attempt))

    def _draw(self, digest: int, attempt: int) -> MockOrder:
        if self._shares:
            ticket = self._digest(digest.to_bytes(8), attempt.to_bytes(8)) / 2**64 * 100
            for share, order in self._shares:
                ticket -= share
                if ticket < 0:
                    return order
        return _PLAIN

    def _perform(self, order: MockOrder, request: ScriptedRequest, *, identity: str, attempt: int) -> Outcome:
        delay = self.plan.delay if order.delay is None else order.delay
        if order.act in _SILENT:
            return Outcome(ending=_SILENT[order.act], delay=delay)
        status = _status(order)
        planned = self.plan.retry_after if status in {429, 503} else None
        events = _events(order, status, request, identity)
        return Outcome(
            ending=Ending.CUT if order.act is Act.CUT else Ending.WHOLE,
            delay=delay,
            status=status,
            body=b"".join(events) or _body(order, status, request, identity),
            events=events,
            pause=order.pause or 0,
            content_type=_content_type(order, events),
            request_id=f"req_{identity}_{attempt}",
            retry_after=planned if order.retry_after is None else order.retry_after,
            location="/v1/elsewhere" if order.act is Act.REDIRECT else None,
        )


class ScriptedUpstream:
    """Plays a script in this process, on whatever time the clock tells."""

    def __init__(
        self,
        script: Script,
        *,
        clock: Clock,
        request_timeout: float,
        max_answer_bytes: int,
        on_crash: Callable[[], None],
    ) -> None:
        self._script = script
        self._clock = clock
        self._request_timeout = request_timeout
        self._max_answer_bytes = max_answer_bytes
        self._on_crash = on_crash

    async def post(self, path: str, body: bytes) -> Reply:
        outcome = self._script.decide(path, body)
        if outcome.ending is Ending.HANG or outcome.delay > self._request_timeout:
            await self._clock.sleep(self._request_timeout)
            return Fault(kind=FaultKind.TIMEOUT, detail=f"no complete answer within {self._request_timeout:.3g} s")
        if outcome.delay > 0:
            await self._clock.sleep(outcome.delay)
        if outcome.ending is Ending.CRASH:
            self._on_crash()
        return self._reply(outcome)

    def _reply(self, outcome: Outcome) -> Reply:
        if outcome.ending in {Ending.DROP, Ending.CRASH}:
            return Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came")
        if len(outcome.body) > self._max_answer_bytes:
            return Fault(kind=FaultKind.GARBLED, detail=f"answer over {self._max_answer_bytes} bytes")
        if outcome.ending is Ending.CUT:
            return Fault(kind=FaultKind.BROKEN, detail="the connection ended in the middle of the answer")
        return Answer(
            status=outcome.status,
            body=outcome.body,
            request_id=outcome.request_id,
            retry_after=outcome.retry_after,
        )


_PLAIN = MockOrder()
_SILENT: dict[Act | None, Ending] = {Act.DROP: Ending.DROP, Act.HANG: Ending.HANG, Act.CRASH: Ending.CRASH}


def _status(order: MockOrder) -> int:
    if order.status is not None:
        return order.status
    if order.act is Act.REDIRECT:
        return 307
    return 200 if order.error is None else 400


def _content_type(order: MockOrder, events: tuple[bytes, ...]) -> str:
    if order.act is Act.HTML:
        return "text/html"
    return _EVENTS if events else _JSON


def _events(order: MockOrder, status: int, request: ScriptedRequest, identity: str) -> tuple[bytes, ...]:
    """Of an answer that is streamed; pages and errors never are."""
    if order.act is Act.HTML or status >= 300 or status == 204:
        return ()
    padding = "x" * order.size if order.act is Act.HUGE else ""
    return tuple(request.events(identity, padding=padding, cached=order.cached))


def _body(order: MockOrder, status: int, request: ScriptedRequest, identity: str) -> bytes:
    if status in {204, 304}:
        return b""
    if order.act is Act.HTML:
        return page(status)
    if status >= 300:
        return _error(order, status)
    if order.act is Act.HUGE:
        # Measured with padding of one letter, since the padding can be a word of its own in the usage.
        least = len(request.answer(identity, padding="x", cached=order.cached))
        return request.answer(identity, padding="x" * (order.size - least + 1), cached=order.cached)
    answer = request.answer(identity, cached=order.cached)
    return format_json(answer, indent=2) if order.act is Act.PRETTY else answer


def _error(order: MockOrder, status: int) -> bytes:
    code = order.error or ("rate_limit_exceeded" if status == 429 else None)
    return error_body(status, f"scripted status {status}", code=code, param="messages" if order.error else None)
