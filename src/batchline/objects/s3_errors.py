"""Explains the errors of an S3 store without quoting them.

Some stores quote a refused request in their answer, headers included, so the answer may hold secrets.
"""

import re

from obstore.exceptions import BaseError

from batchline.domain.errors import ObjectMissing, ObjectsDown

FAULTS = (BaseError, FileNotFoundError)
"""The errors that obstore raises if a store refuses a request or does not answer."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_HTTP_ERROR = re.compile(r"HTTP error: ([a-z ]+)")
_INSTANCE_METADATA = re.compile(r"://[^/]+/latest/(api/token|meta-data/iam)")
"""Obstore asks these addresses for credentials if the environment has none."""

_HINTS = {
    "401": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "403": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and what they may do",
    "404": "check the bucket's name and AWS_ENDPOINT_URL",
    "301": "check AWS_REGION",
}


def is_missing(fault: Exception) -> bool:
    """Return whether the store itself says that the object does not exist, as opposed to a 404 of a proxy."""
    return _code(fault) == "NoSuchKey"


def is_past_the_end(fault: Exception) -> bool:
    """Return whether the requested range begins after the end of the object."""
    return _status(fault) == "416"


def explained(fault: Exception, *, action: str) -> ObjectMissing | ObjectsDown:
    """Return the error to raise for a fault, with the action that failed, the cause, and what to check."""
    if is_missing(fault):
        return ObjectMissing(f"{action}: there is no such object")
    return ObjectsDown(f"{action}: {_reason(fault)}")


def _reason(fault: Exception) -> str:
    if _INSTANCE_METADATA.search(str(fault)):
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    status, code = _status(fault), _code(fault)
    if status is None:
        http_error = _HTTP_ERROR.search(str(fault))
        return f"the bucket's store did not answer ({http_error[1].strip() if http_error else type(fault).__name__})"
    answer = f"the bucket's store answered {status}" + (f" {code}" if code else "")
    return f"{answer}; {_HINTS[status]}" if status in _HINTS else answer


def _status(fault: Exception) -> str | None:
    found = _STATUS.search(str(fault))
    return found[1] if found else None


def _code(fault: Exception) -> str | None:
    found = _CODE.search(str(fault))
    return found[1] if found else None
