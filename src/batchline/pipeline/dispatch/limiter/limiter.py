"""Limits the requests of one process to one upstream.

The dispatcher asks before every start and reports every start and end. The time is always a parameter.
"""

from collections.abc import Hashable

from batchline.domain.engine_queue import QueueLength
from batchline.domain.rate_limits import RateLimits
from batchline.pipeline.dispatch.limiter.concurrency import ConcurrencyLimit
from batchline.pipeline.dispatch.limiter.load import Load, Start
from batchline.pipeline.dispatch.limiter.model import ModelLimit
from batchline.pipeline.dispatch.limiter.overload import Overload
from batchline.pipeline.dispatch.limiter.sign import Sign

_DEFAULT_CAP = 1024
_MAX_MODELS = 1000
"""The number of models at which idle ones are forgotten: first those without a limit, then all. Files may name any
number of models."""

_MAYBE_REFUSED = frozenset({Sign.UNAVAILABLE, Sign.FAULT})
_OVERLOADS = frozenset({Sign.UNAVAILABLE, Sign.OVERLOADED})


class Limiter:
    """Combines a limit on the requests in flight with limits for each model."""

    def __init__(self, *, cap: int | None) -> None:
        self._cap = _DEFAULT_CAP if cap is None else cap
        self._concurrency = ConcurrencyLimit(cap=max(1, self._cap))
        self._load = Load()
        self._models: dict[str, ModelLimit] = {}
        self._overload = Overload()
        self._blocked_until = 0.0
        """The latest time that any model had to wait for."""

    def set_cap(self, cap: int) -> None:
        """Set the most requests that may be in flight. The cap may be 0."""
        if cap != self._cap:
            self._cap = cap
            self._concurrency.set_cap(max(1, cap))

    @property
    def cap(self) -> int:
        return self._cap

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight now."""
        limit, accepted = min(self._cap, self._concurrency.limit), 0
        for model in self._load.by_model:
            accepted_of_model = self._models[model].limit
            if accepted_of_model is None:
                return limit
            accepted += accepted_of_model
        return min(limit, accepted) if accepted else limit

    @property
    def rate(self) -> float | None:
        """The number of requests, of all models, that may start in a second; None while that is not limited."""
        rates = [model.rate for model in self._models.values()]
        return None if not rates or None in rates else sum(rate for rate in rates if rate is not None)

    @property
    def room(self) -> int:
        """The number of further requests that may start, of any model. Slow requests count only against the cap."""
        taken = self._load.in_flight
        return min(self._concurrency.limit - taken, self._cap - self._load.slow - taken)

    @property
    def room_below_cap(self) -> int:
        return self._cap - self._load.slow - self._load.in_flight

    def model(self, name: str) -> ModelLimit:
        limit = self._models.get(name)
        if limit is None:
            if len(self._models) >= _MAX_MODELS:
                self._forget_idle_models()
            limit = self._models[name] = ModelLimit()
        return limit

    def _forget_idle_models(self) -> None:
        busy = {name: limit for name, limit in self._models.items() if self._load.by_model[name]}
        limited = {name: limit for name, limit in self._models.items() if limit.is_limited}
        self._models = busy | limited if len(busy | limited) < _MAX_MODELS else busy

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
        """Return the number of requests of a model that may start now."""
        return self.model(model).allowance(self._load.by_model[model], now)

    def wait(self, model: str, now: float) -> float:
        """Return the seconds until the rate lets a request of a model start; 0 if something else holds it back."""
        limit = self._models.get(model)
        return limit.wait(self._load.by_model[model], now) if limit is not None and limit.is_limited else 0.0

    def start(self, model: str, count: int, now: float) -> list[Start]:
        """Report that ``count`` requests of a model start now. Each returned value is passed to ``end`` later."""
        limit = self.model(model)
        load, concurrency, starts = self._load, self._concurrency, list[Start]()
        is_check = limit.on_start(now, count, load.by_model[model] + count)
        for order in range(limit.started - count + 1, limit.started + 1):
            start = load.start(model, now, order=order, limit=concurrency.limit)
            start.round, start.is_check = concurrency.on_start(start.in_flight, now), is_check
            starts.append(start)
        return starts

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
        self._load.end(start)
        is_refused = sign is Sign.THROTTLED or (
            sign in _MAYBE_REFUSED and self._models[start.model].refuses_within(now - start.at)
        )
        self._note_end(start, now, overloaded=sign in _OVERLOADS and not is_refused)
        if rate_limits is not None:
            self._models[start.model].on_announcement(rate_limits, start, now)
        if sign is Sign.ANSWERED:
            self._load.on_answer()
            self._models[start.model].on_answer(start, now, project_id=project_id, again=again)
            self._concurrency.on_answer(start.round, start.model, start.in_flight, now - start.at, now)
            return None
        if start.round is not None:
            self._concurrency.on_no_answer(start.round)
        if not is_refused:
            return None
        model = self._models[start.model]
        cost = model.on_refusal(start, now, project_id=project_id, line=line, again=again, retry_after=retry_after)
        self._blocked_until = max(self._blocked_until, now + model.blocked_seconds(now))
        return cost if model.is_refused or sign is not Sign.FAULT else None

    def on_outage_over(self, now: float) -> None:
        """Return quickly to the rates before an outage, because the upstream is available again."""
        for model in self._models.values():
            model.on_outage_over(now)

    def on_queue_length(self, length: QueueLength, now: float) -> None:
        """Report the numbers of requests that the engine processes and queues."""
        self._concurrency.on_queue_length(length, in_flight=self._load.in_flight, now=now)

    def _note_end(self, start: Start, now: float, *, overloaded: bool) -> None:
        changed = self._overload.on_end(start.at, now, overloaded=overloaded, limit=self._concurrency.limit)
        if changed is not None:
            self._concurrency.set_limit(changed, now)
