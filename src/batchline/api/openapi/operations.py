"""Describes every operation of the API: files, batches, synchronous calls, models, and the service itself."""

from typing import Any

from msgspec import Struct

from batchline.api.openapi.answers import AUTHENTICATION_ERRORS, Part, answer, json_answer
from batchline.api.openapi.operation import (
    ADMINISTRATOR,
    ANONYMOUS,
    BATCHES,
    CALLS,
    FILES,
    MODELS,
    SERVICE,
    Operation,
    body,
    in_query,
    parameter,
)
from batchline.api.openapi.schemas import (
    BATCH_ID,
    CHAT_EXAMPLE,
    FILE_ID,
    LABELS_EXAMPLE,
    MODEL_ID,
    RESPONSE_EXAMPLE,
    STRING,
    TEXT_EXAMPLE,
    CallRequest,
    ChatCompletion,
    ChatCompletionRequest,
    CreateBatch,
    Liveness,
    Readiness,
    RerunBatch,
    ResultPage,
    UploadForm,
    ref,
)
from batchline.api.responses import JSON
from batchline.domain import wire
from batchline.domain.endpoints import CHAT
from batchline.domain.errors import (
    ApiError,
    BadGateway,
    BatchNotFound,
    Conflict,
    FileNotFound,
    GatewayTimeout,
    InsufficientQuota,
    InvalidInput,
    InvalidMultipart,
    InvalidRequest,
    NotFound,
    RangeNotSatisfiable,
    RateLimited,
    Refused,
    ResultsUnavailable,
    StorageFailed,
    StorageFull,
    TooLarge,
)
from batchline.domain.records import BATCH, BATCH_OUTPUT, OTHER_PURPOSES
from batchline.domain.states import BatchStatus
from batchline.pipeline.results import LineStatus


def _invalid(message: str, param: str, code: str | None = None) -> ApiError:
    return InvalidRequest(message, code=code, param=param)


_FILE_ID = parameter("file_id", "path", STRING | {"minLength": 1}, "Id of the file.", example=FILE_ID)
_BATCH_ID = parameter("batch_id", "path", STRING | {"minLength": 1}, "Id of the batch.", example=BATCH_ID)
_AFTER = in_query("after", STRING, "The id of the last item of the previous page.")
_UNKNOWN_CURSOR = _invalid("after names nothing in this project", "after")
_NO_FILE = FileNotFound(FILE_ID)
_NO_BATCH = BatchNotFound(BATCH_ID)
_IDEMPOTENCY_KEY = parameter(
    "Idempotency-Key",
    "header",
    STRING | {"maxLength": 255},
    "Kept for a day: a second create with the same key gets the answer to the first.",
)
_RETRY_COUNT = parameter(
    "x-stainless-retry-count", "header", STRING, "Sent by the SDKs: a retry gets the first answer if that was lost."
)
_KEY_REUSED = Conflict(
    "This Idempotency-Key was used with another body", code="idempotency_key_reused", param="Idempotency-Key"
)
_BODY_TOO_LARGE = TooLarge("The request's body exceeds 1048576 bytes")
_MANY_READS = RateLimited("This project has 64 reads of results under way already. Try again shortly.", retry_after=1)
_NOT_TERMINAL = Conflict(f"Batch {BATCH_ID} is in_progress and has not ended", code="batch_not_terminal")
_RESULT_EVENTS = {
    "text/event-stream": {
        "example": 'event: line\nid: r1f-2a0\ndata: {"id":"batch_req_…",…}\n\nevent: end\ndata: {}\n\n'
    }
}
_SPENDING = (
    RateLimited("This project has 64 uploads and creates under way already. Try again shortly.", retry_after=1),
    InsufficientQuota(),
    StorageFull(10_737_418_240, scope="project"),
)

