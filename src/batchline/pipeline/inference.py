"""Answers synchronous calls: each is checked like a line of a batch, sent once, charged, and passed on to the client.

An answer is charged before the client has all of it. A client that leaves is charged like one that stays: its answer is
read to the end. If the upstream reports no usage, the charge is an estimate (E2).
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, encode
from msgspec.structs import replace

from batchline.domain.chat import check_request, find_model, with_fields, with_upstream_name
from batchline.domain.endpoints import CHAT, RESPONSES, SYNC_ONLY
from batchline.domain.errors import (
    ApiError,
    BadGateway,
    GatewayTimeout,
    InsufficientQuota,
    InvalidRequest,
    RateLimited,
    Refused,
    StreamBroken,
)
from batchline.domain.estimates import (
    FREE,
    Estimate,
    estimated_cost,
    estimated_usage,
    oversized_usage,
    request_tokens,
    text_tokens,
)
from batchline.domain.events import Chunk, EventReader, error_event, read_chat_event, read_response_event
from batchline.domain.limits import QUOTED_CHARACTERS
from batchline.domain.models import DEFAULT_UPSTREAM, Catalog, Model, ModelKind
from batchline.domain.money import Price, Tariff
from batchline.domain.outcomes import OUT_OF_QUOTA, Failure, Outcome, Retryable, Success, classify_reply
from batchline.domain.records import Balances, Charge, Owner
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.domain.request_body import parse_json_object
from batchline.domain.request_rules import RequestRules
from batchline.domain.usage import NOTHING, Usage
from batchline.pipeline.budget import Budgets
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Clock, Ledger, Stream, SyncUpstream
from batchline.telemetry.metrics import Metrics

PATHS = (CHAT, *SYNC_ONLY)

T = TypeVar("T")
Fields = dict[str, Raw]

_name = Decoder(str | None)
_flag = Decoder(bool | None)
_options = Decoder(Fields | None)
_NULL = Raw(b"null")
_READERS: dict[str, Callable[[bytes], Chunk]] = {CHAT: read_chat_event, RESPONSES: read_response_event}
"""The routes that can stream, with the function that reads one event of each."""

log = logging.getLogger(__name__)


class Call(Struct, frozen=True, kw_only=True):
    """A call that was checked and may be sent."""

    owner: Owner
    path: str
    body: bytes
    model: Model | None
    """None if the default upstream takes any model and the request names none."""
    upstream: str
    estimate: Estimate
    """The estimate of its cost."""
    streams: bool
    wants_usage: bool
    """Whether the client asked for the usage of its stream. The upstream is asked for it in any case."""


class Inference:
    """Sends synchronous calls to upstreams and charges for them.

    If a client leaves its stream, the rest is read for at most ``read_on_seconds`` and ``read_on_bytes``. An answer
    that is not a stream has the same bounds, and is read to its end in any case.
    """

    def __init__(
        self,
        *,
        upstreams: Mapping[str, SyncUpstream],
        catalog: Catalog,
        rules: RequestRules,
        token_limit: TokenLimit,
        ledger: Ledger,
        budgets: Budgets,
        tariff: Tariff,
        router: SyncRouter,
        clock: Clock,
        metrics: Metrics,
        read_on_seconds: float,
        read_on_bytes: int,
    ) -> None:
        self._metrics = metrics
        self._upstreams, self._catalog, self._token_limit, self._router = upstreams, catalog, token_limit, router
        self._rules, self._ledger, self._tariff = rules, ledger, tariff
        self.budgets = budgets
        self.clock = clock
        self._read_on_seconds, self._read_on_bytes = read_on_seconds, read_on_bytes

    async def refresh_day(self, owner: Owner) -> None:
        """Read the rest of the budget that a project has for each day, if it has one."""
        limits = {owner.project_id: owner.daily_budget}
        await self.budgets.refresh_days(self._ledger, limits, at=int(self.clock.now()))

    def prepare(self, owner: Owner, path: str, body: bytes) -> Call:
        """Check a request and choose its upstream. Raises InvalidRequest or Refused, without asking the upstream."""
        fields = parse_json_object(body)
        # If a key is repeated, the last value counts. The encoded body has only this value, which is checked below.
        body = encode(fields)
        model = self._choose_model(owner, path, body, fields)
        self._check_fields(fields, model)
        upstream = self._upstream_for(path, model)
        body = body if model is None else with_upstream_name(body, model)
        streams = _field(fields, "stream", _flag) is True
        if streams and path not in _READERS:
            raise InvalidRequest(f"{path} does not stream; remove stream", param="stream")
        wants_usage = True
        if streams and path == CHAT:
            options = _field(fields, "stream_options", _options) or {}
            if len(options) > _MAX_OPTIONS:
                raise InvalidRequest(f"stream_options may have at most {_MAX_OPTIONS} fields", param="stream_options")
            if any(name != "include_usage" == name.casefold() for name in options):
                raise InvalidRequest("stream_options is invalid: write include_usage", param="stream_options")
            wants_usage = _field(options, "include_usage", _flag) is True
            body = with_fields(body, stream_options=options | {"include_usage": True})
        return Call(
            owner=owner,
            path=path,
            body=body,
            model=model,
            upstream=upstream,
            estimate=FREE if model is None else estimated_cost(body, model, self._tariff, synchronous=True),
            streams=streams,
            wants_usage=wants_usage,
        )

    async def answer(self, call: Call) -> Success:
        """Send a call and return its answer. Raises InsufficientQuota, Refused, BadGateway or GatewayTimeout."""
        with self._holding(call), self._router.call(call.upstream, call.owner.project_id):
            body = await self._limit_tokens(call)
            return await self._charge_answer(call, body, await self._upstreams[call.upstream].post(call.path, body))

    @asynccontextmanager
    async def stream(self, call: Call) -> "AsyncIterator[EventRelay | Success]":
        """Yield the events of an answer as they arrive, or an answer that is not a stream. Raises like ``answer``."""
        meter = None
        with self._holding(call), self._router.call(call.upstream, call.owner.project_id):
            body = await self._limit_tokens(call)
            try:
                async with self._upstreams[call.upstream].stream(call.path, body) as opened:
                    if isinstance(opened, Answer | Fault):
                        yield await self._charge_answer(call, body, opened)
                    else:
                        self._note_answer(call)
                        meter = _Meter(body)
                        yield EventRelay(
                            opened,
                            call,
                            meter,
                            on_broken=lambda: self._router.on_failure(call.upstream),
                            read_on_seconds=self._read_on_seconds,
                            read_on_bytes=self._read_on_bytes,
                        )
            finally:
                if meter is not None:
                    await self._charge(call, meter.usage)

    @contextmanager
    def _holding(self, call: Call) -> Iterator[None]:
        """Hold the estimated cost of a call while the body runs.

        Raises InsufficientQuota if too little is left, or RateLimited if other calls hold the rest for now.
        """
        budget = self.budgets.of_project(call.owner.organization_id, call.owner.project_id)
        amount = budget.hold(call.estimate)
        if not isinstance(amount, int) and amount.held:
            raise RateLimited(_BALANCE_IS_HELD, retry_after=_HELD_RETRY_AFTER_SECONDS)
        if not isinstance(amount, int):
            raise InsufficientQuota(_BALANCE_IS_LOW if amount.failure is OUT_OF_QUOTA else amount.failure.message)
        try:
            yield
        finally:
            budget.release(amount)

    def _choose_model(self, owner: Owner, path: str, body: bytes, fields: Fields) -> Model | None:
        found: Model | Failure | None
        if path not in SYNC_ONLY:
            found = check_request(body, endpoint=path, project_id=owner.project_id, catalog=self._catalog)
        elif name := _field(fields, "model", _name):
            found = find_model(name, project_id=owner.project_id, catalog=self._catalog)
        else:
            found = self._catalog.serving(path, owner.project_id)
        if isinstance(found, Failure):
            raise _refused(found)
        return found

    def _check_fields(self, fields: Fields, model: Model | None) -> None:
        rules = self._rules.default if model is None else self._rules.of(model.id)
        if (violation := rules.violation(fields)) is not None:
            shown = violation.field[:QUOTED_CHARACTERS]
            raise InvalidRequest(f"{shown} {violation.reason}", param=shown)

    def _upstream_for(self, path: str, model: Model | None) -> str:
        if model is None and not self._catalog.takes_any:
            raise _unserved(path, f'Give a model of the settings file paths = ["{path}"]')
        upstream = self._router.choose((DEFAULT_UPSTREAM,) if model is None else model.upstreams)
        if upstream not in self._upstreams:
            raise _unserved(path, f'Set upstream_url, or give a model of the settings file paths = ["{path}"]')
        return upstream

    async def _limit_tokens(self, call: Call) -> bytes:
        if call.model is None or call.path != CHAT:
            return call.body
        limited = await self._token_limit.apply(call.body, call.model, upstream=call.upstream)
        if isinstance(limited, bytes):
            return limited
        if isinstance(limited, Failure):
            raise _refused(limited)
        self._avoid_if_failed(call, classify_reply(limited, endpoint=call.path))
        raise _token_count_error(limited, call.path)

    async def _charge_answer(self, call: Call, body: bytes, reply: Reply) -> Success:
        kind = ModelKind.CHAT if call.model is None else call.model.kind
        outcome = classify_reply(reply, endpoint=call.path, kind=kind)
        self._avoid_if_failed(call, outcome)
        if isinstance(reply, Fault):
            if reply.answer_bytes:
                await self._charge(call, oversized_usage(request=body, answer_bytes=reply.answer_bytes))
            raise _fault_error(reply)
        if not isinstance(outcome, Success):
            raise _refusal(reply, outcome)
        self._note_answer(call)
        usage = outcome.usage
        if usage == NOTHING:
            usage = estimated_usage(request=body, answer_bytes=len(reply.body))
        await self._charge(call, usage)
        return outcome if call.path == CHAT else replace(outcome, body=reply.body)

    def _avoid_if_failed(self, call: Call, outcome: Outcome) -> None:
        """Avoid the upstream for a while if it failed, and not the request.

        An upstream that fails quickly has the fewest calls in progress, and would get nearly all further ones.
        """
        is_request_at_fault = isinstance(outcome, Failure) and not (
            outcome.unavailable or outcome.code == OUT_OF_QUOTA.code
        )
        if not isinstance(outcome, Success) and not is_request_at_fault:
            self._router.on_failure(call.upstream)

    def _note_answer(self, call: Call) -> None:
        model = "" if call.model is None else call.model.id
        self._metrics.model_labels.on_answer(model)
        self._router.on_answer(call.upstream, model)

    async def _charge(self, call: Call, usage: Usage) -> None:
        model, price = ("", Price()) if call.model is None else (call.model.id, call.model.price)
        cost = self._tariff.cost(price, usage, synchronous=True)
        charge = Charge(model=model, requests=1, usage=usage, cost=cost)
        await _complete_despite_cancellation(self._book(call.owner, charge))

    async def _book(self, owner: Owner, charge: Charge) -> None:
        budget = self.budgets.of_project(owner.organization_id, owner.project_id)
        budget.add_cost(charge.cost)
        try:
            with budget.recording():
                balance = await self._ledger.charge(owner, charge, at=int(self.clock.now()))
        except BaseException:
            budget.remove_cost(charge.cost)
            raise
        budget.on_recorded(charge.cost, Balances(funds=balance))
        self._metrics.on_charges([charge])


class _Meter:
    """Counts the tokens of a stream so far."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._reported = NOTHING
        self._text_tokens = 0

    def note(self, chunk: Chunk) -> None:
        self._text_tokens += chunk.text_tokens
        if chunk.usage != NOTHING:
            self._reported = chunk.usage

    def note_oversized(self, size: int) -> None:
        """Count the bytes of an event that is too large to be read."""
        self._text_tokens += text_tokens(size)

    @property
    def usage(self) -> Usage:
        """The usage that the upstream reported, or else an estimate from the request and the chunks."""
        if self._reported != NOTHING:
            return self._reported
        return Usage(input_tokens=request_tokens(self._request), output_tokens=self._text_tokens)


