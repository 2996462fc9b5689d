"""Classifies the reply to an attempt: the line succeeded, failed for good, or can be retried.

::

    upstream                                   outcome
    2xx with JSON                              Success
    2xx with an error in place of a result     as the status that the error names, else Retryable
    3xx, 408, 409, 5xx, 2xx without JSON or    Retryable  ──after the last attempt──>  internal_error
      with an invalid classification,
      refused, broken, timeout, garbled
    2xx, compressed in an unknown way          Retryable (final)  ──at once──>  internal_error
    429                                        Retryable (throttled)  ──after the last──>  rate_limit_exceeded
    402, 420, 429 that says quota              Failure  insufficient_quota
    401, 403                                   Failure  authentication_error
    404                                        Failure  not_found_error
    413                                        Failure  request_too_large
    400, 422 and other 4xx                     Failure  invalid_request_error, context_length_exceeded

These outcomes are marked ``unavailable``, because an upstream that is down or misconfigured gives them to every line:
401, 403, 429 that does not say quota, 500 to 504, 529, refused, broken and timeout.
"""

from typing import Annotated, Any, Self

import msgspec
from msgspec import Raw, Struct

from batchline.domain.endpoints import CHAT
from batchline.domain.models import ModelKind
from batchline.domain.nesting import is_nested_too_deeply
from batchline.domain.rate_limits import RateLimits
from batchline.domain.records import escape_line_breaks, json_text
from batchline.domain.replies import Answer, FaultKind, Reply
from batchline.domain.surrogates import Hidden
from batchline.domain.upstream_errors import read_error, says_context_overflow, says_quota, status_in, text_of
from batchline.domain.usage import NOTHING, Usage, usage_in

_CODES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    420: "insufficient_quota",
}
_READ_FAULTS = frozenset({FaultKind.GARBLED, FaultKind.UNREADABLE})
"""Faults of an upstream that did answer."""
_UNAVAILABLE_STATUSES = frozenset({429, 500, 501, 502, 503, 504, 529})
_RESULT_FIELDS = {CHAT: "choices", "/v1/completions": "choices", "/v1/embeddings": "data"}
"""The field that holds the result of an endpoint."""
_ERROR_FIELDS = frozenset(
    {"error", "code", "message", "type", "param", "detail", "details", "status", "status_code", "success", "object"}
    | {"id", "created", "model", "provider", "request_id", "user_id", "timestamp", "path", "usage"}
)
"""Fields that are no result. At an endpoint that is not in ``_RESULT_FIELDS`` every other field is one."""
_EMPTY_VALUES = frozenset({b"null", b"false", b"0", b'""', b"[]", b"{}"})
_NOT_JSON = ("not_json", "a body that is not JSON")
_NULL = Raw(b"null")
_LINE_FEED, _CARRIAGE_RETURN = b"\n\r"
"""As numbers: so a byte is found in a tenth of the time."""
_CLASSIFICATION = ModelKind.CLASSIFICATION
"""To look up a member of an enumeration for each line would take longer than the rest of the comparison."""
_top_level = msgspec.json.Decoder(dict[str, Raw])
_anything = msgspec.json.Decoder()
_nonempty = msgspec.json.Decoder(Annotated[list[dict[str, Raw]], msgspec.Meta(min_length=1)])
_text = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


class Success(Struct, frozen=True):
    """The line succeeded; ``body`` is one line of JSON."""

    status: int
    request_id: str | None
    body: bytes
    usage: Usage = NOTHING
    rate_limits: RateLimits | None = None


class Failure(Struct, frozen=True):
    """The line failed for good; ``legacy`` is the code in the prefix of the message.

    ``unavailable`` says that a misconfigured upstream refuses every line like this. While it refuses all of them, the
    line may be held for another attempt, and ``legacy`` is the kind of the fault.
    """

    code: str
    legacy: str
    message: str
    param: str | None = None
    unavailable: bool = False

    @property
    def status(self) -> int:
        """The HTTP status that a synchronous caller gets, unless the upstream sent a status of a refusal itself."""
        return int(self.legacy.removeprefix("http_"))


class Retryable(Struct, frozen=True):
    """The line is worth another attempt. ``unavailable`` says that an upstream that is down behaves like this."""

    kind: str
    """A label for metrics: the kind of fault, never its text."""
    reason: str
    throttled: bool = False
    unavailable: bool = False
    final: bool = False
    """Whether another attempt would cost as much and end in the same way, so that none is made."""
    retry_after: float | None = None
    rate_limits: RateLimits | None = None
    param: str | None = None
    """The parameter that the upstream names."""
    failure: Failure | None = None
    """The failure of the line after its last attempt; None for an internal error."""

    @classmethod
    def from_failure(cls, failure: Failure) -> Self:
        """Return a failure that may be the upstream's and not the line's as a fault that is worth another attempt."""
        return cls(failure.legacy, failure.message, unavailable=failure.unavailable, failure=failure)

    def as_failure(self, attempts: int) -> Failure:
        """Return how the line fails after its last attempt."""
        if self.failure is not None:
            return self.failure
        if self.throttled:
            return Failure("rate_limit_exceeded", "http_429", self.reason, self.param)
        message = f"Line failed after {attempts} attempts: {self.reason}"
        return Failure("internal_error", "retries_exhausted", message, self.param)


