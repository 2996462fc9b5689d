"""The objects that the API answers with, as typed structs.

The routes encode these structs, and the OpenAPI document derives its schemas from them. The order of the fields is the
order on the wire. A field without a default is always present; a field that is ``UNSET`` is left out.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from msgspec.json import encode as encode_json

from batchline.domain.errors import ApiError, ErrorType
from batchline.domain.money import units
from batchline.domain.progress import Eta, LineErrors, Progress
from batchline.domain.records import BATCH, BATCH_OUTPUT, Batch, File, InputFault, Organization, ProjectUsage
from batchline.domain.states import BatchStatus
from batchline.domain.usage import Usage
from batchline.domain.waiting import Count, Time, Wait

SCHEMA_REF = "#/components/schemas/{name}"
_NULL = Raw(b"null")

T = TypeVar("T")


def _ref(name: str) -> dict[str, Any]:
    """Return the schema of a field whose value is stored as JSON text and passed on unread."""
    return {"$ref": SCHEMA_REF.format(name=name)}


class _Object(Struct, forbid_unknown_fields=True):
    """An object of the API: it has the fields that are declared and no others."""


class FileObject(_Object):
    id: Annotated[str, Meta(pattern="^file-", description="`file_` instead of `file-` is accepted in requests.")]
    object: Literal["file"]
    bytes: Annotated[Count, Meta(description="Size in bytes, as measured by the service.")]
    created_at: Time
    filename: Annotated[str, Meta(description="The name that the client gave.")]
    purpose: Annotated[str, Meta(extra_json_schema={"enum": [BATCH, BATCH_OUTPUT]})]
    status: Literal["processed"]
    expires_at: Annotated[int, Meta(description="Unix seconds at which the file is removed.")]
    is_error: (
        Annotated[
            bool, Meta(description="Present only on the error file of a batch.", extra_json_schema={"const": True})
        ]
        | UnsetType
    ) = UNSET

    @classmethod
    def from_record(cls, file: File) -> Self:
        return cls(
            id=file.id,
            object="file",
            bytes=file.bytes,
            created_at=file.created_at,
            filename=file.filename,
            purpose=file.purpose,
            status="processed",
            expires_at=file.expires_at,
            is_error=True if file.is_error else UNSET,
        )


class DeletedFile(_Object):
    id: str
    object: Literal["file"]
    deleted: Annotated[bool, Meta(extra_json_schema={"const": True})]


class InputTokensDetails(_Object):
    cached_tokens: Annotated[Count, Meta(description="Input tokens that the upstream had cached.")]


class OutputTokensDetails(_Object):
    reasoning_tokens: Annotated[Count, Meta(description="Output tokens spent on reasoning.")]


class BatchUsage(_Object):
    """Tokens of all lines recorded so far."""

    input_tokens: Annotated[Count, Meta(description="Tokens read.")]
    input_tokens_details: InputTokensDetails
    output_tokens: Annotated[Count, Meta(description="Tokens written.")]
    output_tokens_details: OutputTokensDetails
    total_tokens: Annotated[Count, Meta(description="Input and output tokens together.")]

    @classmethod
    def from_usage(cls, usage: Usage) -> Self:
        return cls(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )


class RequestCounts(_Object):
    total: Annotated[Count, Meta(description="Lines of the input file.")]
    completed: Annotated[Count, Meta(description="Lines in the output file.")]
    failed: Annotated[Count, Meta(description="Lines in the error file.")]

    @classmethod
    def from_record(cls, batch: Batch) -> Self:
        return cls(total=batch.total, completed=batch.completed, failed=batch.failed)


class BatchError(_Object):
    code: str
    message: str
    line: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Number of the line, counted from 1.")]
    param: str | None


class BatchErrors(_Object):
    """The faults of the input file: the first hundred invalid lines."""

    object: Literal["list"]
    data: Annotated[list[BatchError], Meta(max_length=100)]


def errors_of(faults: Iterable[InputFault]) -> BatchErrors:
    """Return what is wrong with an input file."""
    errors = [
        BatchError(code="invalid_request_error", message=fault.message, line=fault.line, param=None) for fault in faults
    ]
    return BatchErrors(object="list", data=errors)


def encode_errors(faults: Iterable[InputFault]) -> bytes:
    """Return ``errors`` of a failed batch as JSON, as it is stored in the batch's row."""
    return encode_json(errors_of(faults))


