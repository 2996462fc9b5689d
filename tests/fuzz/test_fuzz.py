"""A short run of every fuzzer: its corpus, and some thousand inputs from a fixed seed. ``make fuzz`` runs them long."""

import traceback

import pytest

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.targets import EXECUTIONS, TARGETS


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
