"""What an S3 store's refusals mean, in words that hold no secret: a refused request is quoted back by some stores,
headers and all."""

import re

from obstore.exceptions import BaseError

from batchline.domain.errors import ObjectMissing, ObjectsDown

FAULTS = (BaseError, FileNotFoundError)
"""What obstore raises when a store refuses or does not answer."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_TROUBLE = re.compile(r"HTTP error: ([a-z ]+)")
_INSTANCE_METADATA = re.compile(r"://[^/]+/latest/(api/token|meta-data/iam)")
"""Asked for credentials where the environment has none."""

_HINTS = {
    "401": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "403": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and what they may do",
    "404": "check the bucket's name and AWS_ENDPOINT_URL",
    "301": "check AWS_REGION",
}


def is_missing(fault: Exception) -> bool:
    """Whether the store says that this object is not there, as opposed to a 404 from whoever else answers."""
    return _code(fault) == "NoSuchKey"


def is_past_the_end(fault: Exception) -> bool:
    return _status(fault) == "416"


def explained(fault: Exception, *, activity: str) -> ObjectMissing | ObjectsDown:
    if is_missing(fault):
        return ObjectMissing(f"{activity}: there is no such object")
    return ObjectsDown(f"{activity}: {_reason(fault)}")


def _reason(fault: Exception) -> str:
    if _INSTANCE_METADATA.search(str(fault)):
        return "there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    status, code = _status(fault), _code(fault)
    if status is None:
        trouble = _TROUBLE.search(str(fault))
        return f"the bucket's store did not answer ({trouble[1].strip() if trouble else type(fault).__name__})"
    answer = f"the bucket's store answered {status}" + (f" {code}" if code else "")
    return f"{answer}; {_HINTS[status]}" if status in _HINTS else answer


def _status(fault: Exception) -> str | None:
    found = _STATUS.search(str(fault))
    return found[1] if found else None


def _code(fault: Exception) -> str | None:
    found = _CODE.search(str(fault))
    return found[1] if found else None