Outcome = Success | Failure | Retryable

KEY_UNAVAILABLE = Failure(
    "authentication_error", "api_key_unavailable", "The API key that submitted this batch was revoked"
)
OUT_OF_QUOTA = Failure(
    "insufficient_quota", "http_420", "The organization has no balance and no free credits left for this line"
)
COST_LIMIT_REACHED = Failure(
    "insufficient_quota",
    "max_cost",
    "What the batch was charged and what its lines in flight may cost has reached its max_cost",
)
DAY_BUDGET_SPENT = Failure(
    "insufficient_quota", "http_420", "The project has nothing left of its budget for today, which ends at 00:00 UTC"
)
TOO_LONG = Failure(
    "context_length_exceeded", "http_400", "The input is longer than the model's limit of tokens", "messages"
)
DELIVERED_TOO_OFTEN = Failure(
    "internal_error", "dlq_exhausted", "The line was delivered three times and no worker lived to answer it"
)
LOST = Failure(
    "internal_error", "storage_damaged", "The line or its answer was damaged in storage and could not be recovered"
)
ENDED_BY_OPERATOR = Failure(
    "internal_error", "batch_failed", "The operator ended the batch before this line had a result"
)
BATCH_CANCELLED = Failure(
    "batch_cancelled", "batch_cancelled", "The batch was cancelled before this line was dispatched"
)
BATCH_EXPIRED = Failure("batch_expired", "batch_expired", "The batch expired before this line was dispatched")


def classify_reply(reply: Reply, *, endpoint: str, kind: ModelKind = ModelKind.CHAT) -> Outcome:
    """Return what the reply to an attempt means for its line."""
    # The usual kinds come first: to find that a value is of another class takes several times as long.
    if not isinstance(reply, Answer):
        unavailable = reply.kind not in _READ_FAULTS
        return Retryable(reply.kind, reply.detail, unavailable=unavailable, final=reply.kind is FaultKind.UNREADABLE)
    if not 200 <= reply.status < 300:
        return _classify_refusal(reply)
    outcome = _classify_success(reply, endpoint, kind)
    if isinstance(outcome, Success):
        return outcome
    if isinstance(outcome, Retryable) and outcome.kind == _NOT_JSON[0] and (hidden := Hidden.hide(reply.body)):
        answer = msgspec.structs.replace(reply, body=hidden.text)
        return _restore(hidden, _classify_success(answer, endpoint, kind))
    return outcome


def _classify_success(answer: Answer, endpoint: str, kind: ModelKind) -> Outcome:
    result = read_result(answer.body, endpoint=endpoint)
    if result is None:
        return _classify_without_result(answer)
    body, usage = result
    success = Success(answer.status, answer.request_id, body, usage, answer.rate_limits)
    if kind is _CLASSIFICATION and endpoint == CHAT:
        return _classify_document(success)
    return success


def _restore(hidden: Hidden, outcome: Outcome) -> Outcome:
    """Return an outcome with the surrogates that were hidden from the parser."""
    if isinstance(outcome, Success):
        return msgspec.structs.replace(outcome, body=hidden.restore(outcome.body))
    if isinstance(outcome, Failure):
        return msgspec.structs.replace(outcome, message=hidden.restore_readable(outcome.message))
    return msgspec.structs.replace(outcome, reason=hidden.restore_readable(outcome.reason))


def read_result(answer: bytes, *, endpoint: str) -> tuple[bytes, Usage] | None:
    """Return the answer as one line of JSON, values unchanged, and the usage it reports.

    None if it is not JSON or nested too deeply, or has an error in place of a result.
    """
    try:
        if not answer.isascii():
            answer.decode()
        document = _top_level.decode(answer) if answer.lstrip().startswith(b"{") else _anything.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if is_nested_too_deeply(answer):
        return None
    usage = NOTHING
    if isinstance(document, dict):
        if "error" in document and _has_only_error(document, endpoint):
            return None
        if "usage" in document:
            usage = usage_in(document["usage"])
        if endpoint == CHAT:
            document["system_fingerprint"] = _NULL
            answer = _encode(document)
    if _LINE_FEED in answer or _CARRIAGE_RETURN in answer:
        # In valid JSON a raw line end can only stand between tokens: strings must escape it.
        answer = answer.replace(b"\n", b" ").replace(b"\r", b" ")
    return escape_line_breaks(answer.strip()), usage


