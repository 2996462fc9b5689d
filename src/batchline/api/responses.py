"""Makes answers with a JSON body, for values and for errors."""

from collections.abc import Mapping

from msgspec.json import encode as encode_json
from starlette.responses import Response

from batchline.domain.errors import ApiError
from batchline.domain.wire import ErrorBody

JSON = "application/json"


def json_response(value: object, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as JSON with status 200."""
    return Response(encode_json(value), headers=headers, media_type=JSON)


def error_response(error: ApiError) -> Response:
    """Return an error in its envelope, with its status and headers."""
    return Response(encode_json(ErrorBody.from_error(error)), error.status, headers=error.headers, media_type=JSON)
