"""Limits the requests of several models together, while requests of several are in flight.

The models may be names of one engine, or have a server each. So there is no such limit at first: it is *open*. If a
probe finds that fewer in flight are enough, it is closed, and holds for its members: the models that filled their own
limits before, or had a good part of the requests. A model that comes later is outside. When its own limit is found and
is a good part of the shared one, it joins with as many as it has in flight, if it takes throughput from the members as
another name of their engine does.
"""

from collections.abc import Mapping
from math import log

from batchline.pipeline.dispatch.limiter.concurrency import (
    MIN_ROUND,
    PROBING,
    TOLERATED_LOSS,
    ConcurrencyLimit,
    Phase,
)
from batchline.pipeline.dispatch.limiter.model import ModelLimit
from batchline.pipeline.dispatch.limiter.rounds import HOLD_PART, USED_PART, Measure, Round

_STEP_DOWN = 0.8
"""A closed limit can always be probed at this part. What is known of the lowest latencies of its members may have been
measured while they slowed each other down."""
_MEMBER_PART = 0.25
"""The part of the requests in flight, divided by the number of models, that is a good part of them."""
_MANY_OUTSIDE = 0.25
"""Models join if they have this part of the limit in flight."""
_SLOWED_PART = 0.5
"""Models join if the members lost at least this part of the throughput that they lose to names of their engine."""
_MOST_OPEN_ROUNDS = 6
"""The number of rounds to wait for the first ramps of all models. If they share an engine, some may never end."""


class SharedLimit(ConcurrencyLimit):
    """The limit on the requests of several models together. ``busy`` has those with requests in flight, as it changes.

    Each model has a limit of its own. So nothing more is limited unless it is found that fewer in flight are enough:
    if models share an engine, each of them would gain by a higher limit what the others lose.
    """

    def __init__(self, *, cap: int, busy: Mapping[str, ModelLimit]) -> None:
        super().__init__(cap=cap)
        self._busy = busy
        self.members: frozenset[str] | None = None
        """The models that it holds for; None while it is open."""
        self._open_rounds = 0
        self._latencies.least = 1.0
        for model in busy.values():
            self._latencies.usual.update(model.concurrency.least_latencies)
        self._end_search()
        self._probe.upwards, self._probe.is_only_down = False, True
        self._candidates: frozenset[str] = frozenset()
        """The models that it will hold for, if the present probe finds that fewer are enough."""
        self._rate_alone: float | None = None
        """The throughput of its members, as a logarithm, when no other models had requests in flight."""

    @property
    def is_open(self) -> bool:
        return self.members is None

    def holds_for(self, model: str) -> bool:
        return self.members is None or model in self.members

    def set_cap(self, cap: int) -> None:
        if self.is_open:
            self._cap = cap
            self._end_search()
        else:
            super().set_cap(cap)

    def on_start(self, model: str, in_flight: int, now: float) -> Round | None:
        """Return the round that a request belongs to, or None. A probe ends if the models need fewer than it allows."""
        round_ = super().on_start(model, in_flight, now)
        if round_ is None and self._phase in PROBING and self._round is not None and self._round.is_unused:
            self._give_up_round(now)
        return round_

    def _new_round(self, in_flight: int, now: float) -> Round:
        if self.is_open and self._phase is Phase.HOLD:
            return Round(in_flight, size=max(MIN_ROUND, 2 * in_flight), full=False, part=HOLD_PART, since=now)
        return super()._new_round(in_flight, now)

    def _consider_hold(self, measure: Measure, now: float) -> None:
        if self.is_open:
            self._consider_to_close(measure, now)
            return
        rate = log(measure.rate)
        outside = sum(model.load.in_flight for name, model in self._busy.items() if not self.holds_for(name))
        if self._rate_alone is None or not outside:
            self._rate_alone = rate
        joining = self._joining()
        is_slowed = self._rate_alone - rate > _SLOWED_PART * log(1 + outside / self.limit)
        if sum(joining.values()) >= _MANY_OUTSIDE * self.limit and is_slowed:
            self._join(joining, now)
        else:
            super()._consider_hold(measure, now)

    def _consider_to_close(self, measure: Measure, now: float) -> None:
        """Probe whether fewer in flight than now are enough."""
        measure.limit = int(measure.load)
        self._open_rounds += 1
        if self._probe.is_due(now) and self._lowest(measure, now) < measure.limit and self._is_settled():
            least = _MEMBER_PART * measure.load / len(self._busy)
            self._candidates = frozenset(
                name for name, model in self._busy.items() if _fills_its_limit(model) or model.load.in_flight >= least
            )
            self._begin_probe(measure, now)

    def _is_settled(self) -> bool:
        """Return whether a probe would not disturb the first ramp of a model. One that needs few does not count."""
        return self._open_rounds > _MOST_OPEN_ROUNDS or not any(
            model.concurrency.is_in_first_ramp and _fills_its_limit(model) for model in self._busy.values()
        )

    def _joining(self) -> dict[str, int]:
        """Return the models outside that may join, and how many requests they have in flight."""
        return {
            name: model.load.in_flight
            for name, model in self._busy.items()
            if not (self.holds_for(name) or model.concurrency.is_in_first_ramp) and _fills_its_limit(model)
        }

    def _join(self, joining: Mapping[str, int], now: float) -> None:
        self.members = (self.members or frozenset()) | joining.keys()
        for name in joining:
            self._latencies.usual.update(self._busy[name].concurrency.least_latencies)
        self._rate_alone = None
        self._hold(self.limit + sum(joining.values()))
        self._probe.begin_descent(now, far=False)

    def _lowest(self, measure: Measure, now: float) -> int:
        lowest = super()._lowest(measure, now)
        return lowest if self.is_open else min(lowest, int(_STEP_DOWN * measure.limit) + 1)

    def _least_change(self, measure: Measure, error: float, now: float) -> float:
        return -TOLERATED_LOSS if self.is_open else super()._least_change(measure, error, now)

    def _end_search(self) -> None:
        if self.is_open:
            super()._hold(self._cap)
        else:
            super()._end_search()

    def _hold(self, limit: int) -> None:
        if self.members is None:
            self.members, self._probe.is_only_down = self._candidates, False
        super()._hold(limit)


def _fills_its_limit(model: ModelLimit) -> bool:
    return model.load.in_flight >= USED_PART * model.concurrency.limit
