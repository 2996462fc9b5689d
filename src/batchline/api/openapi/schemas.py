"""The schemas of the document, derived from typed structs.

The objects that the API answers with are declared in ``domain.wire``. The structs below describe what clients send, the
lines of files, and what upstreams answer; the service reads these in parts, so they exist only here. Examples are
made by the code that makes the real objects.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field, to_builtins
from msgspec.json import decode, encode
from msgspec.structs import replace

from batchline.domain.chat import Role
from batchline.domain.embedded_model import EMBEDDED_MODEL
from batchline.domain.endpoints import CHAT
from batchline.domain.errors import MissingCredentials
from batchline.domain.limits import MAX_ENDPOINT_CHARACTERS, MAX_LIFETIME_SECONDS, MIN_LIFETIME_SECONDS
from batchline.domain.money import MAX_AMOUNT
from batchline.domain.outcomes import BATCH_CANCELLED, TOO_LONG, Success, error_line, output_line
from batchline.domain.progress import Activity, Eta, Progress, count_errors
from batchline.domain.records import BATCH, Batch, File
from batchline.domain.states import BatchStatus
from batchline.domain.waiting import RateLimitWait
from batchline.domain.wire import ANSWERS, SCHEMA_REF, BatchObject, BatchProgress, ErrorBody, FileObject, ModelObject

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}

FILE_ID = "file-5f0c8e3a1b7d4962a4c3e1f09b8d7a65"
BATCH_ID = "batch_01K9ZQ3V8M4T2X6R0B7N5C1D9F"
MODEL_ID = EMBEDDED_MODEL
_LINE_ID = "batch_req_01K9ZQ3V8M4T2X6R0B7N5C1D9F_0"
_AT = 1_760_000_000
_DAY = 86_400


def ref(kind: type[Struct]) -> Schema:
    """Return a reference to the schema of a struct."""
    return {"$ref": SCHEMA_REF.format(name=kind.__name__)}


NonEmpty = Annotated[str, Meta(min_length=1)]
Stream = Annotated[bool | None, Meta(description="Answer with server-sent events, if the route can.")]


class UploadForm(Struct):
    purpose: Literal["batch"]
    file: Annotated[str, Meta(description="JSON lines; see BatchInputLine.", extra_json_schema={"format": "binary"})]
    anchor: Literal["created_at"] | UnsetType = field(name="expires_after[anchor]", default=UNSET)
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | UnsetType = field(
        name="expires_after[seconds]", default=UNSET
    )


class OutputExpiry(Struct, forbid_unknown_fields=True):
    anchor: Annotated[Literal["created_at"], Meta(description="The time runs from the creation of each file.")]
    seconds: Annotated[int, Meta(ge=MIN_LIFETIME_SECONDS, le=MAX_LIFETIME_SECONDS)]


class CreateOptions(Struct, forbid_unknown_fields=True):
    hold: Annotated[bool, Meta(description="Hold the batch if nearly all of its lines fail with one code.")] = False
    reuse: Annotated[bool, Meta(description="Take answers that the same lines of the project got before.")] = False
    max_cost: (
        Annotated[float, Meta(ge=0, le=MAX_AMOUNT, description="Start no line once the batch costs so many units.")]
        | UnsetType
    ) = UNSET


class CreateBatch(Struct):
    input_file_id: Annotated[NonEmpty, Meta(description="A file uploaded with the purpose `batch`.")]
    endpoint: Annotated[
        NonEmpty,
        Meta(description="The `url` that every line of the file names.", max_length=MAX_ENDPOINT_CHARACTERS),
    ]
    completion_window: Literal["24h"] | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Up to 64 KiB, returned unchanged.")] = None
    output_expires_after: Annotated[
        OutputExpiry | None, Meta(description="When the output and error files expire, as in OpenAI's API.")
    ] = None
    batchline: Annotated[
        CreateOptions | None, Meta(description="What goes beyond OpenAI's API. Unknown names are refused.")
    ] = None


class BatchInputLine(Struct):
    custom_id: Annotated[NonEmpty, Meta(description="Unique in the file; returned unchanged with the result.")]
    method: Annotated[str, Meta(pattern="^[Pp][Oo][Ss][Tt]$")]
    url: Annotated[str, Meta(description="The same on every line.")]
    body: Annotated[dict[str, Any], Meta(min_length=1, description="What the url takes; no `stream: true`.")]


class LineResponse(Struct, forbid_unknown_fields=True):
    status_code: Annotated[int, Meta(ge=200, le=299)]
    request_id: Annotated[str | None, Meta(description="The id that the upstream gave the request.")]
    body: Annotated[Any, Meta(description="What the synchronous call would have answered.")]


class BatchOutputLine(Struct, forbid_unknown_fields=True):
    """A line of an output file."""

    id: Annotated[str, Meta(pattern="^batch_req_")]
    custom_id: str
    response: LineResponse
    error: None
    reused: Annotated[bool, Meta(description="Only on a line that took an earlier answer: true.")] | UnsetType = UNSET


_LINE_CODES = {
    "invalid_request_error": "the upstream refused the body",
    "context_length_exceeded": "the input is longer than the model accepts",
    "authentication_error": "the upstream refused the service, or the key of the batch was revoked",
    "not_found_error": "the model does not exist, or is not enabled for the project",
    "request_too_large": "the upstream refused the body for its size",
    "insufficient_quota": "the organization ran out of balance and credits, or the upstream's quota is spent",
    "rate_limit_exceeded": "the upstream throttled the line too often",
    "internal_error": "every attempt failed",
    "batch_cancelled": "the batch was cancelled before the line ran",
    "batch_expired": "the batch's window ended before the line ran",
}


class LineError(Struct, forbid_unknown_fields=True):
    code: Annotated[
        str,
        Meta(
            description="\n".join(f"- `{code}`: {why}" for code, why in _LINE_CODES.items()),
            extra_json_schema={"enum": list(_LINE_CODES)},
        ),
    ]
    message: Annotated[str, Meta(pattern=r"^\[legacy:[a-z0-9_]+\] ")]
    param: str | None


_LINE_NAMES = ("BatchOutputLine", "BatchErrorLine")


class BatchErrorLine(Struct, forbid_unknown_fields=True):
    """A line of an error file."""

    id: Annotated[str, Meta(pattern="^batch_req_")]
    custom_id: str
    response: None
    error: LineError


class ResultPage(Struct, forbid_unknown_fields=True):
    """A page of results, in the order in which they were recorded."""

    object: Literal["list"]
    data: Annotated[
        list[Any],
        Meta(extra_json_schema={"items": {"anyOf": [{"$ref": SCHEMA_REF.format(name=name)} for name in _LINE_NAMES]}}),
    ]
    last_id: Annotated[str | None, Meta(description="The cursor behind the last line; null if the page is empty.")]
    has_more: Annotated[bool, Meta(description="Whether more lines follow, or may follow: the batch is not terminal.")]


class RerunBatch(Struct):
    """All fields may be left out: then every line that failed runs again as it is."""

    codes: Annotated[list[str] | None, Meta(description="Only lines that failed with one of these codes.")] = None
    patch: Annotated[
        dict[str, Any] | None, Meta(description="Merged into the body of each line (RFC 7396); null removes a field.")
    ] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="The metadata of the new batch.")] = None


class ChatMessage(Struct):
    role: Role
    content: Annotated[
        str | list[dict[str, Any]] | UnsetType | None, Meta(description="Text, or the parts of a message.")
    ] = UNSET


class ChatCompletionRequest(Struct):
    """Every other field is passed to the upstream unchanged."""

    model: Annotated[NonEmpty, Meta(description="A model enabled for the project.")]
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    stream: Stream = False
    stream_options: dict[str, Any] | None = None


class ChatCompletion(Struct):
    """The upstream's answer, with `system_fingerprint` always null.

    A classification model answers with a JSON document as a string in `choices[0].message.content`.
    """

    system_fingerprint: None
    id: str | UnsetType = UNSET
    object: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    model: str | UnsetType = UNSET
    choices: list[dict[str, Any]] | UnsetType = UNSET
    usage: dict[str, Any] | UnsetType | None = UNSET


class CallRequest(Struct):
    """Passed to the upstream that serves the route."""

    model: Annotated[
        str | None, Meta(description="A model enabled for the project; if absent, the model of the route.")
    ] = None
    stream: Stream = False


class Liveness(Struct, forbid_unknown_fields=True):
    status: str


class Readiness(Struct, forbid_unknown_fields=True):
    status: str
    database: str
    migrations: str
    storage: str
    identity: str
    clock: str


CHAT_EXAMPLE = {"model": MODEL_ID, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
RESPONSE_EXAMPLE = {"model": MODEL_ID, "input": "Write one sentence about rivers."}
TEXT_EXAMPLE = {"text": "The council approved the new tram line on Tuesday after two years of debate."}
LABELS_EXAMPLE = {"text": "Ada Lovelace was born in London.", "labels": ["person", "place"]}

_FILE = File(
    id=FILE_ID,
    project_id="",
    filename="input.jsonl",
    purpose=BATCH,
    bytes=1834,
    created_at=_AT,
    expires_at=_AT + 30 * _DAY,
    is_error=False,
    object_key="",
)
_BATCH = Batch(
    id=BATCH_ID,
    project_id="",
    key_id="",
    endpoint=CHAT,
    input_file_id=FILE_ID,
    metadata=b'{"job":"nightly"}',
    status=BatchStatus.IN_PROGRESS,
    created_at=_AT,
    expires_at=_AT + _DAY,
    in_progress_at=_AT + 1,
    total=100,
    model=MODEL_ID,
)
_PROGRESS = Progress(
    batch=replace(_BATCH, completed=40, failed=2),
    rate=0.7,
    eta=Eta(seconds=83, low=61, high=113),
    activity=Activity(
        in_flight=1, concurrency=16, waiting_for=RateLimitWait(upstream="default", model=MODEL_ID, rate=0.7)
    ),
    errors=count_errors([error_line(_LINE_ID, b'"line-1"', TOO_LONG)] * 2),
)

_EXAMPLES: dict[type[Struct], object] = {
    FileObject: to_builtins(FileObject.from_record(_FILE)),
    BatchObject: decode(encode(BatchObject.from_record(_BATCH))),
    BatchProgress: decode(encode(BatchProgress.from_progress(_PROGRESS))),
    ModelObject: to_builtins(ModelObject(id=MODEL_ID, object="model", created=_AT, owned_by="batchline")),
    ErrorBody: to_builtins(ErrorBody.from_error(MissingCredentials())),
    CreateBatch: {
        "input_file_id": FILE_ID,
        "endpoint": CHAT,
        "completion_window": "24h",
        "metadata": {"job": "nightly"},
    },
    ChatCompletionRequest: CHAT_EXAMPLE,
    ChatCompletion: {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": _AT,
        "model": MODEL_ID,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 14, "completion_tokens": 3, "total_tokens": 17},
        "system_fingerprint": None,
    },
    RerunBatch: {"codes": ["context_length_exceeded"], "patch": {"temperature": 0, "max_tokens": None}},
    ResultPage: {
        "object": "list",
        "data": [decode(error_line(_LINE_ID, b'"line-1"', TOO_LONG))],
        "last_id": "r1f-2a0",
        "has_more": True,
    },
    BatchInputLine: {"custom_id": "line-1", "method": "POST", "url": CHAT, "body": CHAT_EXAMPLE},
    BatchOutputLine: decode(output_line(_LINE_ID, b'"line-1"', Success(200, "req-1", b'{"choices":[]}'))),
    BatchErrorLine: decode(error_line(_LINE_ID, b'"line-1"', BATCH_CANCELLED)),
}

_BOTH_OR_NEITHER = {
    "expires_after[anchor]": ["expires_after[seconds]"],
    "expires_after[seconds]": ["expires_after[anchor]"],
}


def schemas() -> dict[str, Schema]:
    """Return the schema of every struct, by its name."""
    described = (*ANSWERS, *_EXAMPLES, UploadForm, CallRequest, Liveness, Readiness)
    _, components = msgspec.json.schema_components(dict.fromkeys(described), ref_template=SCHEMA_REF)
    for kind, example in _EXAMPLES.items():
        components[kind.__name__]["example"] = example
    components[UploadForm.__name__]["dependentRequired"] = _BOTH_OR_NEITHER
    return components
