"""The states: C11. That nothing leaves a terminal one is held against every store."""

import re
from enum import StrEnum

import pytest

from batchline.domain import states
from batchline.domain.states import TERMINAL, BatchStatus, FileState, ShardState, Stop


def drawing(title: str) -> str:
    """The drawing below a title of the module's docstring."""
    return (states.__doc__ or "").split(f"{title}::\n\n", 1)[1].split("\n\n\n", 1)[0].split("\n\nA ", 1)[0]


@pytest.mark.parametrize(("title", "kind"), [("A batch", BatchStatus), ("A file", FileState), ("A shard", ShardState)])
def test_every_state_is_drawn(title: str, kind: type[StrEnum]) -> None:
    assert {word for word in re.findall(r"[a-z_]+", drawing(title)) if word in set(kind)} == set(kind)


def test_the_states_of_a_batch_are_the_contracts() -> None:
    """C11: the words on the wire."""
    assert set(BatchStatus) == {
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    }


def test_no_arrow_leaves_a_terminal_state() -> None:
    """C11: in the drawing, what an arrow starts from is never terminal; the main line ends completed."""
    assert {"completed", "failed", "expired", "cancelled"} == TERMINAL
    starts = re.findall(r"([a-z_]+) *(?:──|<)", drawing("A batch"))
    assert set(starts) - {"cancelling"} == {"validating", "in_progress", "finalizing"}
    assert TERMINAL.isdisjoint(starts)


def test_a_batch_is_stopped_by_its_owner_by_time_or_by_an_operator() -> None:
    """C10, C13, F3."""
    assert set(Stop) == {"cancelled", "expired", "failed"}