class BatchObject(_Object):
    id: Annotated[str, Meta(pattern="^batch_[0-9A-HJKMNP-TV-Z]{26}$")]
    object: Literal["batch"]
    endpoint: str
    errors: Annotated[Raw, Meta(extra_json_schema={"anyOf": [_ref("BatchErrors"), {"type": "null"}]})]
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: Annotated[str | None, Meta(description="Set at the end if at least one line succeeded.")]
    error_file_id: Annotated[str | None, Meta(description="Set at the end if at least one line failed.")]
    created_at: Time
    in_progress_at: Annotated[int | None, Meta(description="Unix seconds at which it became in_progress, or null.")]
    expires_at: Annotated[int, Meta(description="Unix seconds after which no line is started.")]
    finalizing_at: Annotated[int | None, Meta(description="Unix seconds at which it became finalizing, or null.")]
    completed_at: Annotated[int | None, Meta(description="Unix seconds at which it became completed, or null.")]
    failed_at: Annotated[int | None, Meta(description="Unix seconds at which it became failed, or null.")]
    expired_at: Annotated[int | None, Meta(description="Unix seconds at which it became expired, or null.")]
    cancelling_at: Annotated[int | None, Meta(description="Unix seconds at which it became cancelling, or null.")]
    cancelled_at: Annotated[int | None, Meta(description="Unix seconds at which it became cancelled, or null.")]
    request_counts: RequestCounts
    metadata: Annotated[Raw, Meta(description="As it was given.", extra_json_schema={"type": "object"})]
    model: Annotated[str | None, Meta(description="The model of all lines, or null if they name several.")]
    usage: BatchUsage

    @classmethod
    def from_record(cls, batch: Batch) -> Self:
        return cls(
            id=batch.id,
            object="batch",
            endpoint=batch.endpoint,
            errors=_NULL if batch.errors is None else Raw(batch.errors),
            input_file_id=batch.input_file_id,
            completion_window="24h",
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=batch.created_at,
            in_progress_at=batch.in_progress_at,
            expires_at=batch.expires_at,
            finalizing_at=batch.finalizing_at,
            completed_at=batch.completed_at,
            failed_at=batch.failed_at,
            expired_at=batch.expired_at,
            cancelling_at=batch.cancelling_at,
            cancelled_at=batch.cancelled_at,
            request_counts=RequestCounts.from_record(batch),
            metadata=Raw(batch.metadata),
            model=batch.model,
            usage=BatchUsage.from_usage(batch.usage),
        )


Money = Annotated[Raw, Meta(extra_json_schema={"type": "number"})]
"""An amount in units, with at most nine decimal places. It is exact, unlike a float."""
OptionalMoney = Annotated[Raw, Meta(extra_json_schema={"type": ["number", "null"]})]


def _money(amount: int) -> Raw:
    return Raw(units(amount).encode())


def optional_money(amount: int | None) -> Raw:
    """Return an amount of nano-units as a number of units, or null."""
    return Raw(b"null") if amount is None else _money(amount)


class LineErrorSample(_Object):
    """The first line that failed with a code, both texts cut to 300 characters."""

    custom_id: Annotated[str, Meta(max_length=300)]
    message: Annotated[str, Meta(max_length=300)]


class LineErrorCount(_Object):
    code: Annotated[str, Meta(description="As in BatchErrorLine.")]
    count: Annotated[Count, Meta(description="Lines that failed with this code.")]
    sample: Annotated[Raw, Meta(extra_json_schema=_ref("LineErrorSample"))]

    @classmethod
    def from_errors(cls, errors: LineErrors) -> Self:
        return cls(code=errors.code, count=errors.count, sample=Raw(errors.sample))


