"""The shapes that the document names. Examples are made by the code that makes the real thing."""

from collections.abc import Iterable
from typing import Any, get_args

from msgspec.json import decode, encode
from msgspec.structs import replace

from batchline.domain.chat import Role
from batchline.domain.outcomes import BATCH_CANCELLED, TOO_LONG, Success, error_line, output_line
from batchline.domain.progress import Activity, Eta, Pause, Progress, count_errors
from batchline.domain.records import BATCH, BATCH_OUTPUT, Batch, File
from batchline.domain.states import BatchStatus

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
TIME: Schema = {"type": "integer", "description": "Unix seconds."}
MAYBE_STRING: Schema = {"type": ["string", "null"]}

FILE_ID = "file-5f0c8e3a1b7d4962a4c3e1f09b8d7a65"
BATCH_ID = "batch_01K9ZQ3V8M4T2X6R0B7N5C1D9F"
MODEL_ID = "smollm2-135m"
_LINE_ID = "batch_req_01K9ZQ3V8M4T2X6R0B7N5C1D9F_0"
_AT = 1_760_000_000
_DAY = 86_400


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, *, optional: Iterable[str] = (), is_open: bool = False, **more: Any) -> Schema:
    required = [name for name in properties if name not in set(optional)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": is_open} | more


def _const(value: object) -> Schema:
    return {"const": value}


def _maybe_time(state: str) -> Schema:
    return {"type": ["integer", "null"], "description": f"Unix seconds at which it became {state}; null until then."}


def _count(description: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description}


def _list_of(name: str) -> Schema:
    return _object(
        {
            "object": _const("list"),
            "data": {"type": "array", "items": ref(name)},
            "first_id": MAYBE_STRING | {"description": "Null when the page is empty."},
            "last_id": MAYBE_STRING | {"description": "Null when the page is empty."},
            "has_more": {"type": "boolean", "description": "Whether a page follows; ask for it with `after`."},
        }
    )


FILE_EXAMPLE = File(
    id=FILE_ID,
    project_id="",
    filename="input.jsonl",
    purpose=BATCH,
    bytes=1834,
    created_at=_AT,
    expires_at=_AT + 30 * _DAY,
    is_error=False,
    object_key="",
).wire()

_RUNNING = Batch(
    id=BATCH_ID,
    project_id="",
    key_id="",
    endpoint="/v1/chat/completions",
    input_file_id=FILE_ID,
    metadata=b'{"job":"nightly"}',
    status=BatchStatus.IN_PROGRESS,
    created_at=_AT,
    expires_at=_AT + _DAY,
    in_progress_at=_AT + 1,
    total=100,
    model=MODEL_ID,
)
BATCH_EXAMPLE: Schema = decode(encode(_RUNNING.wire()))
_UNDER_WAY = Progress(
    batch=replace(_RUNNING, completed=40, failed=2),
    rate=0.7,
    eta=Eta(seconds=83, low=61, high=113),
    activity=Activity(in_flight=1, concurrency=16, pause=Pause(upstream="default", detail="refused", since=_AT + 50)),
    errors=count_errors([error_line(_LINE_ID, b'"line-1"', TOO_LONG)] * 2),
)

_FILE = _object(
    {
        "id": {"type": "string", "pattern": "^file-", "description": "`file_` in place of `file-` is understood."},
        "object": _const("file"),
        "bytes": _count("Size as the service measured it."),
        "created_at": TIME,
        "filename": {"type": "string", "description": "As the client named it."},
        "purpose": {"enum": [BATCH, BATCH_OUTPUT]},
        "status": _const("processed"),
        "expires_at": TIME | {"description": "Unix seconds at which the file is removed."},
        "is_error": {"const": True, "description": "Only on the error file of a batch."},
    },
    optional=["is_error"],
    example=FILE_EXAMPLE,
)

_BATCH_ERRORS = _object(
    {
        "object": _const("list"),
        "data": {
            "type": "array",
            "maxItems": 100,
            "items": _object(
                {
                    "code": STRING,
                    "message": STRING,
                    "line": {"type": ["integer", "null"], "minimum": 1, "description": "MetricSample from 1."},
                    "param": MAYBE_STRING,
                }
            ),
        },
    },
    description="What was wrong with the input file, the first hundred offending lines.",
)

_USAGE = _object(
    {
        "input_tokens": _count("Tokens read."),
        "input_tokens_details": _object({"cached_tokens": _count("Of these, tokens the upstream had cached.")}),
        "output_tokens": _count("Tokens written."),
        "output_tokens_details": _object({"reasoning_tokens": _count("Of these, tokens spent on reasoning.")}),
        "total_tokens": _count("Both together."),
    },
    description="Tokens of all lines recorded so far.",
)

_COUNTS = _object(
    {
        "total": _count("Lines of the input."),
        "completed": _count("Lines in the output file."),
        "failed": _count("Lines in the error file."),
    }
)

_BATCH = _object(
    {
        "id": {"type": "string", "pattern": "^batch_[0-9A-HJKMNP-TV-Z]{26}$"},
        "object": _const("batch"),
        "endpoint": STRING,
        "errors": {"anyOf": [ref("BatchErrors"), {"type": "null"}]},
        "input_file_id": STRING,
        "completion_window": _const("24h"),
        "status": {"enum": [status.value for status in BatchStatus]},
        "output_file_id": MAYBE_STRING | {"description": "Set at the end if at least one line succeeded."},
        "error_file_id": MAYBE_STRING | {"description": "Set at the end if at least one line failed."},
        "created_at": TIME,
        "in_progress_at": _maybe_time("in_progress"),
        "expires_at": TIME | {"description": "Unix seconds after which no line is started."},
        "finalizing_at": _maybe_time("finalizing"),
        "completed_at": _maybe_time("completed"),
        "failed_at": _maybe_time("failed"),
        "expired_at": _maybe_time("expired"),
        "cancelling_at": _maybe_time("cancelling"),
        "cancelled_at": _maybe_time("cancelled"),
        "request_counts": _COUNTS,
        "metadata": {"type": "object", "description": "As it was given."},
        "model": MAYBE_STRING | {"description": "The one model of all lines, where there is one."},
        "usage": ref("Usage"),
    },
    example=BATCH_EXAMPLE,
)

_ETA = _object({"seconds": _count("At the rate of now."), "low": _count("At best."), "high": _count("At worst.")})
_GONE = STRING | {"description": "How the upstream is gone, such as `refused` or `timeout`."}
_PAUSE = _object({"reason": _const("upstream_paused"), "upstream": STRING, "detail": _GONE, "since": TIME})
_LINE_ERRORS = _object(
    {
        "code": STRING | {"description": "As in BatchErrorLine."},
        "count": _count("Lines that failed with it."),
        "sample": _object(
            {"custom_id": STRING | {"maxLength": 300}, "message": STRING | {"maxLength": 300}},
            description="The first of them, both texts cut.",
        ),
    }
)
_PROGRESS = _object(
    {
        "object": _const("batch.progress"),
        "batch_id": STRING,
        "status": {"enum": [status.value for status in BatchStatus]},
        "request_counts": _COUNTS,
        "rate": {"type": "number", "minimum": 0, "description": "Lines a second over the last minute."},
        "eta": {"anyOf": [_ETA, {"type": "null"}], "description": "Null without a rate, and when nothing is left."},
        "waiting_for": {"anyOf": [_PAUSE, {"type": "null"}], "description": "What keeps its lines from running."},
        "in_flight": _count("Its lines that the answering process has sent and has no answer to."),
        "concurrency": _count("How many lines the upstreams of its models take at once, as found out so far."),
        "errors": {"type": "array", "items": _LINE_ERRORS, "description": "By code, the most frequent first."},
        "usage": ref("Usage"),
    },
    example=decode(encode(_UNDER_WAY.wire())),
)

CREATE_BATCH_EXAMPLE = {
    "input_file_id": FILE_ID,
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"job": "nightly"},
}
_CREATE_BATCH = _object(
    {
        "input_file_id": {"type": "string", "minLength": 1, "description": "A file uploaded for `batch`."},
        "endpoint": {"type": "string", "minLength": 1, "description": "The `url` that every line of the file names."},
        "completion_window": {"enum": ["24h", None]},
        "metadata": {"type": ["object", "null"], "description": "Up to 64 KiB, handed back unchanged."},
    },
    optional=["completion_window", "metadata"],
    is_open=True,
    example=CREATE_BATCH_EXAMPLE,
)