_FILE_OPERATIONS = (
    Operation(
        route="POST /v1/files",
        id="createFile",
        summary="Upload a file",
        description="The content is stored unread, and checked when a batch is created from it.",
        body=body("multipart/form-data", UploadForm),
        answers={"200": json_answer("The file.", wire.FileObject)},
        errors=(
            InvalidRequest("Content-Type must be multipart/form-data", code="invalid_content_type"),
            InvalidMultipart("The upload was cut off"),
            _invalid('purpose must be "batch"', "purpose", "invalid_purpose"),
            _invalid("file is required", "file", "missing_file"),
            _invalid("The uploaded file is empty", "file", "empty_file"),
            _invalid('expires_after[anchor] must be "created_at"', "expires_after[anchor]"),
            TooLarge("File exceeds maximum size of 104857600 bytes", code="file_too_large", param="file"),
            StorageFailed(),
            *_SPENDING,
        ),
    ),
    Operation(
        route="GET /v1/files",
        id="listFiles",
        summary="List files",
        parameters=(
            in_query("purpose", {"enum": [BATCH, BATCH_OUTPUT, *OTHER_PURPOSES]}, "Only files of this purpose."),
            in_query("order", {"enum": ["desc", "asc"], "default": "desc"}, "By time of creation."),
            _AFTER,
            in_query(
                "limit",
                {"type": "integer", "minimum": 1, "default": 10_000},
                "Files per page; a larger number counts as 10,000.",
            ),
        ),
        answers={"200": json_answer("A page.", wire.FileList)},
        errors=(_invalid("limit must be a positive integer", "limit", "invalid_limit"), _UNKNOWN_CURSOR),
    ),
    Operation(
        route="GET /v1/files/{file_id}",
        id="retrieveFile",
        summary="Retrieve a file",
        parameters=(_FILE_ID,),
        answers={"200": json_answer("The file.", wire.FileObject)},
        errors=(_NO_FILE,),
    ),
    Operation(
        route="DELETE /v1/files/{file_id}",
        id="deleteFile",
        summary="Delete a file",
        description="A running batch has its own copy of its input.",
        parameters=(_FILE_ID,),
        answers={"200": json_answer("The file was deleted.", wire.DeletedFile)},
        errors=(_NO_FILE,),
    ),
    Operation(
        route="GET /v1/files/{file_id}/content",
        id="downloadFile",
        summary="Download a file",
        description="An input file has the bytes that were uploaded; an output file has lines as in BatchOutputLine, "
        "an error file lines as in BatchErrorLine. An interrupted download can be resumed with `Range`.",
        parameters=(
            _FILE_ID,
            parameter(
                "Range", "header", STRING, "One range of bytes; several ranges are ignored.", example="bytes=0-99"
            ),
        ),
        answers={
            status: answer(
                description,
                {"application/jsonl": {"schema": STRING | {"format": "binary"}}},
                headers=("content-length", "content-disposition", "accept-ranges", *more),
            )
            for status, description, more in (
                ("200", "The whole file.", ()),
                ("206", "A part of the file.", ("content-range",)),
            )
        },
        errors=(
            _NO_FILE,
            RangeNotSatisfiable(
                "The range lies outside of the file's 1834 bytes", headers={"content-range": "bytes */1834"}
            ),
        ),
    ),
)

