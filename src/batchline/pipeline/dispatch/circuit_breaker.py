"""Pauses an upstream that is unavailable, or one model of it, and probes it. No line spends an attempt on the outage.

In the words of the circuit breaker pattern, *flowing* is closed, *paused* is open, and a probe is its half-open try::

    flowing ──(the last 16 answers, from 4 lines or more, all say unavailable; or it crashed)──> paused
    paused  ──(the first real answer; after a crash a 429 too)──> flowing
    paused  ──(patience ran out)──> impatient: lines run and faults count ──(the first real answer)──> flowing

The whole upstream is paused if all its models are unavailable. A single model is paused if others answer. If faults
follow soon after a pause, the upstream answers now and then, and the next pause needs four times as many answers. If a
line would fail for good, 16 answers are always enough for a pause.

Some lines fail at an upstream that answers all others: they fail alone. When a batch has nothing left but such lines,
their faults look like an outage. They may be one, so they pause the upstream too, but only for half a minute. Then they
run again and spend their attempts, and their faults say nothing about the upstream any more.
"""

import logging
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from math import inf

from batchline.domain.outcomes import Retryable
from batchline.domain.progress import Pause
from batchline.domain.replies import FaultKind
from batchline.pipeline.job import Job
from batchline.ports import Clock, Random
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_ANSWERS_TO_PAUSE = 16
_LINES_TO_PAUSE = 4
_THROTTLED_SECONDS = 1.0
"""Answers of 429 pause an upstream only after this time, because the limiter first learns how much it accepts."""
_FLAPPING_FACTOR, _MAX_ANSWERS_TO_PAUSE = 4, 1024
_FLAPPING_SECONDS = 60.0
"""Faults within this time after a pause show an upstream that answers now and then."""
_LONE_ANSWERS = 12
"""If so many of the answers that cause a pause are about lines that fail alone, it is short. The others may be about
lines that failed first when no other line was left to be answered."""
_LONE_PATIENCE_SECONDS = 30.0
"""The longest pause for lines that fail alone. It is as long as many servers take to restart."""
_LONE_MEMORY_SECONDS = 600.0
"""The time after such a pause in which the faults of lines that fail alone cause no further one."""
_SHORTEST_PROBE_SECONDS, _LONGEST_PROBE_SECONDS = 2.0, 5.0
_PROBE_PART = 1 / 4
"""The time between probes is this part of the time since the pause began, within these bounds. So a pause is hardly
longer than it must be: a limit for each few seconds may be all that refuses, and a server that restarts or loads a
model should not stand idle for long once it is ready."""
_LONGEST_PROBE_SECONDS_IF_UNANSWERED = 600.0
"""While an earlier probe is in flight, the time between probes doubles up to this. A slow server may still process what
it got before the pause, and would never be done with that if each probe added to it."""
_NEW_LANE_SECONDS = 0.5
"""The time between the probes of projects and models that were not probed yet in this pause."""
_NEW_LANE_SECONDS_AFTER_CRASH = 0.25
"""The same after a crash. It may have been one line's broken connection, and then the lines of others must not wait. A
connection that an upstream refuses while it restarts costs nothing."""
_MAX_MODELS = 1000
"""The number of models at which those that run as usual are forgotten. Files may name any number of models."""
_CREDENTIALS = frozenset({"http_401", "http_403"})

Lane = tuple[str, str]
"""A project and a model."""


