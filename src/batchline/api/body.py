"""The body of a request as it comes, within bounds."""

from collections.abc import AsyncGenerator

from starlette.requests import Request

from batchline.domain.errors import ApiError


async def body_chunks(
    request: Request, *, max_bytes: int, too_large: ApiError, cut_off: ApiError
) -> AsyncGenerator[bytes]:
    """Raises ``too_large`` as soon as that is known, which may be before the first byte."""
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    seen = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise cut_off
        chunk: bytes = message.get("body", b"")
        seen += len(chunk)
        if seen > max_bytes:
            raise too_large
        yield chunk
        more = message.get("more_body", False)
