"""Limits the requests of one process to one upstream.

The dispatcher asks before every start and reports every start and end. The time is always a parameter.
"""

from collections.abc import Hashable, Sequence

from batchline.domain.engine_queue import QueueLength
from batchline.domain.rate_limits import RateLimits
from batchline.pipeline.dispatch.limiter.concurrency import ConcurrencyLimit
from batchline.pipeline.dispatch.limiter.load import Load, Start
from batchline.pipeline.dispatch.limiter.model import ModelLimit
from batchline.pipeline.dispatch.limiter.shared import SharedLimit
from batchline.pipeline.dispatch.limiter.sign import Sign

_DEFAULT_CAP = 1024
_MAX_MODELS = 1000
"""The number of models at which idle ones are forgotten: first those without a limit, then all. Files may name any
number of models."""

_MAYBE_REFUSED = frozenset({Sign.UNAVAILABLE, Sign.OVERLOADED, Sign.FAULT})
_OVERLOADS = frozenset({Sign.UNAVAILABLE, Sign.OVERLOADED})
_REFUSALS = frozenset({Sign.THROTTLED, Sign.UNAVAILABLE})
"""These are refusals of their lines even while no limit is known."""


class Limiter:
    """Combines a limit on the requests in flight with limits for each model."""

    def __init__(self, *, cap: int | None) -> None:
        self._cap = _DEFAULT_CAP if cap is None else cap
        self._load = Load()
        self._models: dict[str, ModelLimit] = {}
        self._busy: dict[str, ModelLimit] = {}
        """The models that have requests in flight."""
        self._shared: SharedLimit | None = None
        """The limit on the requests of several models together, while there are requests of several in flight."""
        self._outside: dict[str, ModelLimit] = {}
        """The models in flight that this limit does not hold for."""
        self._concurrency = ConcurrencyLimit(cap=max(1, self._cap))
        """The limit on all requests in flight: the shared one, or that of the only model in flight, or of the last."""
        self._blocked_until = 0.0
        """The latest time that any model had to wait for."""

    def set_cap(self, cap: int) -> None:
        """Set the most requests that may be in flight. The cap may be 0."""
        if cap != self._cap:
            self._cap = cap
            models = (model.concurrency for model in self._models.values())
            for concurrency in {self._concurrency, *models}:
                concurrency.set_cap(max(1, cap))

    @property
    def cap(self) -> int:
        return self._cap

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight now."""
        limits = {name: model.limit for name, model in self._busy.items()}
        limit = self._concurrency.limit + sum(limits[name] for name in self._outside)
        return min(self._cap, limit, sum(limits.values()) or limit)

    @property
    def rate(self) -> float | None:
        """The number of requests, of all models, that may start in a second; None while that is not limited."""
        rates = [model.rate for model in self._models.values()]
        return None if not rates or None in rates else sum(rate for rate in rates if rate is not None)

    @property
    def room(self) -> int:
        """The number of further requests that may start, of any model. Slow requests count only against the cap."""
        below_cap = self.room_below_cap
        return below_cap if self._outside else min(self._concurrency.limit - self._load.in_flight, below_cap)

    @property
    def room_below_cap(self) -> int:
        return self._cap - self._load.slow - self._load.in_flight

    def model(self, name: str) -> ModelLimit:
        limit = self._models.get(name)
        if limit is None:
            if len(self._models) >= _MAX_MODELS:
                self._forget_idle_models()
            limit = self._models[name] = ModelLimit(cap=max(1, self._cap))
        return limit

    def _forget_idle_models(self) -> None:
        limited = {name: limit for name, limit in self._models.items() if limit.is_limited}
        kept = self._busy | limited
        self._models = kept if len(kept) < _MAX_MODELS else self._busy.copy()

    def is_blocked(self, model: str, now: float) -> bool:
        """Return whether the lines of a model must wait because the upstream said so with Retry-After."""
        limit = self._models.get(model)
        return limit is not None and limit.blocked_seconds(now) > 0

    def is_any_blocked(self, now: float) -> bool:
        """Return whether the lines of some model may have to wait for the time of Retry-After."""
        return now < self._blocked_until

    def may_try(self, model: str, project_id: str, now: float) -> bool:
        """Return whether a line of a project may start although its model is blocked."""
        return self.model(model).may_try(project_id, now)

    def allowance(self, model: str, now: float) -> int:
        """Return the number of requests of a model that may start now by what the upstream refuses or announces."""
        limit = self.model(model)
        return limit.allowance(limit.in_flight, now)

    def room_of(self, model: str) -> int:
        """Return the number of further requests of a model that may be in flight.

        With its first request its limit is chosen.
        """
        limit = self.model(model)
        room = limit.concurrency.limit - limit.load.in_flight if limit.started else 1
        if self._outside and model not in self._outside:
            return min(room, self._concurrency.limit - self._in_flight_inside)
        return room

    @property
    def _in_flight_inside(self) -> int:
        """The number of requests in flight of the models that the shared limit holds for."""
        if not self._outside:
            return self._load.in_flight
        return sum(limit.load.in_flight for name, limit in self._busy.items() if name not in self._outside)

    def wait(self, model: str, now: float) -> float:
        """Return the seconds until the rate lets a request of a model start; 0 if something else holds it back."""
        limit = self._models.get(model)
        return limit.wait(limit.in_flight, now) if limit is not None and limit.is_limited else 0.0

    def start(self, model: str, count: int, now: float) -> list[Start]:
        """Report that ``count`` requests of a model start now. Each returned value is passed to ``end`` later."""
        limit = self.model(model)
        if not limit.started:
            limit.concurrency.begin(beside=sum(not other.concurrency.is_measured for other in self._busy.values()))
        if model not in self._busy:
            self._busy[model] = limit
            self._choose_concurrency()
        order, with_slow, in_flight = limit.started, limit.in_flight, limit.load.in_flight
        is_check = limit.on_start(now, count, with_slow + count)
        shared = None if model in self._outside else self._shared
        of_all = self._load.in_flight if shared is None else self._in_flight_inside
        group = limit.load.start(count, limit=limit.concurrency.limit)
        group_of_all = self._load.start(count, limit=self._concurrency.limit)
        starts = list[Start]()
        for number in range(1, count + 1):
            start = Start(
                now,
                model,
                order + number,
                with_slow + number,
                in_flight + number,
                of_all + number,
                group,
                group_of_all,
                is_check,
            )
            start.round = limit.concurrency.on_start(model, start.in_flight, now)
            if shared is not None:
                start.round_of_all = shared.on_start(model, start.in_flight_of_all, now)
            starts.append(start)
        return starts

    def _choose_concurrency(self) -> None:
        """Choose the limit on all requests in flight, by the models of these."""
        busy = self._busy
        if len(busy) > 1:
            if self._shared is None:
                self._shared = SharedLimit(cap=max(1, self._cap), busy=busy)
            self._concurrency = self._shared
        elif busy:
            self._shared, (self._concurrency,) = None, (model.concurrency for model in busy.values())
        self._choose_outside()

    def _choose_outside(self) -> None:
        shared = self._shared
        if shared is None or shared.is_open:
            self._outside = {}
        else:
            self._outside = {name: model for name, model in self._busy.items() if not shared.holds_for(name)}

    def end(
        self,
        start: Start,
        sign: Sign,
        now: float,
        *,
        project_id: str = "",
        line: Hashable = None,
        again: bool = False,
        retry_after: float | None = None,
        rate_limits: RateLimits | None = None,
    ) -> float | None:
        """Report the end of a request. If a limit refused it, return the cost to its line, from 0 to 1; else None.

        ``line`` identifies the line of the request, and ``again`` says that this line was refused before.
        """
        if rate_limits is not None:
            self.on_announcement(start, rate_limits, now)
        if sign is Sign.ANSWERED:
            self.end_answered((start,), now, project_id=project_id, again=again)
            return None
        model = self._models[start.model]
        is_refused = sign is Sign.THROTTLED or (sign in _MAYBE_REFUSED and model.refuses_within(now - start.at))
        self._end_all(model, (start,), now, answered=False, overloaded=sign in _OVERLOADS and not is_refused)
        model.concurrency.on_no_answer(start.round, start.model)
        if self._shared is not None:
            self._shared.on_no_answer(start.round_of_all, start.model)
        if not is_refused:
            return None
        cost = model.on_refusal(start, now, project_id=project_id, line=line, again=again, retry_after=retry_after)
        self._blocked_until = max(self._blocked_until, now + model.blocked_seconds(now))
        return cost if model.is_refused or sign in _REFUSALS else None

    def end_answered(self, starts: Sequence[Start], now: float, *, project_id: str = "", again: bool = False) -> None:
        """Report the answers to requests of one model, for lines of one project.

        ``again`` says that all of these lines were refused before.
        """
        model = self._models[starts[0].model]
        self._end_all(model, starts, now, answered=True, overloaded=False)
        model.on_answers(starts, now, project_id=project_id, again=again)
        for start in starts:
            self._note_answer(model, start, now)

    def on_announcement(self, start: Start, rate_limits: RateLimits, now: float) -> None:
        """Note the rate limits that the answer to a request announces."""
        self._models[start.model].on_announcement(rate_limits, start, now)

    def on_outage_over(self, now: float) -> None:
        """Return quickly to the rates before an outage, because the upstream is available again."""
        for model in self._models.values():
            model.on_outage_over(now)

    def on_queue_length(self, length: QueueLength, now: float) -> None:
        """Report the numbers of requests that the engine processes and queues."""
        self._concurrency.on_queue_length(length, in_flight=self._load.in_flight, now=now)

    def _note_answer(self, model: ModelLimit, start: Start, now: float) -> None:
        latency, in_flight = now - start.at, start.in_flight
        model.concurrency.on_answer(start.round, start.model, in_flight, in_flight, latency, now)
        shared = self._shared
        if shared is not None and start.model not in self._outside:
            members = shared.members
            shared.on_answer(start.round_of_all, start.model, start.in_flight_of_all, in_flight, latency, now)
            if shared.members is not members:
                self._choose_outside()

    def _end_all(
        self, model: ModelLimit, starts: Sequence[Start], now: float, *, answered: bool, overloaded: bool
    ) -> None:
        """Remove requests of one model, which all ended in the same way, from those in flight."""
        count = len(starts) if answered else 0
        self._load.end([start.group_of_all for start in starts], answered=count)
        model.load.end([start.group for start in starts], answered=count)
        if not model.in_flight:
            del self._busy[starts[0].model]
            self._choose_concurrency()
        limit = min(model.concurrency.limit, self._concurrency.limit)
        changed = model.overload.on_end(starts, overloaded=overloaded, limit=limit, started=model.started)
        if changed is not None:
            model.concurrency.set_limit(changed, now)
