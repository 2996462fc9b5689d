"""Estimates tokens by size: those of a request, and those of an answer whose upstream reports no usage."""

_BYTES_PER_TOKEN = 4
"""The usual length of a token in English text. In JSON, other languages and encoded files tokens are shorter or longer,
and an estimate need not be exact."""

_LINK_TOKENS = 800
"""Tokens of a linked image, whose size the request does not show: an image of 1024 pixels takes 765 to 1,445. A chat
names each image twice."""
_LINK_MARK = b'image_url"'


def request_tokens(body: bytes) -> int:
    """Estimate the input tokens of a request from all of its body: texts, tools, files and images."""
    return text_tokens(len(body)) + _LINK_TOKENS * body.count(_LINK_MARK)


def text_tokens(size: int) -> int:
    """Estimate the tokens of so many bytes of text."""
    return -(-size // _BYTES_PER_TOKEN)