_BATCH_OPERATIONS = (
    Operation(
        route="POST /v1/batches",
        id="createBatch",
        summary="Create a batch",
        description="The whole input is checked before the answer. A batch with an invalid line is kept as `failed`, "
        "with all its errors; its id is in `x-batch-id`. Once the answer is 200 the batch is durable: it runs even "
        "if the machine restarts.",
        parameters=(_IDEMPOTENCY_KEY, _RETRY_COUNT),
        body=body(JSON, CreateBatch),
        answers={"200": json_answer("The batch.", wire.BatchObject, headers=("x-batchline-replayed",))},
        errors=(
            _invalid("input_file_id is required", "input_file_id"),
            InvalidInput("Line 2 is missing custom_id", line=2),
            NotFound(f"Input file not found: {FILE_ID}", code="file_not_found", param="input_file_id"),
            _KEY_REUSED,
            _BODY_TOO_LARGE,
            *_SPENDING,
        ),
    ),
    Operation(
        route="POST /v1/batches/check",
        id="checkBatch",
        summary="Check an input file",
        description="Checks the body and the whole input as a create does, and stores nothing. The answer says which "
        "lines are invalid, which models the lines name, and what the batch would take.",
        body=body(JSON, CreateBatch),
        answers={"200": json_answer("What a create would find.", wire.BatchCheck)},
        errors=(
            _invalid("input_file_id is required", "input_file_id"),
            NotFound(f"Input file not found: {FILE_ID}", code="file_not_found", param="input_file_id"),
            TooLarge("The request's body exceeds 1048576 bytes"),
            RateLimited("This project has 64 uploads and creates under way already. Try again shortly.", retry_after=1),
        ),
    ),
    Operation(
        route="GET /v1/batches",
        id="listBatches",
        summary="List batches",
        description="Newest first.",
        parameters=(
            _AFTER,
            in_query(
                "limit",
                {"type": "integer", "default": 20},
                "Batches per page, limited to 1 to 100.",
            ),
            in_query("status", {"enum": [status.value for status in BatchStatus]}, "Only batches in this state."),
            in_query("created_after", {"type": "integer"}, "Unix seconds."),
            in_query("created_before", {"type": "integer"}, "Unix seconds."),
        ),
        answers={"200": json_answer("A page.", wire.BatchList)},
        errors=(_invalid("limit must be an integer", "limit", "invalid_limit"), _UNKNOWN_CURSOR),
    ),
    Operation(
        route="GET /v1/batches/{batch_id}",
        id="retrieveBatch",
        summary="Retrieve a batch",
        description="Counts grow while the batch runs and are final in a terminal state.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The batch.", wire.BatchObject)},
        errors=(_NO_BATCH,),
    ),
    Operation(
        route="GET /v1/batches/{batch_id}/progress",
        id="retrieveProgress",
        summary="Retrieve the progress of a batch",
        description="The rate, the estimated time left, what the batch waits for, and its errors so far.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The progress.", wire.BatchProgress)},
        errors=(_NO_BATCH,),
    ),
    Operation(
        route="POST /v1/batches/{batch_id}/cancel",
        id="cancelBatch",
        summary="Cancel a batch",
        description="Lines in flight finish and count; the others end as `batch_cancelled`. A second cancel changes "
        "nothing.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The batch, cancelling or cancelled.", wire.BatchObject)},
        errors=(
            _NO_BATCH,
            Conflict("Cannot cancel a batch with status 'completed'.", code="batch_not_cancellable"),
        ),
    ),
    Operation(
        route="GET /v1/batches/{batch_id}/results",
        id="listResults",
        summary="Read the results of a batch, also while it runs",
        description="The lines that are recorded, in the order in which they were recorded, which never changes. Over "
        "any sequence of pages no line is missing and none comes twice. A page may have fewer lines than `limit`; "
        "`has_more` tells whether to go on. With `Accept: text/event-stream` the lines come as server-sent events: "
        "`line` for each line, `batch` when the batch changed, and `end` after the last line.",
        parameters=(
            _BATCH_ID,
            in_query("after", STRING, "The `last_id` of the previous page."),
            in_query(
                "limit",
                {"type": "integer", "minimum": 1, "default": 1_000},
                "Lines per page; a larger number than 10,000 counts as 10,000.",
            ),
            in_query("status", {"enum": list(LineStatus)}, "Only lines of the output file, or of the error file."),
            parameter("Last-Event-ID", "header", STRING, "Continues a stream behind the event with this id."),
        ),
        answers={"200": answer("A page, or events.", {JSON: {"schema": ref(ResultPage)}} | _RESULT_EVENTS)},
        errors=(
            _NO_BATCH,
            _invalid("limit must be a positive integer", "limit", "invalid_limit"),
            _invalid("after is not a cursor of this route", "after"),
            ResultsUnavailable(BATCH_ID),
            _MANY_READS,
        ),
    ),
    Operation(
        route="POST /v1/batches/{batch_id}/rerun",
        id="rerunBatch",
        summary="Run the failed lines of a batch again",
        description="Creates a batch of the lines of a terminal batch that failed. They keep their `custom_id` and "
        "their order.",
        parameters=(_BATCH_ID, _IDEMPOTENCY_KEY, _RETRY_COUNT),
        body=body(JSON, RerunBatch) | {"required": False},
        answers={"200": json_answer("The new batch.", wire.BatchObject, headers=("x-batchline-replayed",))},
        errors=(
            _NO_BATCH,
            _invalid("codes must be a list of strings", "codes"),
            InvalidRequest(f"Batch {BATCH_ID} has no failed line", code="nothing_to_rerun"),
            InvalidInput("Line 1 is missing body", line=1),
            _NOT_TERMINAL,
            Conflict(
                f"The input file of batch {BATCH_ID} was deleted, and the batch's own copy of it too",
                code="input_unavailable",
            ),
            _KEY_REUSED,
            ResultsUnavailable(BATCH_ID),
            _BODY_TOO_LARGE,
            TooLarge("File exceeds maximum size of 104857600 bytes", code="file_too_large", param="file"),
            *_SPENDING,
        ),
    ),
    Operation(
        route="GET /v1/batches/{batch_id}/merged",
        id="downloadMerged",
        summary="Download the results of a batch and its reruns",
        description="One line for each line of the batch's input, in the same order: its newest success over the batch "
        "and all batches that ran failed lines of it again, else its newest failure.",
        parameters=(_BATCH_ID,),
        answers={
            "200": answer(
                "Lines as in BatchOutputLine and BatchErrorLine.",
                {"application/jsonl": {"schema": STRING | {"format": "binary"}}},
                headers=("content-disposition",),
            )
        },
        errors=(
            _NO_BATCH,
            _NOT_TERMINAL,
            Conflict(
                f"Batch {BATCH_ID} runs failed lines of another batch again: merge the first batch",
                code="not_a_root_batch",
            ),
            ResultsUnavailable(BATCH_ID),
            _MANY_READS,
        ),
    ),
    Operation(
        route="POST /v1/batches/{batch_id}/release",
        id="releaseBatch",
        summary="Release a held batch",
        description="A batch that was created with `hold` is held while nearly all of its lines fail with one code: "
        "no further line starts. After the release its other lines run, and it is not held again.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The batch.", wire.BatchObject)},
        errors=(_NO_BATCH, Conflict(f"Batch {BATCH_ID} is not held", code="batch_not_held")),
    ),
    Operation(
        route="GET /v1/usage",
        id="retrieveUsage",
        summary="Retrieve usage",
        description="What the project has used, by time and model, and what its organization has left.",
        parameters=(
            in_query("bucket", {"enum": ["hour", "day"], "default": "day"}, "The length of a bucket, in UTC."),
            in_query("model", STRING, "Only usage of this model."),
            in_query("start_time", {"type": "integer"}, "Unix seconds; by default 30 days before the end."),
            in_query("end_time", {"type": "integer"}, "Unix seconds, not included; by default now."),
        ),
        answers={"200": json_answer("The usage.", wire.UsageReport)},
        errors=(_invalid("end_time must be later than start_time", "end_time"),),
    ),
)