_STREAM = {"type": ["boolean", "null"], "default": False, "description": "Answer with server-sent events."}

CHAT_EXAMPLE = {"model": MODEL_ID, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
_CHAT = _object(
    {
        "model": {"type": "string", "minLength": 1, "description": "A model enabled for the project."},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": _object(
                {
                    "role": {"enum": list(get_args(Role))},
                    "content": {
                        "description": "Text, or parts of a message.",
                        "anyOf": [STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
                    },
                },
                optional=["content"],
                is_open=True,
            ),
        },
        "stream": _STREAM,
        "stream_options": {"type": ["object", "null"]},
    },
    optional=["stream", "stream_options"],
    is_open=True,
    description="Everything else is handed to the upstream as it came.",
    example=CHAT_EXAMPLE,
)

_COMPLETION = _object(
    {
        "id": STRING,
        "object": STRING,
        "created": {"type": "integer"},
        "model": STRING,
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": ["object", "null"]},
        "system_fingerprint": {"type": "null"},
    },
    optional=["id", "object", "created", "model", "choices", "usage"],
    is_open=True,
    description="The upstream's answer, with `system_fingerprint` always null. A classification model answers with "
    "a JSON document as a string in `choices[0].message.content`.",
    example={
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": _AT,
        "model": MODEL_ID,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 14, "completion_tokens": 3, "total_tokens": 17},
        "system_fingerprint": None,
    },
)

