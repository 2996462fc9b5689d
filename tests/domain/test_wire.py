"""The bytes of every object that the API answers with, against frozen examples: field order, nulls, absent fields."""

import pytest
from msgspec.json import encode

from batchline.domain.errors import InvalidInput, MissingCredentials
from batchline.domain.progress import Activity, Eta, LineErrors, Progress
from batchline.domain.records import Batch, File, InputFault
from batchline.domain.states import BatchStatus
from batchline.domain.waiting import UpstreamPause
from batchline.domain.wire import (
    BatchList,
    BatchObject,
    BatchProgress,
    ErrorBody,
    FileList,
    FileObject,
    encode_errors,
)

_EMPTY_USAGE = (
    '"usage":{"input_tokens":0,"input_tokens_details":{"cached_tokens":0},'
    '"output_tokens":0,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":0}'
)
_USAGE = (
    '"usage":{"input_tokens":11,"input_tokens_details":{"cached_tokens":12},'
    '"output_tokens":13,"output_tokens_details":{"reasoning_tokens":14},"total_tokens":24}'
)
_NEW_BATCH = (
    '{"id":"batch_1","object":"batch","endpoint":"/v1/chat/completions","errors":null,"input_file_id":"file-1",'
    '"completion_window":"24h","status":"validating","output_file_id":null,"error_file_id":null,"created_at":1,'
    '"in_progress_at":null,"expires_at":2,"finalizing_at":null,"completed_at":null,"failed_at":null,'
    '"expired_at":null,"cancelling_at":null,"cancelled_at":null,'
    '"request_counts":{"total":0,"completed":0,"failed":0},"metadata":{"b": 1,"a":[2]},"model":null,'
    f"{_EMPTY_USAGE}}}"
)
_ERRORS = (
    '{"object":"list","data":[{"code":"invalid_request_error","message":"m","line":3,"param":null},'
    '{"code":"invalid_request_error","message":"n","line":null,"param":null}]}'
)
_FULL_BATCH = (
    f'{{"id":"batch_1","object":"batch","endpoint":"/v1/chat/completions","errors":{_ERRORS},'
    '"input_file_id":"file-1","completion_window":"24h","status":"failed","output_file_id":"file-2",'
    '"error_file_id":"file-3","created_at":1,"in_progress_at":3,"expires_at":2,"finalizing_at":4,"completed_at":5,'
    '"failed_at":6,"expired_at":7,"cancelling_at":8,"cancelled_at":9,'
    '"request_counts":{"total":10,"completed":4,"failed":3},"metadata":{"b": 1,"a":[2]},"model":"m",'
    f"{_USAGE}}}"
)
_FILE = (
    '{"id":"file-1","object":"file","bytes":7,"created_at":1,"filename":"iné.jsonl","purpose":"batch",'
    '"status":"processed","expires_at":2}'
)


def _file(*, is_error: bool = False) -> File:
    return File(
        id="file-1",
        project_id="p",
        filename="iné.jsonl",
        purpose="batch_output" if is_error else "batch",
        bytes=7,
        created_at=1,
        expires_at=2,
        is_error=is_error,
        object_key="k",
    )


def _new_batch() -> Batch:
    return Batch(
        id="batch_1",
        project_id="p",
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        metadata=b'{"b": 1,"a":[2]}',
        status=BatchStatus.VALIDATING,
        created_at=1,
        expires_at=2,
    )


def _full_batch() -> Batch:
    return Batch(
        id="batch_1",
        project_id="p",
        key_id="k",
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        metadata=b'{"b": 1,"a":[2]}',
        status=BatchStatus.FAILED,
        created_at=1,
        expires_at=2,
        errors=encode_errors([InputFault("m", 3), InputFault("n")]),
        output_file_id="file-2",
        error_file_id="file-3",
        in_progress_at=3,
        finalizing_at=4,
        completed_at=5,
        failed_at=6,
        expired_at=7,
        cancelling_at=8,
        cancelled_at=9,
        total=10,
        completed=4,
        failed=3,
        input_tokens=11,
        cached_tokens=12,
        output_tokens=13,
        reasoning_tokens=14,
        model="m",
    )


def _running() -> Progress:
    pause = UpstreamPause(upstream="default", detail="refused", since=50, model=None)
    return Progress(
        batch=_full_batch(),
        rate=0.12345,
        eta=Eta(seconds=3, low=2, high=4),
        activity=Activity(in_flight=1, concurrency=16, waiting_for=pause),
        errors=[LineErrors(code="c", count=2, sample=b'{"custom_id":"x","message":"y"}')],
        child_batch_ids=["batch_2"],
    )


def _idle() -> Progress:
    activity = Activity(in_flight=0, concurrency=0, waiting_for=None)
    return Progress(batch=_full_batch(), rate=0.0, eta=None, activity=activity, errors=[])


_PROGRESS_START = (
    '{"object":"batch.progress","batch_id":"batch_1","status":"failed",'
    '"request_counts":{"total":10,"completed":4,"failed":3},'
)


@pytest.mark.parametrize(
    ("value", "frozen"),
    [
        (FileObject.from_record(_file()), _FILE),
        (
            FileObject.from_record(_file(is_error=True)),
            _FILE.replace('"batch"', '"batch_output"').replace("}", ',"is_error":true}'),
        ),
        (BatchObject.from_record(_new_batch()), _NEW_BATCH),
        (BatchObject.from_record(_full_batch()), _FULL_BATCH),
        (
            BatchProgress.from_progress(_running()),
            f'{_PROGRESS_START}"rate":0.123,"eta":{{"seconds":3,"low":2,"high":4}},'
            '"waiting_for":{"reason":"upstream_paused","upstream":"default","detail":"refused","since":50,"model":null},'
            '"in_flight":1,"concurrency":16,'
            f'"errors":[{{"code":"c","count":2,"sample":{{"custom_id":"x","message":"y"}}}}],{_USAGE},'
            '"reused":0,"cost":0,"saved":0,"max_cost":null,"parent_batch_id":null,"child_batch_ids":["batch_2"]}',
        ),
        (
            BatchProgress.from_progress(_idle()),
            f'{_PROGRESS_START}"rate":0.0,"eta":null,"waiting_for":null,'
            f'"in_flight":0,"concurrency":0,"errors":[],{_USAGE},"reused":0,"cost":0,"saved":0,"max_cost":null,'
            '"parent_batch_id":null,"child_batch_ids":[]}',
        ),
        (
            FileList.from_records([], has_more=False),
            '{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}',
        ),
        (
            FileList.from_records([_file()], has_more=True),
            f'{{"object":"list","data":[{_FILE}],"first_id":"file-1","last_id":"file-1","has_more":true}}',
        ),
        (
            BatchList.from_records([_new_batch()], has_more=False),
            f'{{"object":"list","data":[{_NEW_BATCH}],"first_id":"batch_1","last_id":"batch_1","has_more":false}}',
        ),
        (
            ErrorBody.from_error(InvalidInput("m", line=2)),
            '{"error":{"message":"m","type":"invalid_request_error","code":"invalid_request_error",'
            '"param":null,"line":2}}',
        ),
        (
            ErrorBody.from_error(MissingCredentials()),
            '{"error":{"message":"Missing authentication headers","type":"authentication_error",'
            '"code":null,"param":null}}',
        ),
    ],
)
def test_the_bytes_on_the_wire_stay_as_they_are(value: object, frozen: str) -> None:
    assert encode(value).decode() == frozen
