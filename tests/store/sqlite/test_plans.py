"""Queries of the SQLite store do not slow down with history, nor with what other batches have open."""

import re
import sqlite3
from importlib.resources import files

import pytest

from batchline.store.sql import load_queries

_DIALECT = "batchline.store.sqlite"
_GROWING = "batches|files|ledger|line_errors|segments|samples|shards|lanes"
_SCAN = re.compile(rf"SCAN ({_GROWING})\b(?: USING (?:COVERING )?INDEX (?P<index>\w+))?")
_SMALL_INDEXES = {
    "files_uploading": "uploads under way",
    "batches_validating": "creates under way",
    "batches_to_finish": "batches that wait for their end",
    "batches_with_work": "batches that ended lately",
    "shards_leased": "shards that workers hold",
}
"""Partial indexes that may be scanned: what each holds does not grow with history."""

_SUMS = {"count_queued_lines"}
"""Statements that may read all open shards, in an index alone. They run at most for a small part of the time."""

_QUERIES = load_queries(_DIALECT)


@pytest.fixture(scope="module")
def tables() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for migration in sorted((files(_DIALECT) / "migrations").iterdir(), key=lambda path: path.name):
        connection.executescript(migration.read_text())
    return connection


def plan_of(tables: sqlite3.Connection, name: str) -> list[str]:
    sql = _QUERIES[name]
    params = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    return [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {sql}", params)]


@pytest.mark.parametrize("name", _QUERIES.keys() - _SUMS)
def test_no_statement_walks_what_is_kept(tables: sqlite3.Connection, name: str) -> None:
    """With 10,000 finished batches, looking for those past their window took 6 ms of every second.

    An index without a condition on it is walked as a whole, just as a table is.
    """
    scans = [found for step in plan_of(tables, name) if (found := _SCAN.match(step))]
    assert [scan[0] for scan in scans if scan["index"] not in _SMALL_INDEXES] == []


@pytest.mark.parametrize("name", _SUMS)
def test_sums_stay_in_an_index(tables: sqlite3.Connection, name: str) -> None:
    assert all("USING COVERING INDEX" in step for step in plan_of(tables, name))


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("batches", "batches_of_project (project_id=? AND created_at>? AND created_at<?)"),
        ("batches_of_status", "batches_by_status (project_id=? AND status=? AND created_at>? AND created_at<?)"),
        ("files_newest_first", "files_of_project (project_id=? AND seq<?)"),
        ("files_oldest_first", "files_of_project (project_id=? AND seq>?)"),
        ("files_of_purpose_newest_first", "files_by_purpose (project_id=? AND purpose=? AND seq<?)"),
        ("files_of_purpose_oldest_first", "files_by_purpose (project_id=? AND purpose=? AND seq>?)"),
        ("claimable_lanes", "lanes_next (open=?)"),
        ("claimable_shards", "shards_open (project_id=? AND model=?)"),
        ("delete_idle_lanes", "lanes_idle (project_id=?)"),
    ],
)
def test_a_page_begins_where_its_index_says(tables: sqlite3.Connection, name: str, condition: str) -> None:
    """B5, C9, D8: all conditions are on the index, and it has the order of the page: nothing is read and left out."""
    plan = plan_of(tables, name)
    assert plan[0].endswith(condition)
    assert not any("TEMP B-TREE" in step for step in plan)
