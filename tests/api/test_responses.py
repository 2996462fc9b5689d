"""Answers with a JSON body."""

import json

from batchline.api.responses import error_response, json_response
from batchline.domain.errors import InvalidInput, RateLimited


def test_a_value_is_answered_as_json() -> None:
    response = json_response({"a": [1, None]}, headers={"x-a": "b"})
    assert (response.status_code, response.body) == (200, b'{"a":[1,null]}')
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-a"] == "b"


def test_an_error_has_its_status_its_headers_and_the_envelope() -> None:
    response = error_response(RateLimited("Slow down", retry_after=7))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert json.loads(bytes(response.body))["error"] == {
        "message": "Slow down",
        "type": "rate_limit_exceeded",
        "code": "rate_limit_exceeded",
        "param": None,
    }


def test_an_invalid_input_file_names_its_line() -> None:
    assert json.loads(bytes(error_response(InvalidInput("m", line=2)).body))["error"]["line"] == 2
