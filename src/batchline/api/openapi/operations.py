"""The operations on files and batches."""

from typing import Any

from batchline.api.multipart import InvalidMultipart
from batchline.api.openapi import schemas
from batchline.api.openapi.answers import AUTHENTICATION, Part, answer, json_answer
from batchline.api.openapi.operation import (
    ADMINISTRATOR,
    BATCHES,
    CALLS,
    FILES,
    MODELS,
    NOBODY,
    SERVICE,
    Operation,
    body,
    in_query,
    parameter,
)
from batchline.api.openapi.schemas import STRING, ref
from batchline.domain.errors import (
    ApiError,
    BadGateway,
    BatchNotFound,
    Conflict,
    FileNotFound,
    GatewayTimeout,
    InsufficientQuota,
    InvalidInput,
    InvalidRequest,
    NotFound,
    RangeNotSatisfiable,
    RateLimited,
    Refused,
    StorageFailed,
    TooLarge,
)
from batchline.domain.records import BATCH, BATCH_OUTPUT
from batchline.domain.states import BatchStatus


def _invalid(message: str, param: str, code: str | None = None) -> ApiError:
    return InvalidRequest(message, code=code, param=param)


_FILE_ID = parameter("file_id", "path", STRING | {"minLength": 1}, "Of a file.", example=schemas.FILE_ID)
_BATCH_ID = parameter("batch_id", "path", STRING | {"minLength": 1}, "Of a batch.", example=schemas.BATCH_ID)
_AFTER = in_query("after", STRING, "The id of the last item of the page before.")
_UNKNOWN_CURSOR = _invalid("after names nothing in this project", "after")
_NO_FILE = FileNotFound(schemas.FILE_ID)
_NO_BATCH = BatchNotFound(schemas.BATCH_ID)
_SPENDING = (
    RateLimited("This project has 64 uploads and creates under way already. Try again shortly.", retry_after=1),
    InsufficientQuota(),
)

FILE_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/files",
        id="createFile",
        tag=FILES,
        summary="Upload a file",
        description="Stored as it comes and checked when a batch is made of it.",
        body=body("multipart/form-data", "Upload"),
        answers={"200": json_answer("The file.", "File")},
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
        method="get",
        path="/v1/files",
        id="listFiles",
        tag=FILES,
        summary="List files",
        parameters=(
            in_query("purpose", {"enum": [BATCH, BATCH_OUTPUT]}, "Only files of this purpose."),
            in_query("order", {"enum": ["desc", "asc"], "default": "desc"}, "By creation."),
            _AFTER,
            in_query(
                "limit",
                {"type": "integer", "minimum": 1, "default": 10_000},
                "Files of a page; more than 10,000 are taken as 10,000.",
            ),
        ),
        answers={"200": json_answer("A page.", "FileList")},
        errors=(_invalid("limit must be a positive integer", "limit", "invalid_limit"), _UNKNOWN_CURSOR),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}",
        id="retrieveFile",
        tag=FILES,
        summary="Retrieve a file",
        parameters=(_FILE_ID,),
        answers={"200": json_answer("The file.", "File")},
        errors=(_NO_FILE,),
    ),
    Operation(
        method="delete",
        path="/v1/files/{file_id}",
        id="deleteFile",
        tag=FILES,
        summary="Delete a file",
        description="A running batch keeps what it needs of its input.",
        parameters=(_FILE_ID,),
        answers={"200": json_answer("It is gone.", "DeletedFile")},
        errors=(_NO_FILE,),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}/content",
        id="downloadFile",
        tag=FILES,
        summary="Download a file",
        description="An input is what was uploaded; an output has lines as in BatchOutputLine, an error file lines "
        "as in BatchErrorLine. A download that broke off can be resumed with `Range`.",
        parameters=(
            _FILE_ID,
            parameter("Range", "header", STRING, "One range of bytes; others are ignored.", example="bytes=0-99"),
        ),
        answers={
            status: answer(
                description,
                {"application/jsonl": {"schema": STRING | {"format": "binary"}}},
                headers=("content-length", "content-disposition", "accept-ranges", *more),
            )
            for status, description, more in (("200", "All of it.", ()), ("206", "A part of it.", ("content-range",)))
        },
        errors=(
            _NO_FILE,
            RangeNotSatisfiable(
                "The range lies outside of the file's 1834 bytes", headers={"content-range": "bytes */1834"}
            ),
        ),
    ),
)

