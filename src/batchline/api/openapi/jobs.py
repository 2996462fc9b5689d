"""The operations on files and batches."""

from batchline.api.form import InvalidMultipart
from batchline.api.openapi import schemas
from batchline.api.openapi.answers import answer, json_answer
from batchline.api.openapi.operation import BATCHES, FILES, Operation, body, in_query, parameter
from batchline.api.openapi.schemas import STRING
from batchline.domain.errors import (
    ApiError,
    BatchNotFound,
    Conflict,
    FileNotFound,
    InsufficientQuota,
    InvalidInput,
    InvalidRequest,
    NotFound,
    RangeNotSatisfiable,
    RateLimited,
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