class EventRelay:
    """The events of a stream, as they are passed on. Iterate over it, and call ``read_on`` if the client leaves.

    It is not a generator, because a read of the next event may be cancelled, and further reads must work after that.
    """

    def __init__(
        self,
        stream: Stream,
        call: Call,
        meter: _Meter,
        *,
        on_broken: Callable[[], None],
        read_on_seconds: float,
        read_on_bytes: int,
    ) -> None:
        self._pieces = aiter(stream)
        self._on_broken = on_broken
        self._call, self._meter = call, meter
        self._read_on_seconds, self._read_on_bytes = read_on_seconds, read_on_bytes
        self._reader = EventReader()
        self._events: deque[bytes] = deque()
        self._ended = False

    def __aiter__(self) -> "EventRelay":
        return self

    async def __anext__(self) -> bytes:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            await self._read_piece()
        return self._events.popleft()

    async def read_on(self) -> None:
        """Read to the end, within bounds, for the usage that the upstream reports there."""
        left = self._read_on_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._read_on_seconds):
                while left > 0 and not self._ended:
                    left -= await self._read_piece()
                    self._events.clear()

    async def _read_piece(self) -> int:
        """Read the next piece of the stream, make its events ready, and return its size."""
        try:
            piece = await anext(self._pieces, None)
            self._ended = piece is None
            for event in self._reader.end() if piece is None else self._reader.feed(piece):
                self._note(event)
        except StreamBroken as error:
            self._ended = True
            if self._reader.oversized_bytes:
                self._meter.note_oversized(self._reader.oversized_bytes)
            self._on_broken()
            log.warning(
                "upstream stream broke, ending it with an error event",
                extra={"upstream": self._call.upstream, "reason": str(error)},
            )
            self._events.append(error_event(BadGateway("The upstream broke off in the middle of its answer")))
            return 0
        return 0 if piece is None else len(piece)

    def _note(self, event: bytes) -> None:
        chunk = _READERS[self._call.path](event)
        self._meter.note(chunk)
        if self._call.wants_usage or not chunk.only_usage:
            self._events.append(chunk.event)


