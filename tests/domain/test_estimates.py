"""Tokens that are estimated by size: E2."""

import pytest

from batchline.domain.estimates import request_tokens, text_tokens


@pytest.mark.parametrize(("size", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_token_stands_for_four_bytes(size: int, tokens: int) -> None:
    assert text_tokens(size) == tokens


def test_a_request_counts_whole() -> None:
    """E2: also its tools and the files inside it."""
    assert request_tokens(b'{"tools":[{"type":"function"}],"messages":[]}') == 12


def test_a_linked_image_counts_as_an_image() -> None:
    """E2: its link is short, and its tokens are many."""
    assert request_tokens(b'{"image_url":"https://e.org/a"}') > 800
