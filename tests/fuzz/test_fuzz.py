"""A short run of every fuzzer: its corpus, and some thousand inputs from a fixed seed. ``make fuzz`` runs them long."""

import traceback

import pytest

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.targets import EXECUTIONS, TARGETS
from tests.fuzz.targets.framing import _compare, _requests_by_h11


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_rule(name: str) -> None:
    """Every input of the corpus was once a find, or shows a part of the format. 95 % of the lines are reached."""
    fuzzer = Fuzzer(TARGETS[name](), seed=1)
    fuzzer.run_corpus()
    fuzzer.run_executions(EXECUTIONS[name])
    report = fuzzer.close()
    for find in report.finds:
        print(find.data[:2000])
        traceback.print_exception(find.error)
    assert not report.finds
    assert report.coverage >= 0.95, report.missing


def test_a_request_that_only_the_service_sees_is_found() -> None:
    """Both parsers read to the end, so the service took bytes for a request that another server would not."""
    data = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    expected, refused = _requests_by_h11(data)
    _compare(expected, expected, refused=refused)
    with pytest.raises(AssertionError):
        _compare(expected * 2, expected, refused=refused)


def test_the_service_may_read_on_where_the_other_parser_refuses() -> None:
    expected, refused = _requests_by_h11(b"GET / HTTP/1.1\r\n\r\n")
    assert (expected, refused) == ([], True)
