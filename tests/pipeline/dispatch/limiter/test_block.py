"""When lines are tried although the upstream accepts none, and when that is over."""

from itertools import pairwise
from math import inf

import pytest

from batchline.pipeline.dispatch.limiter.block import Block

PATIENCE_SECONDS = 0.2


@pytest.fixture
def block() -> Block:
    made = Block()
    made.begin(160.0, 100.0)
    return made


def test_a_block_ends_at_its_time(block: Block) -> None:
    assert [block.is_on(now) for now in (100.0, 159.9, 160.0)] == [True, True, False]
    block.end()
    assert not block.is_on(100.0)


def test_a_line_is_tried_every_five_seconds(block: Block) -> None:
    assert [block.may_try(now) for now in (100.0, 104.9, 105.0)] == [False, False, True]
    block.on_try(105.0, 7, patience=PATIENCE_SECONDS)
    assert not block.may_try(120.0), "one at a time"
    block.on_refusal(7)
    assert [block.may_try(now) for now in (109.9, 110.0)] == [False, True]


def test_a_project_that_was_not_refused_and_an_answer_need_not_wait_so_long(block: Block) -> None:
    assert [block.may_try(now, first=True) for now in (100.2, 100.25)] == [False, True]
    assert not block.may_try(101.0)
    block.on_answer(3, 100.5)
    assert [block.may_try(now) for now in (100.9, 101.0)] == [False, True]
    block.on_try(101.0, 7, patience=PATIENCE_SECONDS)
    block.on_refusal(7)
    assert [block.may_try(now) for now in (105.9, 106.0)] == [False, True]


def test_a_line_that_is_not_refused_soon_was_accepted(block: Block) -> None:
    assert not block.is_accepted(150.0)
    block.on_try(105.0, 7, patience=PATIENCE_SECONDS)
    block.on_refusal(6)
    assert [block.is_accepted(now) for now in (105.1, 105.3)] == [False, True]
    block.on_refusal(7)
    assert not block.is_accepted(105.3)


def test_an_answer_shows_at_once_that_the_line_was_accepted(block: Block) -> None:
    block.on_try(105.0, 7, patience=PATIENCE_SECONDS)
    block.on_answer(7, 105.05)
    assert block.is_accepted(105.05)


def test_a_block_that_is_prolonged_is_tried_as_before(block: Block) -> None:
    block.begin(200.0, 103.0)
    assert block.until == 200.0
    assert [block.may_try(now) for now in (104.9, 105.0)] == [False, True]


def test_the_wait_ends_when_something_may_change(block: Block) -> None:
    assert block.wait(100.0) == pytest.approx(0.25)
    assert block.wait(102.0) == pytest.approx(3.0)
    assert block.wait(106.0) == pytest.approx(54.0)
    block.on_try(106.0, 7, patience=PATIENCE_SECONDS)
    assert block.wait(106.1) == pytest.approx(0.1)


def test_without_an_end_the_tries_become_rarer() -> None:
    """The upstream may accept so many in a tenth of a second, or so many in a minute."""
    block = Block()
    block.begin(inf, 100.0)
    tried = [100.0]
    for now in (100 + step / 100 for step in range(6000)):
        if block.may_try(now):
            block.on_try(now, len(tried), patience=PATIENCE_SECONDS)
            block.on_refusal(len(tried))
            tried.append(now)
    waits = [after - before for before, after in pairwise(tried)]
    assert waits[0] == pytest.approx(0.1, abs=0.02)
    assert waits[-1] == pytest.approx(2.0, abs=0.02)
    for before, wait in zip(tried, waits, strict=False):
        assert 0.09 < wait < max(0.1, (before - 100) / 8) + 0.02


def test_without_an_end_a_line_is_tried_soon_after_an_answer() -> None:
    """It may have been the number in flight that was too large."""
    block = Block()
    block.begin(inf, 100.0)
    block.on_try(140.0, 7, patience=PATIENCE_SECONDS)
    block.on_refusal(7)
    assert not block.may_try(140.2)
    block.on_answer(3, 140.2)
    assert block.may_try(140.2)
