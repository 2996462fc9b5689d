"""Every error that a client can be answered with: status, type, code and text in one place.

::

    ApiError
    ├── InvalidRequest          400  invalid_request_error
    │   ├── InvalidInput        400  … an input file, with the line
    │   └── InvalidMultipart    400  … the body of an upload
    ├── MissingCredentials      401  authentication_error
    ├── InvalidCredentials      403  authentication_error
    ├── MissingScope            403  authentication_error
    ├── ForgedRequest           403  authentication_error       only in the console
    ├── NotFound                404  invalid_request_error
    │   ├── FileNotFound        404  … file_not_found
    │   └── BatchNotFound       404  … batch_not_found
    ├── MethodNotAllowed        405  invalid_request_error
    ├── RequestTimeout          408  invalid_request_error
    ├── Conflict                409  invalid_request_error      never retried by the SDKs
    ├── OtherProject            409  invalid_request_error      only in the console
    ├── ResultsUnavailable      410  invalid_request_error
    ├── TooLarge                413  invalid_request_error
    │   └── StorageFull         413  … storage_quota_exceeded   never retried by the SDKs
    ├── UrlTooLong              414  invalid_request_error
    ├── RangeNotSatisfiable     416  invalid_request_error
    ├── RateLimited             429  rate_limit_exceeded        with Retry-After
    ├── InsufficientQuota       429  insufficient_quota         never retried by the SDKs
    ├── HeadersTooLarge         431  invalid_request_error
    ├── Refused                 4xx  as the upstream answered a synchronous call
    └── InternalError           500  internal_error
        ├── StorageFailed       500  … storage_error
        ├── FileDamaged         500  … storage_error            never retried by the SDKs
        ├── BadGateway          502  … upstream_error
        ├── Unavailable         503  … service_unavailable      with Retry-After
        │   └── TooManyConnections  503  … a connection over the limit
        └── GatewayTimeout      504  … upstream_timeout

Errors between the parts of the service, never shown to a client:

::

    LeaseLost       another process now holds what this process held
    StoreDown       the database did not accept or answer a statement
    ObjectsDown     the object store did not accept or answer a call
    ObjectMissing   an object that should exist does not
    Damaged         stored bytes are not those that were written
    WrongIdentity   the database and the objects do not belong together
    StreamBroken    an upstream's answer ended before it was complete
"""

import math
from collections.abc import Mapping
from typing import Literal

from batchline.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES

_MAX_RETRY_AFTER_SECONDS = 60
_UNAVAILABLE_RETRY_AFTER_SECONDS = 2

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_exceeded", "insufficient_quota", "internal_error"
]


