"""What the queue that an engine reports says about the number in flight (D9)."""

import pytest

from batchline.domain.engine_queue import QueueLength
from batchline.pipeline.dispatch.limiter.reported_queue import ReportedQueue

SIZES = {"short": (True, False, False), "enough": (False, True, False), "long": (False, True, True)}


def sizes(queue: ReportedQueue, now: float = 0.0) -> tuple[bool, bool, bool]:
    return queue.is_short(now), queue.is_enough(now), queue.is_long(now)


@pytest.mark.parametrize(
    ("waiting", "size"), [(0, "short"), (16, "short"), (17, "enough"), (80, "enough"), (81, "long"), (200, "long")]
)
def test_a_queue_is_compared_with_what_the_engine_processes(waiting: int, size: str) -> None:
    """64 of our requests are processed, and these wait. Until the first reading nothing is known."""
    queue = ReportedQueue()
    assert sizes(queue) == (False, False, False)
    assert queue.read(QueueLength(waiting=waiting, running=64), in_flight=64 + waiting, now=0.0)
    assert sizes(queue) == SIZES[size]


def test_an_engine_that_has_few_of_our_requests_is_not_the_one_that_answers_them() -> None:
    queue = ReportedQueue()
    assert not queue.read(QueueLength(waiting=0, running=31), in_flight=64, now=0.0)
    assert sizes(queue) == (False, False, False)


def test_the_queue_of_other_clients_is_not_too_long_for_us() -> None:
    """A lower limit of ours would not shorten it."""
    queue = ReportedQueue()
    assert queue.read(QueueLength(waiting=200, running=64), in_flight=100, now=0.0)
    assert sizes(queue) == SIZES["enough"]


def test_an_engine_that_tells_only_its_queue_is_believed_but_not_that_it_is_too_long() -> None:
    """Nothing shows whose requests these are."""
    queue = ReportedQueue()
    assert queue.read(QueueLength(waiting=200, running=None), in_flight=264, now=0.0)
    assert sizes(queue) == SIZES["enough"]
    assert queue.read(QueueLength(waiting=0, running=None), in_flight=264, now=0.0)
    assert sizes(queue) == SIZES["short"]


def test_the_end_of_a_step_is_not_taken_for_a_long_queue() -> None:
    """Between two steps an engine may process few for a moment, while the next ones wait already."""
    queue = ReportedQueue()
    assert queue.read(QueueLength(waiting=0, running=64), in_flight=64, now=0.0)
    assert queue.read(QueueLength(waiting=60, running=4), in_flight=64, now=1.0)
    assert sizes(queue, 1.0) == SIZES["enough"]
    assert queue.lowest_limit == 2 * 64 + 1


def test_a_reading_is_used_for_15_seconds() -> None:
    queue = ReportedQueue()
    queue.read(QueueLength(waiting=0, running=64), in_flight=64, now=100.0)
    assert queue.is_known(114.0)
    assert sizes(queue, 114.0) == SIZES["short"]
    assert not queue.is_known(115.0)
    assert sizes(queue, 115.0) == (False, False, False)