_WRONG, _TOO_LONG = "invalid_request_error", "context_length_exceeded"
_PASSED_ON = (
    (400, _WRONG),
    (400, _TOO_LONG),
    (401, "authentication_error"),
    (402, "insufficient_quota"),
    (403, "authentication_error"),
    (404, "not_found_error"),
    (408, _WRONG),
    (409, _WRONG),
    (413, "request_too_large"),
    (414, _WRONG),
    (414, _TOO_LONG),
    (420, "insufficient_quota"),
    (431, _WRONG),
    (431, _TOO_LONG),
)
"""Statuses and codes of the upstream's refusals; any other status from 400 to 499 is described as 4XX."""

_CALL_ERRORS = (
    *(Refused(status, f"upstream returned {status}", code=code) for status, code in _PASSED_ON),
    RateLimited("This project has 256 synchronous calls under way already. Try again shortly.", retry_after=1),
    InsufficientQuota(),
    BadGateway("The upstream failed"),
    GatewayTimeout("The upstream took too long"),
)
_EVENTS = {"text/event-stream": {"example": 'data: {"choices":[…]}\n\ndata: [DONE]\n\n'}}
_ANYTHING = {JSON: {"schema": {"description": "What the upstream answered, unchanged."}}}


def _call(
    path: str, name: str, summary: str, kind: type[Struct], example: object, content: Part, **more: Any
) -> Operation:
    return Operation(
        route=f"POST {path}",
        id=name,
        summary=summary,
        body=body(JSON, kind, example),
        answers={"2XX": answer("The upstream's answer, with its status.", content)},
        errors=_CALL_ERRORS,
        **more,
    )


