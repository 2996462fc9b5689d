"""Named statements are found by their names, and each name stands for one of them."""

import pytest

from batchline.store.sql import parse_queries


def test_statements_are_found_by_their_names() -> None:
    queries = parse_queries("-- name: first\nSELECT 1;\n\n-- name: second\n-- Reads a two.\nSELECT 2;\n")
    assert queries == {"first": "SELECT 1;\n\n", "second": "-- Reads a two.\nSELECT 2;\n"}


def test_a_name_that_stands_twice_is_refused() -> None:
    """The second statement would otherwise replace the first without a word."""
    with pytest.raises(ValueError, match="Two statements are named first"):
        parse_queries("-- name: first\nSELECT 1;\n-- name: first\nSELECT 2;\n")
