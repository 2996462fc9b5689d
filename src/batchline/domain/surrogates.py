r"""Reads JSON that contains surrogates without a partner, which the JSON parser refuses.

The grammar of RFC 8259 allows the escape ``\ud800`` alone, and models that cut a text in the middle of an emoji write
it. Some servers write the same code point as three bytes, which is not UTF-8. An answer with one of them is paid for
like any other, so it is read with placeholders in their place, and written with the escapes::

    "abc\ud83d"  ──hide──>  "abc<token>d83d"  ──restore──>  "abc\ud83d"
"""

import re
from hashlib import sha256
from typing import Self

from msgspec import Struct

_PARTS = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair, which the parser reads
    rb"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\."  # any other escape: what follows its backslash begins no escape
    rb"|(\xed[\xa0-\xbf][\x80-\xbf])",
    re.DOTALL,
)
_REPLACEMENT = "\ufffd"


class Hidden(Struct, frozen=True):
    """A text in which placeholders stand for the surrogates: ``token`` and four hexadecimal digits each."""

    text: bytes
    token: bytes

    @classmethod
    def hide(cls, text: bytes) -> Self | None:
        """Return the text without its lone surrogates, or None if it has none."""
        # No text can contain its own hash, so a placeholder is never a part of the text itself.
        token = sha256(text).hexdigest().encode()

        def placeholder(match: re.Match[bytes]) -> bytes:
            escaped, raw = match.groups()
            if escaped is not None:
                return token + escaped
            return match[0] if raw is None else token + b"%04x" % ord(raw.decode("utf-8", "surrogatepass"))

        hidden = _PARTS.sub(placeholder, text)
        return None if hidden == text else cls(hidden, token)

    def restore(self, text: bytes) -> bytes:
        """Return a text that was derived from the hidden one with the surrogates as escapes."""
        return text.replace(self.token, b"\\u")

    def restore_readable(self, text: str) -> str:
        """Return a text for people, in which each surrogate is a replacement character."""
        return re.sub(self.token.decode() + "[0-9a-fA-F]{4}", _REPLACEMENT, text)


def without_surrogates(text: bytes) -> bytes:
    """Return JSON for people, with the escape of a replacement character for each surrogate without a partner."""
    return _PARTS.sub(lambda match: match[0] if match.lastindex is None else rb"\ufffd", text)
