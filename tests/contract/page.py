"""Write docs/contract.md, the list of the tests that protect each rule: ``make contract``."""

from itertools import groupby

from tests.contract.markers import ROOT, Marker, markers

PAGE = ROOT / "docs" / "contract.md"
COMMAND = "make contract"

_INTRODUCTION = f"""\
# The contract and its tests

This page lists the tests that protect each rule of the contract. A test names its rule with
`@pytest.mark.rule(number, says)`; this page is written from these markers by `{COMMAND}`.

For the rules about durability, money, isolation and running each line exactly once, `make mutations` also checks the
tests themselves: it breaks the code in a copy, in the ways that `tests/contract/mutations.toml` lists, and expects the
test to fail.
"""
_HEADER = """
| What the test holds | Test | File |
|---|---|---|
"""


def page() -> str:
    """Return the text of the page as it should be."""
    rules = groupby(markers(), key=lambda marker: marker.rule)
    return _INTRODUCTION + "".join(f"\n## {rule}\n{_HEADER}{''.join(map(_row, found))}" for rule, found in rules)


def _row(marker: Marker) -> str:
    says = marker.says.replace("|", "\\|")
    return f"| {says} | `{marker.test}` | `{marker.path}` |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