BATCH_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/batches",
        id="createBatch",
        tag=BATCHES,
        summary="Create a batch",
        description="The whole input is checked before the answer. A batch with a wrong line is kept as `failed`, "
        "with all its faults: its id is in `x-batch-id`. Once the answer is 200 the batch will be run, whatever "
        "happens to the machine.",
        parameters=(
            parameter(
                "Idempotency-Key",
                "header",
                STRING | {"maxLength": 255},
                "Kept for a day: a second create with it gets the answer to the first.",
            ),
            parameter(
                "x-stainless-retry-count",
                "header",
                STRING,
                "Sent by the SDKs: a retry whose first answer was lost gets that answer.",
            ),
        ),
        body=body("application/json", "CreateBatch"),
        answers={"200": json_answer("The batch.", "Batch", headers=("x-batchline-replayed",))},
        errors=(
            _invalid("input_file_id is required", "input_file_id"),
            InvalidInput("Line 2 is missing custom_id", line=2),
            NotFound(f"Input file not found: {schemas.FILE_ID}", code="file_not_found", param="input_file_id"),
            Conflict(
                "This Idempotency-Key was used with another body",
                code="idempotency_key_reused",
                param="Idempotency-Key",
            ),
            TooLarge("The request's body exceeds 1048576 bytes"),
            *_SPENDING,
        ),
    ),
    Operation(
        method="get",
        path="/v1/batches",
        id="listBatches",
        tag=BATCHES,
        summary="List batches",
        description="Newest first.",
        parameters=(
            _AFTER,
            in_query("limit", {"type": "integer", "default": 20}, "Batches of a page, brought into 1 to 100."),
            in_query("status", {"enum": [status.value for status in BatchStatus]}, "Only batches in this state."),
            in_query("created_after", {"type": "integer"}, "Unix seconds."),
            in_query("created_before", {"type": "integer"}, "Unix seconds."),
        ),
        answers={"200": json_answer("A page.", "BatchList")},
        errors=(_invalid("limit must be an integer", "limit", "invalid_limit"), _UNKNOWN_CURSOR),
    ),
    Operation(
        method="get",
        path="/v1/batches/{batch_id}",
        id="retrieveBatch",
        tag=BATCHES,
        summary="Retrieve a batch",
        description="Counts grow while it runs and are final in a terminal state.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The batch.", "Batch")},
        errors=(_NO_BATCH,),
    ),
    Operation(
        method="get",
        path="/v1/batches/{batch_id}/progress",
        id="retrieveProgress",
        tag=BATCHES,
        summary="How far is a batch?",
        description="How fast it goes and how long it will take, what it waits for, and what went wrong so far.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("Its progress.", "BatchProgress")},
        errors=(_NO_BATCH,),
    ),
    Operation(
        method="post",
        path="/v1/batches/{batch_id}/cancel",
        id="cancelBatch",
        tag=BATCHES,
        summary="Cancel a batch",
        description="Lines in flight finish and count; the others end as `batch_cancelled`. Doing it twice is fine.",
        parameters=(_BATCH_ID,),
        answers={"200": json_answer("The batch, cancelling or cancelled.", "Batch")},
        errors=(
            _NO_BATCH,
            Conflict(
                f"Batch {schemas.BATCH_ID} is completed and can no longer be cancelled", code="batch_not_cancellable"
            ),
        ),
    ),
)


_WRONG, _TOO_LONG = "invalid_request_error", "context_length_exceeded"
_PASSED_ON = (
    (400, _WRONG),
    (400, _TOO_LONG),
    (401, "authentication_error"),
    (403, "authentication_error"),
    (404, "not_found_error"),
    (408, _WRONG),
    (409, _WRONG),
    (413, "request_too_large"),
    (420, "insufficient_quota"),
    (431, _WRONG),
    (431, _TOO_LONG),
)
"""What the upstream answers with, where that is not as with any other status from 400 to 499."""

_CALL_ERRORS = (
    *(Refused(status, f"upstream returned {status}", code=code) for status, code in _PASSED_ON),
    RateLimited("This project has 256 calls under way already. Try again shortly.", retry_after=1),
    InsufficientQuota(),
    BadGateway("The upstream failed"),
    GatewayTimeout("The upstream took too long"),
)
_EVENTS = {"text/event-stream": {"example": 'data: {"choices":[…]}\n\ndata: [DONE]\n\n'}}
_ANYTHING = {"application/json": {"schema": {"description": "What the upstream answered, unchanged."}}}


