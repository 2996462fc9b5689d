"""The table of the contract is whole, and its mutations can be made. ``make mutations`` makes them."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from run import DOCUMENT, PACKAGE, ROOT, Entry, document, entries, mutated

RULES = {
    *(f"A{n}" for n in range(1, 15)),
    *(f"B{n}" for n in range(1, 11)),
    *(f"C{n}" for n in range(1, 15)),
    *("C9b", "D1", "D2", "D3", "D4", "D5", "D6", "D7", "D8", "E1", "E2", "E3", "F1", "F2", "F3", "F4", "F5"),
}
WEIGHTY = {"A3", "A8", "A11", "B2", "C2", "C4", "C11", "C12", "D1", "D2", "D3", "D4", "D5", "D6", "E2"}
ENTRIES = entries()
HELD = [entry for entry in ENTRIES if not entry.held_by]


def test_the_document_is_the_table() -> None:
    """Written anew by ``tests/contract/run.py --write``."""
    assert DOCUMENT.read_text() == document()


def test_every_rule_has_an_entry() -> None:
    """And those on which the promise stands have several."""
    counted = Counter(entry.rule for entry in ENTRIES)
    assert set(counted) == RULES
    assert {rule for rule in WEIGHTY if counted[rule] < 3} == set()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.rule}: {entry.mutation}")
def test_an_entry_is_a_test_and_a_mutation_or_says_why_not(entry: Entry) -> None:
    held = [entry.test, entry.file, entry.find, entry.mutation]
    assert entry.says
    assert all(held) is not bool(entry.held_by)
    assert any(held) is not bool(entry.held_by)


@pytest.mark.parametrize("entry", HELD, ids=lambda entry: f"{entry.rule}: {entry.mutation}")
def test_a_mutation_has_exactly_one_place(entry: Entry) -> None:
    source = (ROOT / PACKAGE / entry.file).read_text()
    assert mutated(source, entry) != source


@pytest.mark.parametrize("path", sorted({entry.test.partition("::")[0] for entry in HELD}))
def test_every_test_that_is_named_exists(path: str) -> None:
    named = {entry.test.partition("::")[2] for entry in HELD if entry.test.startswith(f"{path}::")}
    assert named <= _tests_in(ROOT / path)


def _tests_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
