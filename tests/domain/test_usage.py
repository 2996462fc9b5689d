"""Tokens as answers report them, and as a batch shows their sum (C, "settled": ``usage`` in OpenAI's shape)."""

import json

import pytest
from msgspec import to_builtins
from openai.types import BatchUsage

from batchline.domain import wire
from batchline.domain.usage import NOTHING, Usage, reported_usage, total


def body(**usage: object) -> bytes:
    return json.dumps({"id": "x", "choices": [], "usage": usage}).encode()


def test_the_usage_of_an_answer_is_read_with_its_details() -> None:
    """Input, output and the details that some servers give."""
    answer = body(
        prompt_tokens=12,
        completion_tokens=3,
        total_tokens=15,
        prompt_tokens_details={"cached_tokens": 8, "audio_tokens": 0},
        completion_tokens_details={"reasoning_tokens": 2},
    )
    assert reported_usage(answer) == Usage(input_tokens=12, cached_tokens=8, output_tokens=3, reasoning_tokens=2)


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b'{"usage":null}',
        b'{"usage":"much"}',
        b"[1]",
        body(prompt_tokens="12"),
        body(prompt_tokens=-1, completion_tokens=2**31),
        body(prompt_tokens=12),
        body(completion_tokens=3),
        body(prompt_tokens=None, completion_tokens=3, total_tokens=15),
        body(total_tokens=15),
        body(prompt_tokens=12, completion_tokens=-1),
        body(prompt_tokens=12, completion_tokens=1.5),
        body(prompt_tokens=12, completion_tokens=True),
        body(prompt_tokens=12, completion_tokens=2**31),
        body(prompt_tokens=2**31, completion_tokens=1),
        body(prompt_tokens=12, total_tokens=11),
        body(prompt_tokens=10**40),
        body(prompt_tokens_details=None, completion_tokens_details=None),
    ],
)
def test_nothing_and_nonsense_count_nothing(answer: bytes) -> None:
    """An upstream cannot break a batch, or its sums, with what it says of itself."""
    assert reported_usage(answer) == NOTHING


def test_an_endpoint_without_output_reports_a_total() -> None:
    assert reported_usage(body(prompt_tokens=12, total_tokens=12)) == Usage(input_tokens=12)


def test_a_count_of_0_is_a_count() -> None:
    """An answer without text is charged for its input as reported, and not by an estimate."""
    assert reported_usage(body(prompt_tokens=12, completion_tokens=0)) == Usage(input_tokens=12)
    assert reported_usage(body(input_tokens=0, output_tokens=3)) == Usage(output_tokens=3)
    assert reported_usage(body(prompt_tokens=0, completion_tokens=0, input_tokens=12, output_tokens=3)) == Usage(
        input_tokens=12, output_tokens=3
    )


def test_the_sum_has_the_shape_the_official_client_reads() -> None:
    answers = [Usage(input_tokens=12, cached_tokens=8, output_tokens=3, reasoning_tokens=2), Usage(input_tokens=1)]
    read = BatchUsage.model_validate(to_builtins(wire.BatchUsage.from_usage(total(answers))), strict=True)
    assert (read.input_tokens, read.output_tokens, read.total_tokens) == (13, 3, 16)
    assert (read.input_tokens_details.cached_tokens, read.output_tokens_details.reasoning_tokens) == (8, 2)