class CircuitBreaker:
    """The availability of one upstream, or of one model of it. No pause lasts longer than ``patience_seconds``."""

    def __init__(
        self,
        upstream: str,
        *,
        model: str = "",
        clock: Clock,
        random: Random,
        patience_seconds: float,
        metrics: Metrics,
    ) -> None:
        self._upstream, self._model = upstream, model
        self._clock, self._random, self._metrics = clock, random, metrics
        self._patience_seconds = patience_seconds
        self._unavailable = 0
        """The number of answers in a row that said that it is unavailable."""
        self._unavailable_since = 0.0
        self._lines: deque[Hashable] = deque(maxlen=_ANSWERS_TO_PAUSE)
        """The lines that the last of them were about."""
        self._lone: deque[bool] = deque(maxlen=_ANSWERS_TO_PAUSE)
        """Whether each of these lines fails alone."""
        self._ignores_lone_until = -inf
        self.answers = 0
        """The number of real answers so far."""
        self._last_fault = ("", False)
        self.paused = False
        self._paused_at = 0.0
        self._ended_at = -inf
        """The time at which an answer ended the last pause."""
        self._answers_needed = _ANSWERS_TO_PAUSE
        """The number of answers that the last pause needed."""
        self._since = 0
        self._reason = ""
        self._crashed = self._impatient = False
        self.is_lone = False
        """Whether it is paused because of lines most of which fail alone, and no line has failed first since then."""
        self._next_probe = self._last_probe = 0.0
        self._interval = _SHORTEST_PROBE_SECONDS
        self._probed: dict[Lane, float] = {}
        """The time of the last probe of each project and model in this pause."""
        self._probing: set[Hashable] = set()
        """The lines that are in flight as probes of this pause."""

    @property
    def pause(self) -> Pause | None:
        if not self.paused:
            return None
        return Pause(upstream=self._upstream, model=self._model or None, detail=self._reason, since=self._since)

    @property
    def flowing(self) -> bool:
        """Whether lines run as usual: it is not paused, and no pause has ended because the patience ran out."""
        return not self.paused and not self._impatient

    @property
    def ignores_lone(self) -> bool:
        """Whether the faults of lines that fail alone say nothing about it."""
        return self.flowing and self._clock.steady() < self._ignores_lone_until

    @property
    def answers_to_pause(self) -> int:
        """The number of answers in a row that must say that it is unavailable before it is paused."""
        if self._clock.steady() - self._ended_at >= _FLAPPING_SECONDS:
            return _ANSWERS_TO_PAUSE
        return min(_MAX_ANSWERS_TO_PAUSE, _FLAPPING_FACTOR * self._answers_needed)

    def on_real_answers(self, count: int = 1) -> None:
        """End a pause: the upstream is available."""
        self.answers += count
        self._unavailable = 0
        if self.flowing:
            return
        log.info("upstream available again, resuming dispatch", extra=self._labels)
        if self.paused:
            self._ended_at = self._clock.steady()
        self._end_pause()
        self._impatient = False

    def on_unavailable(
        self,
        line: Hashable,
        reason: str,
        *,
        throttled: bool = False,
        fails_alone: bool = False,
        fails_first: bool = True,
    ) -> None:
        """Count an answer of an unavailable upstream. A 429 after a crash shows that it has restarted."""
        if self._crashed and throttled:
            self._end_pause()
        if fails_alone and self.ignores_lone:
            return
        self._lone.append(fails_alone)
        if fails_first:
            self.is_lone = False
        if not self._unavailable:
            self._unavailable_since = self._clock.steady()
        self._unavailable += 1
        self._lines.append(line)
        self._last_fault = reason, throttled

    def pause_if_unavailable(self, answers: int = _ANSWERS_TO_PAUSE) -> None:
        """Pause if so many answers in a row, from several lines, said that it is unavailable."""
        if self._unavailable < answers or len(set(self._lines)) < _LINES_TO_PAUSE:
            return
        reason, throttled = self._last_fault
        if throttled and self._clock.steady() - self._unavailable_since < _THROTTLED_SECONDS:
            return
        if self.flowing:
            self.is_lone = sum(self._lone) >= _LONE_ANSWERS
        self._pause(reason)
        self._crashed = False

    def on_crash(self) -> None:
        """Pause at once: the upstream broke every connection together, and is probably restarting."""
        if self.flowing:
            self._pause("crashed")
            self._crashed = True

    def forgives(self, kind: str) -> bool:
        """Return whether a fault of this kind spends no attempt.

        After a crash only a refused connection is forgiven, since nothing was sent over it. A connection that breaks
        may be the line that caused the crash, and an answer may come from an upstream that has restarted.
        """
        return self.paused and (not self._crashed or kind == FaultKind.REFUSED)

    def _pause(self, reason: str) -> None:
        if not self.flowing:
            return
        now = self._clock.steady()
        self._answers_needed = self.answers_to_pause
        self.paused = True
        self._paused_at, self._since = now, int(self._clock.now())
        self._reason = reason
        self._metrics.upstream_paused.labels(self._upstream, self._model, reason).set(1)
        self._interval = _SHORTEST_PROBE_SECONDS
        self._probed.clear()
        self._probing.clear()
        self._last_probe = now
        self._schedule_probe()
        log.warning(
            "upstream does not accept the credentials, pausing dispatch: check its API key"
            if reason in _CREDENTIALS
            else "upstream unavailable, pausing dispatch",
            extra=self._labels | {"reason": reason, "retry_in": round(self.seconds_to_probe, 1)},
        )

    def end_pause_if_overdue(self) -> None:
        """Resume attempts after an outage longer than the patience, so that lines end by their faults."""
        paused_seconds = self._clock.steady() - self._paused_at
        if self.paused and self.is_lone and paused_seconds >= min(_LONE_PATIENCE_SECONDS, self._patience_seconds):
            self.ignore_lone_faults()
            log.warning("lines keep failing at an upstream that answered others, resuming dispatch", extra=self._labels)
        if not self.paused or paused_seconds < self._patience_seconds:
            return
        self._end_pause()
        self._impatient = True
        log.warning(
            "upstream still unavailable, resuming attempts",
            extra=self._labels | {"paused_seconds": int(self._patience_seconds)},
        )

    def ignore_lone_faults(self) -> None:
        """Let lines that fail alone run and fail, without another pause because of them."""
        self._end_pause()
        self._unavailable, self._ignores_lone_until = 0, self._clock.steady() + _LONE_MEMORY_SECONDS

    @property
    def seconds_to_probe(self) -> float:
        """The time until the next probe is due, while paused."""
        return max(0.0, self._next_probe - self._clock.steady())

    def next_lane(self, lanes: Iterable[Lane]) -> Lane | None:
        """Return the waiting project and model to probe with now: the one whose last probe is longest ago.

        One that was not probed in this pause need not wait for the next regular probe.
        """
        lane = min(lanes, key=lambda lane: self._probed.get(lane, -inf), default=None)
        if lane is None or not self.seconds_to_probe:
            return lane
        return lane if lane not in self._probed and not self.seconds_to_new_lane else None

    @property
    def seconds_to_new_lane(self) -> float:
        """The time until a project and model that was not probed yet in this pause may be."""
        wait = _NEW_LANE_SECONDS_AFTER_CRASH if self._crashed else _NEW_LANE_SECONDS
        return max(0.0, self._last_probe + wait - self._clock.steady())

    def begin_probe(self, lane: Lane, line: Hashable) -> None:
        """Note that a line starts as a probe, and schedule the next one."""
        self._interval = self._interval_beside_probes if self._probing else self._usual_interval
        self._probing.add(line)
        self._probed[lane] = self._last_probe = self._clock.steady()
        self._schedule_probe()

    def end_probe(self, line: Hashable) -> None:
        """Note that the attempt of a line has ended, in whatever way. If it was a probe, the next one may be due."""
        if line not in self._probing:
            return
        self._probing.remove(line)
        if not self._probing and self._interval > self._usual_interval:
            self._interval = self._usual_interval
            self._schedule_probe()

    @property
    def _usual_interval(self) -> float:
        paused_seconds = self._clock.steady() - self._paused_at
        return min(_LONGEST_PROBE_SECONDS, max(_SHORTEST_PROBE_SECONDS, _PROBE_PART * paused_seconds))

    @property
    def _interval_beside_probes(self) -> float:
        return min(_LONGEST_PROBE_SECONDS_IF_UNANSWERED, 2 * self._interval)

    def _end_pause(self) -> None:
        if self.paused:
            self._metrics.upstream_paused.remove(self._upstream, self._model, self._reason)
        self.paused = False
        self._crashed = self.is_lone = False

    def _schedule_probe(self) -> None:
        self._next_probe = self._clock.steady() + self._random.uniform(0.5, 1.0) * self._interval

    @property
    def _labels(self) -> dict[str, object]:
        labels: dict[str, object] = {"upstream": self._upstream}
        return labels | {"model": self._model} if self._model else labels