class BatchProgress(_Object):
    object: Literal["batch.progress"]
    batch_id: str
    status: BatchStatus
    request_counts: RequestCounts
    rate: Annotated[float, Meta(ge=0, description="Lines per second over the last minute.")]
    eta: Annotated[
        Eta | None, Meta(description="Null if there is no rate, if no line is left, or while the lines are paused.")
    ]
    waiting_for: Annotated[
        Wait | None,
        Meta(
            description="Why lines that are not in flight wait; null if none do. If there are several reasons, the "
            "most important one is given."
        ),
    ]
    in_flight: Annotated[Count, Meta(description="Lines that were sent to an upstream and have no answer yet.")]
    concurrency: Annotated[
        Count, Meta(description="How many lines the upstreams of the models take in parallel, as measured so far.")
    ]
    errors: Annotated[list[LineErrorCount], Meta(description="By code, the most frequent first.")]
    usage: Annotated[BatchUsage, Meta(description="Of the lines that ran.")]
    reused: Annotated[Count, Meta(description="Lines that took an earlier answer, without a request and a charge.")]
    cost: Annotated[Money, Meta(description="What the batch was charged so far, in units.")]
    saved: Annotated[Money, Meta(description="What the reused lines would have cost, in units.")]
    max_cost: Annotated[OptionalMoney, Meta(description="What the batch may cost, in units, or null.")]
    parent_batch_id: Annotated[
        str | None, Meta(description="The batch whose failed lines this one runs again, or null.")
    ]
    child_batch_ids: Annotated[
        list[str], Meta(description="The batches that run failed lines of this one again, oldest first.")
    ]

    @classmethod
    def from_progress(cls, progress: Progress) -> Self:
        batch, activity = progress.batch, progress.activity
        return cls(
            object="batch.progress",
            batch_id=batch.id,
            status=batch.status,
            request_counts=RequestCounts.from_record(batch),
            rate=round(progress.rate, 3),
            eta=progress.eta,
            waiting_for=activity.waiting_for,
            in_flight=activity.in_flight,
            concurrency=activity.concurrency,
            errors=[LineErrorCount.from_errors(errors) for errors in progress.errors],
            usage=BatchUsage.from_usage(batch.usage),
            reused=progress.bill.reused,
            cost=_money(progress.bill.cost),
            saved=_money(progress.bill.saved),
            max_cost=optional_money(batch.max_cost),
            parent_batch_id=batch.parent_batch_id,
            child_batch_ids=progress.child_batch_ids,
        )


class ModelCheckObject(_Object):
    """The lines of one model in an input file."""

    model: Annotated[str, Meta(description="Empty if the lines name none.")]
    lines: Count
    enabled: Annotated[bool, Meta(description="Whether the project may use the model; otherwise the lines would fail.")]
    input_tokens: Count
    output_tokens_at_most: Annotated[Count | None, Meta(description="Null if a line sets no limit.")]
    estimated: Annotated[
        bool, Meta(description="Whether not all input tokens were counted by the model's own tokenizer.")
    ]
    counted_lines: Annotated[
        Count,
        Meta(description="Lines that this tokenizer counted. The others are estimated to be like these, or by size."),
    ]
    cost_at_most: Annotated[
        OptionalMoney, Meta(description="In units; null without metering, or if a line sets no limit.")
    ]


class CheckSeconds(_Object):
    """The seconds that the batch would take, judged by the last batches of the same models."""

    low: Count
    high: Count


class BatchCheck(_Object):
    object: Literal["batch.check"]
    valid: Annotated[bool, Meta(description="Whether a create would accept the file.")]
    errors: Annotated[BatchErrors | None, Meta(description="As in a failed batch; null if the file is valid.")]
    lines: Count
    models: list[ModelCheckObject]
    duplicates: Annotated[Count, Meta(description="Lines whose body is that of an earlier line.")]
    seconds: Annotated[CheckSeconds | None, Meta(description="Null if there are no such batches.")]