RESPONSE_EXAMPLE = {"model": MODEL_ID, "input": "Write one sentence about rivers."}
TEXT_EXAMPLE = {"text": "The council approved the new tram line on Tuesday after two years of debate."}
LABELS_EXAMPLE = {"text": "Ada Lovelace was born in London.", "labels": ["person", "place"]}
_CALL = {
    "type": "object",
    "properties": {
        "model": MAYBE_STRING | {"description": "A model enabled for the project; without it, the route's own."},
        "stream": _STREAM | {"description": "Answer with server-sent events, where the route can."},
    },
    "additionalProperties": True,
    "description": "Handed to the upstream that serves the route.",
}

_MODEL = _object(
    {"id": STRING, "object": _const("model"), "created": TIME, "owned_by": STRING},
    example={"id": MODEL_ID, "object": "model", "created": _AT, "owned_by": "batchline"},
)
_MODEL_LIST = _object({"object": _const("list"), "data": {"type": "array", "items": ref("Model")}})

_UPLOAD = _object(
    {
        "purpose": _const("batch"),
        "file": {"type": "string", "format": "binary", "description": "JSON lines; see BatchInputLine."},
        "expires_after[anchor]": _const("created_at"),
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    optional=["expires_after[anchor]", "expires_after[seconds]"],
    is_open=True,
    dependentRequired={
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
)

_INPUT_LINE = _object(
    {
        "custom_id": {"type": "string", "minLength": 1, "description": "Unique in the file, handed back verbatim."},
        "method": {"type": "string", "pattern": "^[Pp][Oo][Ss][Tt]$"},
        "url": {"type": "string", "description": "The same on every line."},
        "body": {"type": "object", "minProperties": 1, "description": "What the url takes; no `stream: true`."},
    },
    is_open=True,
    example={"custom_id": "line-1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT_EXAMPLE},
)

_LINE_CODES = {
    "invalid_request_error": "the upstream refused the body",
    "context_length_exceeded": "the input is longer than the model takes",
    "authentication_error": "the upstream refused the service, or the key of the batch was revoked",
    "not_found_error": "the model does not exist, or is not enabled for the project",
    "request_too_large": "the upstream refused the body for its size",
    "insufficient_quota": "the organization ran out of balance and credits, or the upstream's quota is spent",
    "rate_limit_exceeded": "the upstream throttled the line too often",
    "internal_error": "every attempt failed",
    "batch_cancelled": "the batch was cancelled before the line ran",
    "batch_expired": "the batch's window ended before the line ran",
}
_LINE_NAMES = {"id": {"type": "string", "pattern": "^batch_req_"}, "custom_id": STRING}

_OUTPUT_LINE = _object(
    _LINE_NAMES
    | {
        "response": _object(
            {
                "status_code": {"type": "integer", "minimum": 200, "maximum": 299},
                "request_id": MAYBE_STRING | {"description": "The upstream's."},
                "body": {"description": "What the synchronous call would have answered."},
            }
        ),
        "error": {"type": "null"},
    },
    description="A line of an output file.",
    example=decode(output_line(_LINE_ID, b'"line-1"', Success(200, "req-1", b'{"choices":[]}'))),
)

_ERROR_LINE = _object(
    _LINE_NAMES
    | {
        "response": {"type": "null"},
        "error": _object(
            {
                "code": {
                    "enum": list(_LINE_CODES),
                    "description": "\n".join(f"- `{code}`: {why}" for code, why in _LINE_CODES.items()),
                },
                "message": {"type": "string", "pattern": r"^\[legacy:[a-z0-9_]+\] "},
                "param": MAYBE_STRING,
            }
        ),
    },
    description="A line of an error file.",
    example=decode(error_line(_LINE_ID, b'"line-1"', BATCH_CANCELLED)),
)

SCHEMAS: dict[str, Schema] = {
    "File": _FILE,
    "FileList": _list_of("File"),
    "DeletedFile": _object({"id": STRING, "object": _const("file"), "deleted": _const(True)}),
    "Upload": _UPLOAD,
    "Batch": _BATCH,
    "BatchList": _list_of("Batch"),
    "BatchErrors": _BATCH_ERRORS,
    "BatchProgress": _PROGRESS,
    "Usage": _USAGE,
    "CreateBatch": _CREATE_BATCH,
    "BatchInputLine": _INPUT_LINE,
    "BatchOutputLine": _OUTPUT_LINE,
    "BatchErrorLine": _ERROR_LINE,
    "ChatRequest": _CHAT,
    "ChatCompletion": _COMPLETION,
    "Call": _CALL,
    "Model": _MODEL,
    "ModelList": _MODEL_LIST,
}
