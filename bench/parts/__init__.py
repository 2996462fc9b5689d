"""The parts of the benchmark. Each returns its figures as data, as tables, and as promises with their goals."""

from collections.abc import Callable

from bench.context import BenchContext
from bench.parts import growth, history, memory, polls, trip, wrk
from bench.results import PartResult

PARTS: dict[str, Callable[[BenchContext], PartResult]] = {
    "trip": trip.measure,
    "wrk": wrk.measure,
    "memory": memory.measure,
    "polls": polls.measure,
    "growth": growth.measure,
    "history": history.measure,
}
