"""Queries of the PostgreSQL store do not slow down with history, nor with what other batches have open."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from batchline.store.postgres.migrate import PACKAGE
from batchline.store.postgres.queries import load_numbered
from tests.support.postgres_server import Postgres
from tests.support.query_plans import GROWING, SMALL_INDEXES, WHOLE_READS

_QUERIES = load_numbered(PACKAGE)
_SETTINGS = (
    "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; SET enable_hashjoin = off; "
    "SET enable_mergejoin = off; SET enable_bitmapscan = off"
)


@pytest.fixture(scope="module")
def plans(postgres: Postgres) -> dict[str, list[dict[str, Any]]]:
    """The parts of the plan of each statement, planned as the store plans them."""

    url = postgres.new_database()

    async def read() -> dict[str, list[dict[str, Any]]]:
        connection = await asyncpg.connect(url)
        await connection.execute(_SETTINGS)
        found = {}
        for name, query in _QUERIES.items():
            await connection.execute(f"PREPARE {name} AS {query.sql}")
            values = f"({', '.join(['NULL'] * len(query.names))})" if query.names else ""
            (text,) = await connection.fetchrow(f"EXPLAIN (FORMAT JSON) EXECUTE {name}{values}")
            found[name] = list(_parts(json.loads(text)[0]["Plan"]))
        await connection.close()
        return found

    return asyncio.run(read())


def _parts(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _parts(part)


def _walks(part: dict[str, Any]) -> bool:
    """Return whether a part of a plan reads a whole table or index that grows."""
    reads = part["Node Type"] in {"Seq Scan", "Index Scan", "Index Only Scan"}
    return (
        reads
        and part["Relation Name"] in GROWING
        and "Index Cond" not in part
        and part.get("Index Name") not in SMALL_INDEXES
    )


@pytest.mark.parametrize("name", _QUERIES.keys() - WHOLE_READS)
def test_no_statement_walks_what_is_kept(plans: dict[str, list[dict[str, Any]]], name: str) -> None:
    """An index without a condition on it is walked as a whole, just as a table is."""
    assert [part for part in plans[name] if _walks(part)] == []


@pytest.mark.parametrize(
    ("name", "index", "conditions"),
    [
        ("batches", "batches_of_project", ["project_id", "created_at", "seq"]),
        ("batches_of_status", "batches_by_status", ["project_id", "status", "created_at", "seq"]),
        ("files_newest_first", "files_of_project", ["project_id", "seq"]),
        ("files_oldest_first", "files_of_project", ["project_id", "seq"]),
        ("files_of_purpose_newest_first", "files_by_purpose", ["project_id", "purpose", "seq"]),
        ("files_of_purpose_oldest_first", "files_by_purpose", ["project_id", "purpose", "seq"]),
        ("claimable_lanes", "lanes_next", ["virtual_time"]),
        ("claimable_shards", "shards_open", ["project_id", "hashtextextended(model", "expires_at"]),
        ("delete_idle_lanes", "lanes_idle", ["project_id"]),
    ],
)
def test_a_page_begins_where_its_index_says(
    plans: dict[str, list[dict[str, Any]]], name: str, index: str, conditions: list[str]
) -> None:
    """B5, C9, D8: all conditions are on the index, and it has the order of the page: nothing is read and left out."""
    (part,) = [part for part in plans[name] if part.get("Index Name") == index]
    assert all(condition in part["Index Cond"] for condition in conditions)
    assert not any(part["Node Type"] == "Sort" for part in plans[name])
