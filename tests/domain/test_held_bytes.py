"""How many bytes of answers a process holds at once, and which answer goes on when there is room."""

from batchline.domain.held_bytes import HeldBytes, Reservation

LIMIT = 100


class Answer:
    """An answer that arrives, and how often it got room."""

    def __init__(self, held_bytes: HeldBytes) -> None:
        self.granted = 0
        self.reservation = Reservation(held_bytes, on_room=self._count)

    def _count(self) -> None:
        self.granted += 1

    def wants(self, size: int) -> bool:
        """Reserve up to this size, and return whether the answer may be read on."""
        self.reservation.grow_to(size)
        return not self.reservation.waiting


def test_answers_that_arrive_and_answers_to_be_recorded_share_the_limit() -> None:
    held_bytes = HeldBytes(LIMIT)
    held_bytes.add_unrecorded(60)
    first, second = Answer(held_bytes), Answer(held_bytes)
    assert first.wants(40)
    assert held_bytes.full
    assert not second.wants(1)
    held_bytes.on_recorded(60)
    assert (second.granted, held_bytes.total) == (1, 41)


def test_the_answer_that_has_waited_longest_goes_on_first() -> None:
    """An answer that wants little does not overtake one that wants much: otherwise large ones would never arrive."""
    held_bytes = HeldBytes(LIMIT)
    held_bytes.add_unrecorded(90)
    large, small = Answer(held_bytes), Answer(held_bytes)
    assert not large.wants(50)
    assert not small.wants(5)
    held_bytes.on_recorded(45)
    assert (large.granted, small.granted) == (1, 1)


def test_parts_of_answers_never_block_each_other() -> None:
    """Ten answers have a tenth each and want more: some exceed the limit until they are complete, then the next."""
    held_bytes = HeldBytes(LIMIT)
    answers = [Answer(held_bytes) for _ in range(10)]
    assert all(answer.wants(10) for answer in answers)
    arriving = [answer for answer in answers if answer.wants(20)]
    assert arriving == answers[:4]
    assert all(answer.wants(30) for answer in arriving)
    assert held_bytes.total == LIMIT + 4 * 20
    arriving[0].reservation.end()
    held_bytes.add_unrecorded(30)
    assert answers[4].granted == 2, "there is room again below what the others exceed, or it may exceed too"


def test_nothing_exceeds_the_limit_while_answers_wait_to_be_recorded() -> None:
    """D5: while storage is unavailable, all that is in flight must not become resident one by one."""
    held_bytes = HeldBytes(LIMIT)
    held_bytes.add_unrecorded(LIMIT)
    answer = Answer(held_bytes)
    assert not answer.wants(1)
    held_bytes.on_recorded(1)
    assert answer.granted == 1


def test_nothing_exceeds_the_limit_while_complete_answers_are_there() -> None:
    """Otherwise answers that become complete faster than they are handled would exceed the limit four at a time."""
    held_bytes = HeldBytes(LIMIT)
    complete, waiting = Answer(held_bytes), Answer(held_bytes)
    assert complete.wants(LIMIT)
    complete.reservation.complete()
    assert not waiting.wants(1)
    complete.reservation.end()
    assert waiting.granted == 1


def test_an_answer_that_ends_gives_everything_back() -> None:
    """However it ends: complete, broken, or cancelled while it waits."""
    held_bytes = HeldBytes(LIMIT)
    held_bytes.add_unrecorded(50)
    arriving, waiting, last = Answer(held_bytes), Answer(held_bytes), Answer(held_bytes)
    assert arriving.wants(50)
    assert not waiting.wants(20)
    assert not last.wants(10)
    waiting.reservation.end()
    arriving.reservation.end()
    assert (waiting.granted, last.granted, held_bytes.total) == (0, 1, 60)
    last.reservation.end()
    assert held_bytes.total == 50
