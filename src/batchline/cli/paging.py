"""Reads a list of the server page by page."""

from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from msgspec import Raw

    from batchline.client.models import RemotePage
    from batchline.client.retry import Retrier

_MAX_PAGE_ROWS = 100
_DEFAULT_ROWS = 20

limit_option = click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    default=_DEFAULT_ROWS,
    show_default=True,
    help="Most rows to show.",
)


class ReadPage(Protocol):
    """A call that returns a page."""

    def __call__(self, *, after: str | None = None, limit: int) -> "RemotePage":
        """Return the page after an object."""


def read_pages(read_page: ReadPage, *, limit: int, retrier: "Retrier") -> "list[Raw]":
    """Return the first ``limit`` objects of a list."""
    found: list[Raw] = []
    after: str | None = None
    while len(found) < limit:
        rows = min(_MAX_PAGE_ROWS, limit - len(found))
        page = retrier.few_times(lambda after=after, rows=rows: read_page(after=after, limit=rows))  # type: ignore[misc]
        found += page.data
        after = page.last_id
        if not page.has_more or after is None:
            break
    return found
