"""Decides what the mock upstream does with each request.

A prompt may contain directives (see ``directives``). A request without any gets the faults of the ``Plan``, at the
rates of the plan. Nothing is random: the outcome depends only on the seed, the request and the number of its attempts.
The script itself does no I/O. ``ScriptedUpstream`` performs it in this process, ``server.serve_mock`` over HTTP.
"""

from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.json import format as format_json

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.mock.answers import MockRequest, RequestInvalid, error_body, html_page, read_request
from batchline.upstream.mock.directives import (
    MAX_ANSWER_BYTES,
    MAX_SECONDS,
    Action,
    Directive,
    DirectiveInvalid,
    directive_for_attempt,
    parse_directives,
    with_delivery_of,
)

Percent = Annotated[float, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Status = Annotated[int, Meta(ge=200, le=599)]

_JSON_TYPE = "application/json"
_EVENTS_TYPE = "text/event-stream"
_MiB = 1024 * 1024


class Plan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults for requests without directives, in percent of the attempts; the rest is answered normally."""

    status: dict[Status, Percent] = {}
    cut: Percent = 0
    drop: Percent = 0
    hang: Percent = 0
    html: Percent = 0
    redirect: Percent = 0
    huge: Percent = 0
    huge_bytes: Annotated[int, Meta(ge=1, le=MAX_ANSWER_BYTES)] = 17 * _MiB
    delay: Seconds = 0
    """Seconds before every answer, unless the prompt has a directive for it."""
    retry_after: Seconds | None = None
    """Seconds to send as Retry-After with 429 and 503."""

    def __post_init__(self) -> None:
        if round(sum(percent for percent, _ in self.rates()), 6) > 100:
            raise ValueError("the percentages add up to more than 100")

    def rates(self) -> list[tuple[float, Directive]]:
        """Return each fault and the percentage of attempts that get it."""
        statuses = [(percent, Directive(status=status)) for status, percent in sorted(self.status.items())]
        return [
            *statuses,
            (self.cut, Directive(action=Action.CUT)),
            (self.drop, Directive(action=Action.DROP)),
            (self.hang, Directive(action=Action.HANG)),
            (self.html, Directive(action=Action.HTML)),
            (self.redirect, Directive(action=Action.REDIRECT)),
            (self.huge, Directive(action=Action.HUGE, size=self.huge_bytes)),
        ]


class Ending(StrEnum):
    """The ways in which an attempt ends on the wire."""

    WHOLE = "whole"
    CUT = "cut"
    DROP = "drop"
    HANG = "hang"
    CRASH = "crash"


class ScriptedOutcome(Struct, frozen=True, kw_only=True):
    """The reply to one attempt; ``status``, ``body`` and the fields below describe the answer, if one is sent."""

    ending: Ending = Ending.WHOLE
    delay: float = 0
    status: int = 200
    body: bytes = b""
    events: tuple[bytes, ...] = ()
    """The events of a streamed body; empty if the answer is not streamed."""
    pause: float = 0
    """Seconds before every event except the first."""
    content_type: str = _JSON_TYPE
    request_id: str | None = None
    retry_after: float | None = None
    location: str | None = None


class Script:
    """Decides the outcome of each attempt, and counts the attempts."""

    def __init__(self, plan: Plan | None = None, *, seed: int = 0) -> None:
        self._key = str(seed).encode()
        self.tries: dict[int, int] = {}
        """The number of attempts of each request, by an 8-byte digest of the request."""
        self.follow(plan or Plan())

    def follow(self, plan: Plan) -> None:
        """Use another plan from now on; the attempts so far still count."""
        self.plan = plan
        self._rates = [(percent, directive) for percent, directive in plan.rates() if percent > 0]

    def decide(self, path: str, body: bytes) -> ScriptedOutcome:
        """Count this attempt of a request and return its outcome."""
        digest = self._digest(path.encode(), body)
        attempt = self.tries[digest] = self.tries.get(digest, 0) + 1
        try:
            request = read_request(path, body)
            directives = parse_directives(request.prompt()) if request else []
        except (RequestInvalid, DirectiveInvalid) as error:
            return ScriptedOutcome(status=400, body=error_body(400, str(error)))
        if request is None:
            return ScriptedOutcome(status=404, body=error_body(404, f"the mock upstream does not serve {path[:100]}"))
        directive = self._choose(directives, digest, attempt)
        return self._outcome(directive, request, identity=f"{digest:016x}", attempt=attempt)

    def _digest(self, *parts: bytes) -> int:
        return int.from_bytes(blake2b(b"\0".join(parts), digest_size=8, key=self._key).digest())

    def _choose(self, directives: list[Directive], digest: int, attempt: int) -> Directive:
        """Return what the prompt asks for if it determines the answer of any attempt, else draw from the plan."""
        if not directives:
            return self._draw(digest, attempt)
        requested = directive_for_attempt(directives, attempt)
        if any(directive.determines_answer for directive in directives):
            return requested
        return with_delivery_of(requested, self._draw(digest, attempt))

    def _draw(self, digest: int, attempt: int) -> Directive:
        if self._rates:
            drawn = self._digest(digest.to_bytes(8), attempt.to_bytes(8)) / 2**64 * 100
            for percent, directive in self._rates:
                drawn -= percent
                if drawn < 0:
                    return directive
        return _NORMAL_ANSWER

    def _outcome(self, directive: Directive, request: MockRequest, *, identity: str, attempt: int) -> ScriptedOutcome:
        delay = self.plan.delay if directive.delay is None else directive.delay
        if directive.action in _ENDINGS_WITHOUT_ANSWER:
            return ScriptedOutcome(ending=_ENDINGS_WITHOUT_ANSWER[directive.action], delay=delay)
        status = _status(directive)
        planned_retry_after = self.plan.retry_after if status in {429, 503} else None
        events = _events(directive, status, request, identity)
        return ScriptedOutcome(
            ending=Ending.CUT if directive.action is Action.CUT else Ending.WHOLE,
            delay=delay,
            status=status,
            body=b"".join(events) or _body(directive, status, request, identity),
            events=events,
            pause=directive.pause or 0,
            content_type=_content_type(directive, events),
            request_id=f"req_{identity}_{attempt}",
            retry_after=planned_retry_after if directive.retry_after is None else directive.retry_after,
            location="/v1/elsewhere" if directive.action is Action.REDIRECT else None,
        )


class ScriptedUpstream:
    """An upstream that performs a script in this process, with the time of the given clock."""

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

    def _reply(self, outcome: ScriptedOutcome) -> Reply:
        if outcome.ending in {Ending.DROP, Ending.CRASH}:
            return Fault(kind=FaultKind.BROKEN, detail="the connection ended before an answer came")
        if len(outcome.body) > self._max_answer_bytes:
            return Fault(
                kind=FaultKind.GARBLED,
                detail=f"answer over {self._max_answer_bytes} bytes",
                answer_bytes=self._max_answer_bytes if 200 <= outcome.status < 300 else 0,
            )
        if outcome.ending is Ending.CUT:
            return Fault(kind=FaultKind.BROKEN, detail="the connection ended in the middle of the answer")
        return Answer(
            status=outcome.status,
            body=outcome.body,
            request_id=outcome.request_id,
            retry_after=outcome.retry_after,
        )


_NORMAL_ANSWER = Directive()
_ENDINGS_WITHOUT_ANSWER: dict[Action | None, Ending] = {
    Action.DROP: Ending.DROP,
    Action.HANG: Ending.HANG,
    Action.CRASH: Ending.CRASH,
}


def _status(directive: Directive) -> int:
    if directive.status is not None:
        return directive.status
    if directive.action is Action.REDIRECT:
        return 307
    return 200 if directive.error is None else 400


def _content_type(directive: Directive, events: tuple[bytes, ...]) -> str:
    if directive.action is Action.HTML:
        return "text/html"
    return _EVENTS_TYPE if events else _JSON_TYPE


def _events(directive: Directive, status: int, request: MockRequest, identity: str) -> tuple[bytes, ...]:
    """Return the events of a streamed answer; HTML pages and errors are never streamed."""
    if directive.action is Action.HTML or status >= 300 or status == 204:
        return ()
    padding = "x" * directive.size if directive.action is Action.HUGE else ""
    return tuple(request.events(identity, padding=padding, cached=directive.cached))


def _body(directive: Directive, status: int, request: MockRequest, identity: str) -> bytes:
    if status in {204, 304}:
        return b""
    if directive.action is Action.HTML:
        return html_page(status)
    if status >= 300:
        return _error(directive, status)
    if directive.action is Action.HUGE:
        # Measured with padding of one letter, because the padding may count as a word in the usage.
        shortest = len(request.answer(identity, padding="x", cached=directive.cached))
        return request.answer(identity, padding="x" * (directive.size - shortest + 1), cached=directive.cached)
    answer = request.answer(identity, cached=directive.cached)
    return format_json(answer, indent=2) if directive.action is Action.PRETTY else answer


def _error(directive: Directive, status: int) -> bytes:
    code = directive.error or ("rate_limit_exceeded" if status == 429 else None)
    return error_body(status, f"scripted status {status}", code=code, param="messages" if directive.error else None)