class ApiError(Exception):
    """An error with the status, headers and fields of its answer; ``ErrorBody`` in ``domain.wire`` is its envelope."""

    status = 500
    type: ErrorType = "internal_error"
    code: str | None = None
    line: int | None = None
    """The first invalid line of an input file."""
    bound: str | None = None
    """The bound that refused the request, as the metric of refusals names it."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else type(self).code
        self.param = param
        self.headers = dict(headers or {})


class InvalidRequest(ApiError):
    status = 400
    type: ErrorType = "invalid_request_error"
    code = "invalid_request_error"


class InvalidInput(InvalidRequest):
    """The input file of a batch is invalid; ``line`` is the first invalid line, or None if no line is at fault."""

    def __init__(self, message: str, *, line: int | None) -> None:
        super().__init__(message)
        self.line = line


class InvalidMultipart(InvalidRequest):
    code = "invalid_multipart"


class MissingCredentials(ApiError):
    status = 401
    type: ErrorType = "authentication_error"

    def __init__(self) -> None:
        super().__init__("Missing authentication headers")


class InvalidCredentials(ApiError):
    status = 403
    type: ErrorType = "authentication_error"

    def __init__(self) -> None:
        super().__init__("Invalid credentials")


class ForgedRequest(ApiError):
    """A form was not sent by a page of the console, or its session has ended meanwhile."""

    status = 403
    type: ErrorType = "authentication_error"

    def __init__(self) -> None:
        super().__init__("This form was not made for your session. Go back, reload the page, and try again.")


class MissingScope(ApiError):
    status = 403
    type: ErrorType = "authentication_error"

    def __init__(self, scope: str) -> None:
        super().__init__(f"The key may not be used for this: it lacks the scope {scope}")


class NotFound(ApiError):
    status = 404
    type: ErrorType = "invalid_request_error"
    code = "not_found"


class FileNotFound(NotFound):
    code = "file_not_found"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"File {file_id} not found")


class BatchNotFound(NotFound):
    code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"Batch not found: {batch_id}")


class MethodNotAllowed(ApiError):
    status = 405
    type: ErrorType = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(ApiError):
    status = 408
    type: ErrorType = "invalid_request_error"
    code = "request_timeout"


class Conflict(ApiError):
    status = 409
    type: ErrorType = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param, headers={"x-should-retry": "false"})


class OtherProject(ApiError):
    """A form of the console is about a project that is not open any more."""

    status = 409
    type: ErrorType = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__(
            "Nothing was changed: this form belongs to a project that is not open any more, because another one was "
            "opened meanwhile. Open its project again, reload the page and send the form again."
        )


class ResultsUnavailable(ApiError):
    status = 410
    type: ErrorType = "invalid_request_error"
    code = "results_unavailable"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"A file with results of batch {batch_id} was deleted or has expired")


class TooLarge(ApiError):
    status = 413
    type: ErrorType = "invalid_request_error"
    code = "request_too_large"


class StorageFull(TooLarge):
    code = "storage_quota_exceeded"

    def __init__(self, limit: int, *, scope: str) -> None:
        """``scope`` is what the limit is for: project or organization."""
        self.bound = f"{scope}_storage"
        super().__init__(
            f"The files of this {scope} would exceed {limit} bytes. Delete files that are no longer needed.",
            headers={"x-should-retry": "false"},
        )


class UrlTooLong(ApiError):
    status = 414
    type: ErrorType = "invalid_request_error"
    code = "url_too_long"

    def __init__(self) -> None:
        super().__init__(f"The request's URL exceeds {MAX_URL_BYTES} bytes")


class RangeNotSatisfiable(ApiError):
    status = 416
    type: ErrorType = "invalid_request_error"
    code = "range_not_satisfiable"


class RateLimited(ApiError):
    status = 429
    type: ErrorType = "rate_limit_exceeded"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int, bound: str | None = None) -> None:
        super().__init__(message, headers={"retry-after": str(min(retry_after, _MAX_RETRY_AFTER_SECONDS))})
        self.bound = bound


class InsufficientQuota(ApiError):
    status = 429
    type: ErrorType = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, message: str = "The organization has no balance and no free credits left") -> None:
        super().__init__(message, headers={"x-should-retry": "false"})


class HeadersTooLarge(ApiError):
    status = 431
    type: ErrorType = "invalid_request_error"
    code = "headers_too_large"

    def __init__(self) -> None:
        super().__init__(f"The request's headers exceed {MAX_HEADER_BYTES} bytes, or are more than {MAX_HEADERS}")


class Refused(ApiError):
    """A synchronous call was refused, by the upstream or before it was called, as its line in a batch would be."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status
        self.type = _REFUSED_TYPES.get(code, "invalid_request_error")
        if code == "rate_limit_exceeded":
            self.headers["retry-after"] = str(max(1, math.ceil(min(retry_after or 1, _MAX_RETRY_AFTER_SECONDS))))
        elif status in {408, 409, 429} or code == "insufficient_quota":
            self.headers["x-should-retry"] = "false"


_REFUSED_TYPES: dict[str, ErrorType] = {
    "authentication_error": "authentication_error",
    "insufficient_quota": "insufficient_quota",
    "rate_limit_exceeded": "rate_limit_exceeded",
}


class InternalError(ApiError):
    status = 500
    type: ErrorType = "internal_error"

    def __init__(
        self,
        message: str = "Internal server error",
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, code=code, headers=headers)


class StorageFailed(InternalError):
    code = "storage_error"

    def __init__(self) -> None:
        super().__init__("The file could not be stored; nothing of it was kept. Try again.")


class FileDamaged(InternalError):
    code = "storage_error"

    def __init__(self, file_id: str) -> None:
        super().__init__(
            f"File {file_id} is damaged in storage. The operator finds the object in the log.",
            headers={"x-should-retry": "false"},
        )


class BadGateway(InternalError):
    status = 502
    code = "upstream_error"


class Unavailable(InternalError):
    status = 503
    code = "service_unavailable"

    def __init__(self, message: str = "The service cannot reach its storage right now. Try again.") -> None:
        super().__init__(message, headers={"retry-after": str(_UNAVAILABLE_RETRY_AFTER_SECONDS)})


class TooManyConnections(Unavailable):
    def __init__(self) -> None:
        super().__init__("The service has too many open connections. Try again.")


class GatewayTimeout(InternalError):
    status = 504
    code = "upstream_timeout"


class LeaseLost(Exception):
    """Another process now holds what this process held."""


class StoreDown(Exception):
    """The database did not accept or answer a statement."""


class ObjectsDown(Exception):
    """The object store did not accept or answer a call."""


class ObjectMissing(Exception):
    """An object that should exist does not."""


class WrongIdentity(Exception):
    """The database and the objects do not belong together. The text names both and says what to do."""


class Damaged(Exception):
    """Stored bytes are not those that were written. The text names the place, never the content."""


class StreamBroken(Exception):
    """An upstream's answer ended before it was complete."""
