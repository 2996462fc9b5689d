"""The parts of a run. Each measures something and tells it as data, as tables, and as promises kept or not."""

from collections.abc import Callable

from bench.course import Course
from bench.parts import growth, history, memory, polls, trip, wrk
from bench.results import Told

PARTS: dict[str, Callable[[Course], Told]] = {
    "trip": trip.measure,
    "wrk": wrk.measure,
    "memory": memory.measure,
    "polls": polls.measure,
    "growth": growth.measure,
    "history": history.measure,
}
