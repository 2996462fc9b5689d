"""Answers: JSON, and one envelope for everything that went wrong."""

from collections.abc import Mapping

from msgspec.json import encode as encode_json
from starlette.responses import Response

from batchline.domain.errors import ApiError
from batchline.domain.wire import ErrorBody

JSON = "application/json"


def json_response(value: object, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(value), headers=headers, media_type=JSON)


def error_response(error: ApiError) -> Response:
    return Response(encode_json(ErrorBody.from_error(error)), error.status, headers=error.headers, media_type=JSON)
