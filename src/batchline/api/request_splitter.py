"""Cuts the bytes of a connection where a request may end, so that the parser never sees two requests at once.

The parser has no pause: it reads on into the next request before the one before it was answered, and each request that
waits costs a hundred times its bytes. A head and a chunked body both end with an empty line, and any other body has a
length, so the next possible end of a request is found without parsing.
"""

import re

_END = b"\r\n\r\n"
_CARRIAGE_RETURN = 13
_LINE_ENDS = re.compile(rb"[\r\n]*")
_MAX_CHUNKED_BYTES = 8 * 1024
"""The most bytes of a head or of a chunked body that the parser gets at once. Chunks may have a single byte, so this
bounds the time for which the parser runs to a millisecond or two."""


class RequestSplitter:
    """Follows one connection. The caller feeds the parser each piece before it asks for the next."""

    def __init__(self) -> None:
        self.body_bytes: int | None = None
        """The bytes that are left of a body with a known length; None in a head and in a chunked body."""
        self._tail = b""
        self.in_request = False
        """Whether the first byte of a request was seen, and not yet its last one."""

    def skip_line_ends(self, data: bytes, start: int) -> int:
        """Return where the next request begins. Line ends before a request mean nothing."""
        if self.in_request or start >= len(data) or data[start] > _CARRIAGE_RETURN:
            return start
        match = _LINE_ENDS.match(data, start)
        return match.end() if match else start

    def end_of_piece(self, data: bytes, start: int) -> int:
        """Return the end of the bytes that the parser may have now."""
        self.in_request = True
        if self.body_bytes is not None:
            return min(len(data), start + self.body_bytes)
        end = self._find_end(data, start)
        self._tail = (self._tail + data[max(start, end - 3) : end])[-3:]
        return end

    def begin_body(self, *, length: int | None) -> None:
        """Note that a head ended. ``length`` is None if the body is chunked."""
        self.body_bytes = length
        self._tail = b""

    def end_request(self) -> None:
        """Note that a request is complete."""
        self.body_bytes = None
        self._tail = b""
        self.in_request = False

    def _find_end(self, data: bytes, start: int) -> int:
        limit = min(len(data), start + _MAX_CHUNKED_BYTES)
        if self._tail:
            found = (self._tail + data[start : start + 3]).find(_END)
            if found >= 0:
                return start + found + len(_END) - len(self._tail)
        found = data.find(_END, start, limit)
        return limit if found < 0 else found + len(_END)
