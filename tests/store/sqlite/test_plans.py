"""Queries of the SQLite store do not slow down with finished batches: none scans a table that keeps them."""

import re
import sqlite3
from importlib.resources import files

import pytest

from batchline.store.sql import load_queries

_DIALECT = "batchline.store.sqlite"
_GROWING = re.compile(r"SCAN (batches|files|ledger|line_errors|segments|samples)(?! USING (COVERING )?INDEX)")
_QUERIES = load_queries(_DIALECT)


@pytest.fixture(scope="module")
def tables() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    for migration in sorted((files(_DIALECT) / "migrations").iterdir(), key=lambda path: path.name):
        connection.executescript(migration.read_text())
    return connection


@pytest.mark.parametrize("name", _QUERIES)
def test_no_statement_walks_what_is_kept(tables: sqlite3.Connection, name: str) -> None:
    """With 10,000 finished batches, looking for those past their window took 6 ms of every second."""
    sql = _QUERIES[name]
    params = dict.fromkeys(re.findall(r":(\w+)", sql), "[]")
    plan = [row[3] for row in tables.execute(f"EXPLAIN QUERY PLAN {sql}", params)]
    assert [step for step in plan if _GROWING.match(step)] == []
