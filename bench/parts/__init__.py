"""The parts of a run. Each measures something and tells it as data and as tables."""

from collections.abc import Callable
from typing import Any

from bench.course import Course
from bench.figures import Table
from bench.parts import growth, history, trip, wrk

Part = Callable[[Course], tuple[Any, list[Table]]]

PARTS: dict[str, Part] = {
    "trip": trip.measure,
    "wrk": wrk.measure,
    "growth": growth.measure,
    "history": history.measure,
}
