"""Classifies the reply to an attempt: the line succeeded, failed for good, or can be retried.

::

    upstream                                   outcome
    2xx with JSON                              Success
    3xx, 408, 409, 5xx, 2xx without JSON or    Retryable  ──after the last attempt──>  internal_error
      with an invalid classification,
      refused, broken, timeout, garbled
    429                                        Retryable (throttled)  ──after the last──>  rate_limit_exceeded
    420, 429 that says quota                   Failure  insufficient_quota
    401, 403                                   Failure  authentication_error
    404                                        Failure  not_found_error
    413                                        Failure  request_too_large
    400, 422 and other 4xx                     Failure  invalid_request_error, context_length_exceeded
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Raw, Struct

from batchline.domain.endpoints import CHAT
from batchline.domain.models import ModelKind
from batchline.domain.records import escape_line_breaks, json_text
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.domain.usage import NOTHING, Usage, usage_in

_CODES = {
    401: "authentication_error",
    403: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    420: "insufficient_quota",
}
_UNAVAILABLE_STATUSES = frozenset({429, 502, 503, 504})
_CONTEXT_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|model's) context length|maximum model length", re.IGNORECASE
)
_MAX_TEXT_CHARACTERS = 500
_NULL = Raw(b"null")
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


class Failure(Struct, frozen=True):
    """The line failed for good; ``legacy`` is the code in the prefix of the message."""

    code: str
    legacy: str
    message: str
    param: str | None = None

    @property
    def status(self) -> int:
        """The HTTP status that a synchronous caller gets."""
        return int(self.legacy.removeprefix("http_"))


class Retryable(Struct, frozen=True):
    """The line is worth another attempt. ``unavailable`` says that an upstream that is down behaves like this."""

    kind: str
    """A label for metrics: the kind of fault, never its text."""
    reason: str
    throttled: bool = False
    unavailable: bool = False
    retry_after: float | None = None

    def as_failure(self, attempts: int) -> Failure:
        """Return how the line fails after its last attempt."""
        if self.throttled:
            return Failure("rate_limit_exceeded", "http_429", self.reason)
        return Failure("internal_error", "retries_exhausted", f"Line failed after {attempts} attempts: {self.reason}")


Outcome = Success | Failure | Retryable

KEY_UNAVAILABLE = Failure(
    "authentication_error", "api_key_unavailable", "The API key that submitted this batch was revoked"
)
OUT_OF_QUOTA = Failure(
    "insufficient_quota", "http_420", "The organization has no balance and no free credits left for this line"
)
TOO_LONG = Failure(
    "context_length_exceeded", "http_400", "The input is longer than the model's limit of tokens", "messages"
)
DELIVERED_TOO_OFTEN = Failure(
    "internal_error", "dlq_exhausted", "The line was delivered three times and no worker lived to answer it"
)
BATCH_CANCELLED = Failure(
    "batch_cancelled", "batch_cancelled", "The batch was cancelled before this line was dispatched"
)
BATCH_EXPIRED = Failure("batch_expired", "batch_expired", "The batch expired before this line was dispatched")


def classify_reply(reply: Reply, *, endpoint: str, kind: ModelKind = ModelKind.CHAT) -> Outcome:
    """Return what the reply to an attempt means for its line."""
    if isinstance(reply, Fault):
        return Retryable(reply.kind, reply.detail, unavailable=reply.kind is not FaultKind.GARBLED)
    if 200 <= reply.status < 300:
        result = read_result(reply.body, endpoint=endpoint)
        if result is None:
            return Retryable("not_json", f"upstream returned {reply.status} with a body that is not JSON")
        success = Success(reply.status, reply.request_id, *result)
        if kind is ModelKind.CLASSIFICATION and endpoint == CHAT:
            return _classify_document(success)
        return success
    return _classify_refusal(reply)


def read_result(answer: bytes, *, endpoint: str) -> tuple[bytes, Usage] | None:
    """Return the answer as one line of JSON, values unchanged, and the usage it reports; None if it is not JSON."""
    try:
        if not answer.isascii():
            answer.decode()
        document = _top_level.decode(answer) if answer.lstrip().startswith(b"{") else _anything.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage = NOTHING
    if isinstance(document, dict):
        if "usage" in document:
            usage = usage_in(document["usage"])
        if endpoint == CHAT:
            document["system_fingerprint"] = _NULL
            answer = _encode(document)
    if b"\n" in answer or b"\r" in answer:
        # In valid JSON a raw line end can only stand between tokens: strings must escape it.
        answer = answer.replace(b"\n", b" ").replace(b"\r", b" ")
    return escape_line_breaks(answer.strip()), usage


def _classify_document(success: Success) -> Outcome:
    try:
        classified = _with_document_as_text(success.body)
    except (msgspec.DecodeError, RecursionError, KeyError):
        return Retryable("not_json", f"upstream returned {success.status} with a classification that is not JSON")
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
    status, error = answer.status, _error_of(answer.body)
    text = _text_of(answer.body, error)
    if status == 429 and "insufficient_quota" not in (error.get("code"), error.get("type")):
        reason = text or "upstream returned 429"
        return Retryable("http_429", reason, throttled=True, unavailable=True, retry_after=answer.retry_after)
    if status in (408, 409) or not 400 <= status < 500:
        reason = f"upstream returned {status}" + (f": {text}" if text else "")
        return Retryable(
            f"http_{status}", reason, unavailable=status in _UNAVAILABLE_STATUSES, retry_after=answer.retry_after
        )
    code = _CODES.get(status, "invalid_request_error")
    if status == 429:
        code = "insufficient_quota"
    elif code == "invalid_request_error" and _says_context_overflow(error, text):
        code = "context_length_exceeded"
    if code == "authentication_error":
        # The upstream refused the service's credentials, not the client's, so its text is not shown to the client.
        return Failure(code, f"http_{status}", f"upstream returned {status}: it does not accept this service")
    param = error.get("param")
    return Failure(
        code, f"http_{status}", text or f"upstream returned {status}", param if isinstance(param, str) else None
    )


def _says_context_overflow(error: dict[str, Any], text: str) -> bool:
    return _CONTEXT_OVERFLOW.search(f"{error.get('code')} {error.get('type')} {text}") is not None


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the error object of an answer, in the shapes that OpenAI-style servers use."""
    try:
        document = _anything.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    error = document.get("error", document)
    return error if isinstance(error, dict) else {"message": error}


def _text_of(body: bytes, error: dict[str, Any]) -> str:
    message = error.get("message") or error.get("detail")
    if not isinstance(message, str):
        message = body[: 4 * _MAX_TEXT_CHARACTERS].decode("utf-8", "replace")
    return " ".join(message.split())[:_MAX_TEXT_CHARACTERS]