def _has_only_error(document: dict[str, Raw], endpoint: str) -> bool:
    if bytes(document["error"]) in _EMPTY_VALUES:
        return False
    if field := _RESULT_FIELDS.get(endpoint):
        return bytes(document.get(field, _NULL)) in _EMPTY_VALUES
    return document.keys() <= _ERROR_FIELDS


def _classify_without_result(answer: Answer) -> Outcome:
    """Classify a 2xx that is no result: it is not JSON, or it is the error of a gateway that sends errors as 200."""
    error = read_error(answer.body)
    status = status_in(error)
    if status is not None:
        return _classify_refusal(msgspec.structs.replace(answer, status=status))
    kind, what = ("error_in_200", f"an error: {text_of(answer.body, error)}") if error else _NOT_JSON
    reason = f"upstream returned {answer.status} with {what}"
    return Retryable(kind, reason, retry_after=answer.retry_after, rate_limits=answer.rate_limits)


def _classify_document(success: Success) -> Outcome:
    try:
        classified = _with_document_as_text(success.body)
    except (msgspec.DecodeError, RecursionError, KeyError):
        reason = f"upstream returned {success.status} with a classification that is not JSON"
        return Retryable("not_json", reason, rate_limits=success.rate_limits)
    return msgspec.structs.replace(success, body=escape_line_breaks(classified))


def _with_document_as_text(body: bytes) -> bytes:
    """Return the answer with ``choices[0].message.content`` as a JSON document in a string.

    Raise DecodeError or KeyError if it is not a JSON document.
    """
    answer: dict[str, Any] = dict(_top_level.decode(body))
    choices: list[Any] = list(_nonempty.decode(answer["choices"]))
    message: dict[str, Any] = dict(_top_level.decode(choices[0]["message"]))
    content = bytes(message["content"])
    if content == b"null":
        raise KeyError("content")
    text = _text.decode(content) if content.startswith(b'"') else content.decode()
    _anything.decode(text)
    choices[0] = choices[0] | {"message": message | {"content": text}}
    return _encode(answer | {"choices": choices})


def output_line(line_id: str, custom_id: bytes, success: Success) -> bytes:
    """Return the line of an output file."""
    request_id = b"null" if success.request_id is None else json_text(success.request_id)
    return b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        line_id.encode(),
        custom_id,
        success.status,
        request_id,
        success.body,
    )


def error_line(line_id: str, custom_id: bytes, failure: Failure) -> bytes:
    """Return the line of an error file."""
    return b'{"id":"%b","custom_id":%b,"response":null,"error":{"code":"%b","message":%b,"param":%b}}\n' % (
        line_id.encode(),
        custom_id,
        failure.code.encode(),
        json_text(f"[legacy:{failure.legacy}] {failure.message}"),
        b"null" if failure.param is None else json_text(failure.param),
    )


def _classify_refusal(answer: Answer) -> Outcome:
    status, error = answer.status, read_error(answer.body)
    text, param = text_of(answer.body, error), _param_in(error)
    if status == 429 and not says_quota(answer.body, error):
        return _retryable(answer, text or "upstream returned 429", param=param, throttled=True)
    if status >= 500:
        # The text of a server's own fault may show its internals. It is about the operator's server, not the line.
        return _retryable(answer, f"upstream returned {status}")
    if status in (408, 409) or status < 400:
        return _retryable(answer, f"upstream returned {status}" + (f": {text}" if text else ""), param=param)
    code = "insufficient_quota" if status == 429 else _CODES.get(status, "invalid_request_error")
    if code == "invalid_request_error" and says_context_overflow(text, error):
        code = "context_length_exceeded"
    if code == "authentication_error":
        # The upstream refused the service's credentials, not the client's, so its text is not shown to the client.
        message = f"upstream returned {status}: it does not accept this service"
        return Failure(code, f"http_{status}", message, unavailable=True)
    legacy = f"http_{420 if status == 402 else status}"
    return Failure(code, legacy, text or f"upstream returned {status}", param)


def _param_in(error: dict[str, Any]) -> str | None:
    """Return the parameter that an error of the upstream names."""
    param = error.get("param")
    return param if isinstance(param, str) else None


def _retryable(answer: Answer, reason: str, *, param: str | None = None, throttled: bool = False) -> Retryable:
    return Retryable(
        f"http_{answer.status}",
        reason,
        throttled=throttled,
        unavailable=answer.status in _UNAVAILABLE_STATUSES,
        retry_after=answer.retry_after,
        rate_limits=answer.rate_limits,
        param=param,
    )