def _call(path: str, name: str, summary: str, schema: str, example: object, content: Part, **more: Any) -> Operation:
    return Operation(
        method="post",
        path=path,
        id=name,
        tag=CALLS,
        summary=summary,
        body=body("application/json", schema, example),
        answers={"2XX": answer("The upstream's answer, with its status.", content)},
        errors=_CALL_ERRORS,
        **more,
    )


CALL_OPERATIONS = (
    _call(
        "/v1/chat/completions",
        "createChatCompletion",
        "Complete a chat",
        "ChatRequest",
        schemas.CHAT_EXAMPLE,
        {"application/json": {"schema": ref("ChatCompletion")}} | _EVENTS,
        description="The same request and answer as a line of a batch. With `stream: true` the answer comes as "
        "server-sent events; if it breaks off, its last event is an error in the envelope.",
    ),
    _call("/v1/responses", "createResponse", "Respond", "Call", schemas.RESPONSE_EXAMPLE, _ANYTHING | _EVENTS),
    _call("/summary", "summarize", "Summarize a text", "Call", schemas.TEXT_EXAMPLE, _ANYTHING),
    _call("/usecase/classify/iab", "classifyIab", "Classify by IAB topic", "Call", schemas.TEXT_EXAMPLE, _ANYTHING),
    _call("/gliner", "findEntities", "Find entities in a text", "Call", schemas.LABELS_EXAMPLE, _ANYTHING),
)

MODEL_OPERATIONS = (
    Operation(
        method="get",
        path="/v1/models",
        id="listModels",
        tag=MODELS,
        summary="List models",
        description="Those enabled for the project; where none are configured, the upstream's own.",
        answers={"200": json_answer("The models.", "ModelList")},
        errors=(BadGateway("The upstream failed"), GatewayTimeout("The upstream took too long")),
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        id="retrieveModel",
        tag=MODELS,
        summary="Retrieve a model",
        parameters=(parameter("model", "path", STRING | {"minLength": 1}, "Its id.", example=schemas.MODEL_ID),),
        answers={"200": json_answer("The model.", "Model")},
        errors=(
            NotFound("The model x does not exist", code="model_not_found", param="model"),
            NotFound("Unknown route: GET /v1/models/x"),
            BadGateway("The upstream failed"),
            GatewayTimeout("The upstream took too long"),
        ),
    ),
)


def _status_answer(description: str, *names: str) -> Part:
    schema = {
        "type": "object",
        "required": list(names),
        "additionalProperties": False,
        "properties": dict.fromkeys(names, STRING),
    }
    return answer(description, {"application/json": {"schema": schema}})


SERVICE_OPERATIONS = (
    Operation(
        method="get",
        path="/healthz",
        id="health",
        tag=SERVICE,
        summary="Is the process alive?",
        asks_for=NOBODY,
        answers={"200": _status_answer("It is.", "status")},
    ),
    Operation(
        method="get",
        path="/readyz",
        id="readiness",
        tag=SERVICE,
        summary="Can it do its work?",
        asks_for=NOBODY,
        answers={"200": _status_answer("It can.", "status", "database", "storage")},
    ),
    Operation(
        method="get",
        path="/metrics",
        id="metrics",
        tag=SERVICE,
        summary="Metrics for Prometheus",
        description="Open to the machine itself; others need the administrator's token.",
        asks_for=ADMINISTRATOR,
        answers={"200": answer("Prometheus' text format.", {"text/plain": {"schema": STRING}})},
        errors=AUTHENTICATION,
    ),
    Operation(
        method="get",
        path="/openapi.json",
        id="openapi",
        tag=SERVICE,
        summary="This document",
        asks_for=NOBODY,
        answers={"200": answer("OpenAPI 3.1.", {"application/json": {"schema": {"type": "object"}}})},
    ),
    Operation(
        method="get",
        path="/docs",
        id="docs",
        tag=SERVICE,
        summary="This document as a page",
        asks_for=NOBODY,
        answers={"200": answer("The page.", {"text/html": {"schema": STRING}}, headers=("content-security-policy",))},
    ),
    Operation(
        method="get",
        path="/docs/{asset}",
        id="docsAsset",
        tag=SERVICE,
        summary="A part of that page",
        asks_for=NOBODY,
        parameters=(parameter("asset", "path", STRING | {"minLength": 1}, "Its name.", example="docs.css"),),
        answers={
            "200": answer(
                "A style or a script.", {kind: {"schema": STRING} for kind in ("text/css", "text/javascript")}
            )
        },
        errors=(NotFound("Unknown route: GET /docs/x"),),
    ),
)
