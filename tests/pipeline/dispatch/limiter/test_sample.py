"""Which of some successive starts are refused."""

from math import inf

import pytest

from batchline.pipeline.dispatch.limiter.sample import Sample

PATIENCE_SECONDS = 0.1


def begin(count: int, now: float = 0.0, **arguments: float) -> Sample:
    """Return a sample of ten, after five earlier starts, with so many of its own."""
    sample = Sample(0.0, **{"after": 5, "size": 10, **arguments})  # type: ignore[arg-type]
    sample.on_start(now, count, count, patience=PATIENCE_SECONDS)
    return sample


def test_a_start_that_is_not_refused_for_some_time_was_accepted() -> None:
    """Answers may take minutes, and refusals come quickly."""
    sample = begin(10)
    sample.on_refusal(8)
    assert not sample.end_if_complete(0.09)
    assert sample.complete_at == PATIENCE_SECONDS
    assert sample.end_if_complete(0.1)
    assert sample.refused_part == 0.1


def test_a_sample_without_enough_starts_is_not_complete() -> None:
    sample = begin(9)
    assert not sample.end_if_complete(1000.0)


def test_only_its_own_starts_are_counted() -> None:
    """The fifth was before it, and the sixteenth is after it."""
    sample = begin(10)
    for order in (4, 5, 16, 17):
        sample.on_refusal(order)
    assert sample.refused == 0
    sample.on_start(1.0, 10, 10, patience=PATIENCE_SECONDS)
    sample.on_refusal(20)
    assert sample.refused == 0


@pytest.mark.parametrize(("refused", "part"), [(7, 0.7), (8, 1.0)])
def test_a_refusal_that_seems_to_be_about_a_line_counts_as_accepted_unless_no_other_was(
    refused: int, part: float
) -> None:
    """Lines that are always refused hold up no others; but where nothing is accepted, they show nothing."""
    sample = begin(10)
    for order in range(6, 6 + refused):
        sample.on_refusal(order)
    for order in (14, 15, 16):
        sample.on_other_refusal(order)
    assert sample.end_if_complete(0.1)
    assert sample.refused_part == part


def test_starts_are_added_until_it_has_enough() -> None:
    sample = begin(4)
    sample.on_start(2.0, 6, 6, patience=PATIENCE_SECONDS)
    assert sample.complete_at == 2.1


@pytest.mark.parametrize(("refused", "complete"), [(4, False), (5, True)])
def test_many_refusals_end_it_early(refused: int, complete: bool) -> None:
    sample = begin(10)
    for order in range(6, 6 + refused):
        sample.on_refusal(order)
    assert sample.end_if_complete(0.01) is complete


def test_of_a_sample_that_ends_early_the_starts_up_to_the_last_refusal_count() -> None:
    """The later ones may still be refused."""
    sample = begin(10)
    for order in (6, 7, 9, 11, 13):
        sample.on_refusal(order)
    assert sample.end_if_complete(0.01)
    assert sample.refused_part == 5 / 8


def test_a_whole_sample_is_waited_for() -> None:
    """It is compared with another one, so none of its starts may be missing."""
    sample = begin(10, whole=True)
    for order in range(6, 14):
        sample.on_refusal(order)
    assert not sample.end_if_complete(0.01)
    assert sample.end_if_complete(0.1)
    assert sample.refused_part == 0.8


def test_it_goes_on_for_some_time_though_it_has_enough() -> None:
    """A burst that is accepted at once shows nothing about a rate."""
    sample = begin(10, seconds=3.0)
    sample.on_start(2.0, 5, 5, patience=PATIENCE_SECONDS)
    assert not sample.end_if_complete(3.0)
    assert sample.end_if_complete(3.1)
    sample.on_refusal(20)
    assert sample.end_if_complete(3.1)
    assert sample.refused_part == 1 / 15


def test_it_ends_after_some_time_with_the_least_number() -> None:
    sample = begin(2, least=3, most_seconds=1.0)
    assert not sample.end_if_complete(5.0)
    sample.on_start(6.0, 1, 1, patience=PATIENCE_SECONDS)
    assert sample.complete_at == 6.1
    sample = begin(3, least=3, most_seconds=1.0)
    assert not sample.end_if_complete(1.0)
    assert sample.end_if_complete(1.1)


def test_nothing_of_an_empty_sample_is_refused() -> None:
    assert Sample(0.0, after=0, size=4).refused_part == 0.0


def sent_in_turn(in_flight: list[int], refused: list[int]) -> Sample:
    """Return a sample of single starts with so many in flight each, of which some are refused, counted from 0."""
    sample = Sample(0.0, after=0, size=len(in_flight))
    for number in in_flight:
        sample.on_start(0.0, 1, number, patience=PATIENCE_SECONDS)
    for each in refused:
        sample.on_refusal(each + 1)
    assert sample.end_if_complete(PATIENCE_SECONDS)
    return sample


def test_the_number_beyond_which_all_were_refused_is_known() -> None:
    assert sent_in_turn([8, 9, 8, 8, 9, 7, 8, 8], [1, 4]).accepted_number == 8


@pytest.mark.parametrize(
    ("in_flight", "refused"),
    [
        ([8, 9, 8, 8, 9, 9, 8, 8], [1, 4]),
        ([8, 8, 8, 8, 8, 8, 8, 8], [1, 4]),
        ([8, 9, 8, 8, 8, 7, 8, 8], [1]),
        ([5, 6, 7, 8, 9, 10, 11, 12], [4, 5, 6, 7]),
        ([8, 8, 8, 8], []),
    ],
    ids=["one beyond it was accepted", "at one number", "a single refusal", "from a moment on", "none"],
)
def test_there_is_no_such_number(in_flight: list[int], refused: list[int]) -> None:
    assert sent_in_turn(in_flight, refused).accepted_number is None


def test_its_rate_is_that_of_its_starts() -> None:
    sample = Sample(0.0, after=0, size=5)
    for number in range(5):
        sample.on_start(10.0 + number * 0.05, 1, 1, patience=PATIENCE_SECONDS)
    assert sample.rate == pytest.approx(20)


def test_starts_at_one_moment_have_no_rate() -> None:
    assert begin(10).rate == inf


def test_the_spaces_before_refused_starts_are_compared_with_those_before_accepted_ones() -> None:
    sample = Sample(0.0, after=0, size=12)
    for number in range(12):
        sample.on_start(number * 0.03, 1, 4, patience=PATIENCE_SECONDS)
    assert sample.gap_evidence is None
    for order in range(2, 13, 2):
        sample.on_refusal(order)
    assert sample.gap_evidence == 1.0


def test_a_limit_of_one_in_flight_is_not_taken_for_a_limit_of_the_rate() -> None:
    """The spaces before its refused starts are short too."""
    sample = Sample(0.0, after=0, size=12)
    for number in range(12):
        sample.on_start(number * 0.03, 1, 1 + number % 2, patience=PATIENCE_SECONDS)
    for order in range(2, 13, 2):
        sample.on_refusal(order)
    assert sample.gap_evidence is None