async def _complete_despite_cancellation(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine to its end, and only then let a cancellation take effect."""
    # A TaskGroup would pass the cancellation on. Nothing outlives this function, since it waits to the end.
    task = asyncio.get_running_loop().create_task(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    value = task.result()
    if cancelled is not None:
        raise cancelled
    return value


def _field(fields: Fields, name: str, decoder: Decoder[T]) -> T:
    try:
        return decoder.decode(fields.get(name, _NULL))
    except (DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is invalid: {error}", param=name) from None


def _unserved(path: str, remedy: str) -> Refused:
    return Refused(404, f"No model serves {path}. {remedy}", code="not_found_error", param="model")


def _refused(failure: Failure, *, status: int | None = None) -> Refused:
    return Refused(status or failure.status, failure.message, code=failure.code, param=failure.param)


def _refusal(answer: Answer, outcome: Failure | Retryable) -> ApiError:
    """Return the error for an answer that is no success.

    The client sees the words of a refusal, but not those of an upstream that failed.
    """
    if isinstance(outcome, Failure):
        # A line names a 402 by its legacy code, http_420. A caller gets the status that the upstream sent.
        return _refused(outcome, status=answer.status if 400 <= answer.status < 500 else None)
    if outcome.throttled:
        return Refused(
            429,
            outcome.reason,
            code="rate_limit_exceeded",
            param=outcome.param,
            retry_after=outcome.retry_after,
        )
    if 400 <= answer.status < 500:
        return Refused(answer.status, outcome.reason, code="invalid_request_error", param=outcome.param)
    if 200 <= answer.status < 300:
        return BadGateway("The upstream's answer is not the JSON that was asked for")
    return BadGateway(f"The upstream answered with status {answer.status}")


def _token_count_error(reply: Reply, path: str) -> ApiError:
    """Return the error for a reply that is not the token count that was asked for."""
    if isinstance(reply, Fault):
        return _fault_error(reply)
    outcome = classify_reply(reply, endpoint=path)
    return BadGateway(_NO_INPUT_LENGTH) if isinstance(outcome, Success) else _refusal(reply, outcome)


def _fault_error(fault: Fault) -> ApiError:
    if fault.kind is FaultKind.TIMEOUT:
        return GatewayTimeout("The upstream did not answer in time")
    # A call with such an answer is charged, and the SDKs would repeat it.
    headers = {"x-should-retry": "false"} if fault.answer_bytes else None
    return BadGateway(_FAULTS[fault.kind], headers=headers)


_HELD_RETRY_AFTER_SECONDS = 1
_MAX_OPTIONS = 64
"""The most fields of ``stream_options``, each of which is compared with a name."""
_BALANCE_IS_HELD = "The balance is held for other requests of the organization that are in progress; try again later"
_BALANCE_IS_LOW = "The organization has less left than this call may cost; a lower max_tokens makes it cheaper"
_NO_INPUT_LENGTH = "The upstream did not return the length of the input"
_FAULTS = {
    FaultKind.REFUSED: "The upstream cannot be reached",
    FaultKind.BROKEN: "The upstream's connection ended before its answer did",
    FaultKind.GARBLED: "The upstream's answer cannot be read, or is too large",
    FaultKind.UNREADABLE: "The upstream's answer has an encoding that was not asked for",
}