class UsageBucket(_Object):
    """The use of one model from `start_time` on, for an hour or a day."""

    start_time: int
    model: str
    lines: Annotated[Count, Meta(description="Answers to lines of batches.")]
    requests: Annotated[Count, Meta(description="All answers, those to synchronous calls included.")]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    cost: Annotated[Money, Meta(description="In units.")]
    reused: Annotated[Count, Meta(description="Lines that took an earlier answer. They are no requests.")]
    saved: Annotated[Money, Meta(description="What these lines would have cost, in units.")]

    @classmethod
    def from_record(cls, usage: ProjectUsage) -> Self:
        return cls(
            start_time=usage.start,
            model=usage.model,
            lines=max(0, usage.lines),
            requests=max(0, usage.requests),
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            cost=_money(usage.cost),
            reused=max(0, usage.reused),
            saved=_money(usage.saved),
        )


class UsageReport(_Object):
    object: Literal["usage"]
    balance: Annotated[OptionalMoney, Meta(description="Of the organization, in units; null without metering.")]
    credits: Annotated[OptionalMoney, Meta(description="Free credits of the organization; null without metering.")]
    bucket: Literal["hour", "day"]
    start_time: Annotated[int, Meta(description="The beginning of the first bucket.")]
    end_time: int
    data: Annotated[list[UsageBucket], Meta(description="Oldest first; a bucket without usage is left out.")]

    @classmethod
    def from_entries(
        cls, usage: Sequence[ProjectUsage], *, organization: Organization | None, bucket: str, start: int, end: int
    ) -> Self:
        return cls(
            object="usage",
            balance=optional_money(None if organization is None else organization.balance),
            credits=optional_money(None if organization is None else organization.credits),
            bucket="hour" if bucket == "hour" else "day",
            start_time=start,
            end_time=end,
            data=[UsageBucket.from_record(one) for one in usage],
        )


class _Page(_Object, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    first_id: Annotated[str | None, Meta(description="Null if the page is empty.")]
    last_id: Annotated[str | None, Meta(description="Null if the page is empty.")]
    has_more: Annotated[bool, Meta(description="Whether another page follows; request it with `after`.")]


class FileList(_Page[FileObject]):
    @classmethod
    def from_records(cls, files: Sequence[File], *, has_more: bool) -> Self:
        return cls(
            object="list",
            data=[FileObject.from_record(file) for file in files],
            first_id=files[0].id if files else None,
            last_id=files[-1].id if files else None,
            has_more=has_more,
        )


class BatchList(_Page[BatchObject]):
    @classmethod
    def from_records(cls, batches: Sequence[Batch], *, has_more: bool) -> Self:
        return cls(
            object="list",
            data=[BatchObject.from_record(batch) for batch in batches],
            first_id=batches[0].id if batches else None,
            last_id=batches[-1].id if batches else None,
            has_more=has_more,
        )


class ModelObject(_Object):
    id: str
    object: Literal["model"]
    created: Annotated[int, Meta(description="Unix seconds, or 0 if unknown.")]
    owned_by: str


class ModelList(_Object):
    object: Literal["list"]
    data: list[ModelObject]


class ErrorDetail(_Object):
    message: Annotated[str, Meta(description="For a person to read.")]
    type: ErrorType
    code: Annotated[str | None, Meta(description="For a program to decide by.")]
    param: Annotated[str | None, Meta(description="The field, parameter or header that is wrong.")]
    line: Annotated[int, Meta(ge=1, description="The first invalid line of an input file.")] | UnsetType = UNSET


class ErrorBody(_Object):
    """The envelope of every error answer."""

    error: ErrorDetail

    @classmethod
    def from_error(cls, error: ApiError) -> Self:
        return cls(
            error=ErrorDetail(
                message=error.message,
                type=error.type,
                code=error.code,
                param=error.param,
                line=UNSET if error.line is None else error.line,
            )
        )


ANSWERS = (
    FileObject,
    FileList,
    DeletedFile,
    BatchObject,
    BatchList,
    BatchErrors,
    BatchProgress,
    BatchCheck,
    UsageReport,
    LineErrorSample,
    ModelObject,
    ModelList,
    ErrorBody,
)
"""Every object that the OpenAPI document describes, apart from those they contain."""
