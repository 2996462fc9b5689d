"""Lines are counted once each, and their custom_ids are compared without being kept."""

import pytest

from batchline.domain import ids
from batchline.domain.errors import Damaged
from batchline.domain.outcomes import BATCH_CANCELLED, LOST, Success, error_line, output_line
from batchline.domain.states import BatchStatus
from batchline.domain.usage import Usage
from batchline.fsck.tally import LineNumbers, LineSet, LineTally
from tests.support.records import make_batch

_BATCH = make_batch(id="batch_01A", status=BatchStatus.COMPLETED, total=4)
_BODY = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'


def _output(index: int, custom_id: bytes = b'"a"', *, batch: str = _BATCH.id) -> bytes:
    return output_line(ids.line_id(batch, index), custom_id, Success(200, None, _BODY))


def test_lines_tokens_and_errors_are_counted() -> None:
    tally = LineTally(_BATCH)
    for index in (0, 2):
        tally.add(_output(index), is_error=False)
    for failure in (BATCH_CANCELLED, LOST):
        tally.add(error_line(ids.line_id(_BATCH.id, 3), b'"d"', failure), is_error=True)
    assert (tally.succeeded, tally.failed) == (2, 2)
    assert tally.usage == Usage(input_tokens=6, output_tokens=8)
    assert [(error.code, error.count) for error in tally.errors] == [("batch_cancelled", 1), ("internal_error", 1)]
    assert str(tally.lines.missing()) == "2"
    assert str(tally.lines.repeated) == "4"


def test_a_custom_id_that_was_lost_differs_from_none() -> None:
    tally = LineTally(_BATCH)
    tally.add(_output(0), is_error=False)
    tally.add(error_line(ids.line_id(_BATCH.id, 1), b"null", LOST), is_error=True)
    assert tally.differs(0, "b")
    assert not tally.differs(0, "a")
    assert not tally.differs(1, "b")
    assert not tally.differs(2, "b")


def test_a_line_of_another_batch_or_beyond_the_last_is_foreign() -> None:
    tally = LineTally(_BATCH)
    tally.add(_output(0, batch="batch_01B"), is_error=False)
    tally.add(_output(4), is_error=False)
    assert tally.lines.foreign == 2
    assert tally.lines.missing().count == 4


def test_a_line_in_the_wrong_file_is_damage() -> None:
    with pytest.raises(Damaged):
        LineTally(_BATCH).add(_output(0), is_error=True)


def test_many_lines_are_shown_by_the_first_of_them() -> None:
    numbers = LineNumbers()
    for index in range(7):
        numbers.add(index)
    assert str(numbers) == "1, 2, 3, 4, 5 and 2 more"


def test_a_row_with_a_wrong_total_takes_no_memory() -> None:
    """A flipped bit in a row must not end the check."""
    lines = LineSet(1 << 60)
    for index in (0, 1, 3):
        lines.add(index)
    missing = lines.missing()
    assert missing.count == (1 << 60) - 3
    assert str(missing).startswith("3, 5, 6, 7, 8 and ")