_CALL_OPERATIONS = (
    _call(
        CHAT,
        "createChatCompletion",
        "Complete a chat",
        ChatCompletionRequest,
        CHAT_EXAMPLE,
        {JSON: {"schema": ref(ChatCompletion)}} | _EVENTS,
        description="The same request and answer as a line of a batch. With `stream: true` the answer comes as "
        "server-sent events; if the stream breaks, its last event is an error in the envelope.",
    ),
    _call("/v1/responses", "createResponse", "Respond", CallRequest, RESPONSE_EXAMPLE, _ANYTHING | _EVENTS),
    _call("/summary", "summarize", "Summarize a text", CallRequest, TEXT_EXAMPLE, _ANYTHING),
    _call("/usecase/classify/iab", "classifyIab", "Classify by IAB topic", CallRequest, TEXT_EXAMPLE, _ANYTHING),
    _call("/gliner", "findEntities", "Find entities in a text", CallRequest, LABELS_EXAMPLE, _ANYTHING),
)


def endpoint_operation(path: str) -> Operation:
    """Describe the synchronous call of an endpoint that lines of batches may use too."""
    return _call(
        path, f"call{path.title().replace('/', '')}", f"Call {path}", CallRequest, {"model": MODEL_ID}, _ANYTHING
    )


_MODEL_OPERATIONS = (
    Operation(
        route="GET /v1/models",
        id="listModels",
        summary="List models",
        description="The models enabled for the project; if none are configured, those of the upstream.",
        answers={"200": json_answer("The models.", wire.ModelList)},
        errors=(BadGateway("The upstream failed"), GatewayTimeout("The upstream took too long")),
    ),
    Operation(
        route="GET /v1/models/{model}",
        id="retrieveModel",
        summary="Retrieve a model",
        parameters=(parameter("model", "path", STRING | {"minLength": 1}, "Id of the model.", example=MODEL_ID),),
        answers={"200": json_answer("The model.", wire.ModelObject)},
        errors=(
            NotFound("The model x does not exist", code="model_not_found", param="model"),
            NotFound("Unknown route: GET /v1/models/x"),
            BadGateway("The upstream failed"),
            GatewayTimeout("The upstream took too long"),
        ),
    ),
)


_SERVICE_OPERATIONS = (
    Operation(
        route="GET /healthz",
        id="health",
        summary="Check whether the process is alive",
        credentials=ANONYMOUS,
        answers={"200": json_answer("The process is alive.", Liveness)},
    ),
    Operation(
        route="GET /readyz",
        id="readiness",
        summary="Check whether the service can work",
        credentials=ANONYMOUS,
        answers={
            "200": json_answer(
                "The database and the storage answer, and the database has the tables of this version or a newer one.",
                Readiness,
            )
        },
    ),
    Operation(
        route="GET /metrics",
        id="metrics",
        summary="Metrics for Prometheus",
        description="Requests from the machine itself need no credentials; others need the administrator's token.",
        credentials=ADMINISTRATOR,
        answers={"200": answer("Prometheus' text format.", {"text/plain": {"schema": STRING}})},
        errors=AUTHENTICATION_ERRORS,
    ),
    Operation(
        route="GET /openapi.json",
        id="openapi",
        summary="This document",
        credentials=ANONYMOUS,
        answers={"200": answer("OpenAPI 3.1.", {JSON: {"schema": {"type": "object"}}})},
    ),
    Operation(
        route="GET /docs",
        id="docs",
        summary="This document as a page",
        credentials=ANONYMOUS,
        answers={"200": answer("The page.", {"text/html": {"schema": STRING}}, headers=("content-security-policy",))},
    ),
    Operation(
        route="GET /docs/{asset}",
        id="docsAsset",
        summary="A file of that page",
        credentials=ANONYMOUS,
        parameters=(parameter("asset", "path", STRING | {"minLength": 1}, "Name of the file.", example="docs.css"),),
        answers={
            "200": answer(
                "A style or a script.", {kind: {"schema": STRING} for kind in ("text/css", "text/javascript")}
            )
        },
        errors=(NotFound("Unknown route: GET /docs/x"),),
    ),
)

OPERATIONS = {
    FILES: _FILE_OPERATIONS,
    BATCHES: _BATCH_OPERATIONS,
    CALLS: _CALL_OPERATIONS,
    MODELS: _MODEL_OPERATIONS,
    SERVICE: _SERVICE_OPERATIONS,
}
"""Every operation, by its tag."""
