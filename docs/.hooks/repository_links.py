"""Lets links to files of the repository that are no pages stay text, since the site does not have these files."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:CHANGELOG|CONTRIBUTING|README|SECURITY)\.md(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace such a link by its text."""
    return _OUTSIDE.sub(r"\1", markdown)