class Breakers:
    """The circuit breaker of an upstream, and one for each of its models."""

    def __init__(
        self, upstream: str, *, clock: Clock, random: Random, patience_seconds: float, metrics: Metrics
    ) -> None:
        self._upstream, self._clock, self._random = upstream, clock, random
        self._patience_seconds, self._metrics = patience_seconds, metrics
        self.upstream = self._new("")
        self._models: dict[str, CircuitBreaker] = {}
        self.paused_models: Mapping[str, CircuitBreaker] = {}

    @property
    def paused(self) -> bool:
        """Whether the whole upstream is paused."""
        return self.upstream.paused

    @property
    def any_paused(self) -> bool:
        """Whether the upstream or one of its models is paused."""
        return self.upstream.paused or bool(self.paused_models)

    @property
    def pauses(self) -> list[Pause]:
        return [pause for breaker in (self.upstream, *self._models.values()) if (pause := breaker.pause) is not None]

    def is_paused(self, model: str) -> bool:
        return self.upstream.paused or (model in self._models and self._models[model].paused)

    def is_flowing(self, model: str) -> bool:
        return self.upstream.flowing and (model not in self._models or self._models[model].flowing)

    def ignores_lone(self, model: str) -> bool:
        """Return whether the faults of a model's lines that fail alone say nothing about the upstream."""
        return model in self._models and self._models[model].ignores_lone and self.upstream.flowing

    def on_real_answers(self, model: str, count: int = 1) -> bool:
        """End the pauses that answers of a model contradict, and return whether the model was paused.

        Models that were as unavailable as the whole upstream seemed to be stay paused.
        """
        was_paused = whole_was_paused = self.upstream.paused
        self.upstream.on_real_answers(count)
        breaker = self._models.get(model)
        if breaker is not None:
            was_paused = was_paused or breaker.paused
            breaker.on_real_answers(count)
        if whole_was_paused:
            for breaker in self._models.values():
                breaker.pause_if_unavailable()
        if was_paused:
            self._update_paused_models()
        return was_paused

    def answers_of(self, model: str) -> int:
        """Return the number of real answers of a model since this was asked first."""
        return self._of(model).answers

    def on_unavailable(self, job: Job, fault: Retryable, *, last_attempt: bool = False) -> None:
        """Count an answer of an unavailable upstream, and pause it or the model if there were enough of them.

        ``last_attempt`` says that the line would fail for good.
        """
        breaker = self._of(job.model.id)
        was_paused = breaker.paused
        job.note_fault(answers=breaker.answers)
        # The probes of a model that is paused alone say nothing new about the others.
        for each in (breaker,) if breaker.paused and not self.upstream.paused else (self.upstream, breaker):
            each.on_unavailable(
                job.line_key,
                fault.kind,
                throttled=fault.throttled,
                fails_alone=job.fails_alone,
                fails_first=not job.has_failed,
            )
        needed = _ANSWERS_TO_PAUSE if last_attempt else self.upstream.answers_to_pause
        self.upstream.pause_if_unavailable(needed)
        if self.upstream.flowing:
            # If the whole upstream answers now and then, a pause of one model needs as many answers as one of all.
            breaker.pause_if_unavailable(needed if last_attempt else max(needed, breaker.answers_to_pause))
        if breaker.paused != was_paused:
            self._update_paused_models()

    def begin_probe(self, job: Job) -> None:
        """Schedule the next probe, if the upstream or the model is paused: then this job is one."""
        breaker = self.upstream if self.upstream.paused else self.paused_models.get(job.model.id)
        if breaker is not None:
            breaker.begin_probe((job.batch.project_id, job.model.id), job.line_key)

    def end_probe(self, model: str, line: Hashable) -> None:
        """Note that the attempt of a line has ended, in whatever way."""
        self.upstream.end_probe(line)
        if model in self._models:
            self._models[model].end_probe(line)

    def forgives(self, model: str, kind: str) -> bool:
        """Return whether a fault of this kind spends no attempt."""
        return self.upstream.forgives(kind) or (model in self._models and self._models[model].forgives(kind))

    def end_overdue_pauses(self) -> bool:
        """End the pauses that lasted longer than the patience, and return whether there were any."""
        was_lone, pauses = self.upstream.is_lone, len(self.pauses)
        for breaker in (self.upstream, *self._models.values()):
            breaker.end_pause_if_overdue()
        if was_lone and self.upstream.flowing:
            # The same faults were counted for their models.
            for breaker in self._models.values():
                if not breaker.paused:
                    breaker.ignore_lone_faults()
        if len(self.pauses) == pauses:
            return False
        self._update_paused_models()
        return True

    def _update_paused_models(self) -> None:
        self.paused_models = {model: breaker for model, breaker in self._models.items() if breaker.paused}

    def _of(self, model: str) -> CircuitBreaker:
        if model not in self._models:
            if len(self._models) >= _MAX_MODELS:
                self._models = {name: breaker for name, breaker in self._models.items() if not breaker.flowing}
            self._models[model] = self._new(model)
        return self._models[model]

    def _new(self, model: str) -> CircuitBreaker:
        return CircuitBreaker(
            self._upstream,
            model=model,
            clock=self._clock,
            random=self._random,
            patience_seconds=self._patience_seconds,
            metrics=self._metrics,
        )
