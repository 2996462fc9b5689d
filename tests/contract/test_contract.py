"""Each rule of the contract has its tests, docs/contract.md lists them, and the mutations can be made.

``make mutations`` makes them.
"""

from collections import Counter

import pytest

from tests.contract.markers import markers, order_of, path_of_test
from tests.contract.mutations import Mutation, mutations
from tests.contract.page import COMMAND, PAGE, page

RULES = {
    *(f"A{n}" for n in range(1, 15)),
    *(f"B{n}" for n in range(1, 11)),
    *(f"C{n}" for n in range(1, 15)),
    *(f"D{n}" for n in range(1, 12)),
    *("C9b", "E1", "E2", "E3", "E4", "F1", "F2", "F3", "F4", "F5", "F6", "F7"),
    *("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G10", "G11"),
}
"""The rules that are built."""

WEIGHTY_RULES = {"A3", "A8", "A11", "B2", "C2", "C4", "C11", "C12", "D1", "D2", "D3", "D4", "D5", "D6", "E2"}
"""The rules that users rely on most; each needs at least three tests."""

MUTATIONS = mutations()


def test_the_page_is_current() -> None:
    if PAGE.read_text() != page():
        pytest.fail(f"{PAGE.name} is not what the markers of the tests say. Write it again with: {COMMAND}")


def test_every_rule_that_is_built_has_tests() -> None:
    counts = Counter(marker.rule for marker in markers())
    without = sorted(RULES - set(counts), key=order_of)
    assert without == [], "mark a test of each of these rules with @pytest.mark.rule(number, says)"
    unknown = sorted(set(counts) - RULES, key=order_of)
    assert unknown == [], "a marker names a rule that RULES does not have: correct the marker or add the rule"
    too_few = sorted((rule for rule in WEIGHTY_RULES if counts[rule] < 3), key=order_of)
    assert too_few == [], "each of these rules needs three markers"


def test_a_test_says_each_thing_once() -> None:
    counts = Counter(markers())
    assert [marker for marker, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.effect}")
def test_a_mutation_can_be_made(mutation: Mutation) -> None:
    """Its rule and its tests exist, and its code is found exactly once, for each backend."""
    assert mutation.rule in RULES
    assert mutation.tests
    for test in mutation.tests:
        path_of_test(test)
    for backend in mutation.backends:
        edit = mutation.edit(backend)
        assert edit.text != edit.path.read_text()
