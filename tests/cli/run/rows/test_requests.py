"""Rows as lines of batches, and answers as values."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from batchline.cli.run.rows.requests import RowOutcome, RowRequests, answer_columns, load_schema, read_outcomes
from batchline.pipeline.rows.requests import Prompts
from batchline.pipeline.rows.template import parse_template

_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"label": {}, "id": {}}}


def test_a_row_becomes_a_line() -> None:
    prompts = Prompts(
        prompt=parse_template("--prompt", "Classify {text}"),
        system=parse_template("--system", "You are {role}"),
        model="m",
        schema=_SCHEMA,
    )
    requests = RowRequests(prompts=prompts, patch={"temperature": 0})
    [(number, line)] = requests.lines([{"text": "a", "role": "kind"}])
    assert number == 1
    assert json.loads(line) == {
        "custom_id": "row-1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "m",
            "messages": [
                {"role": "system", "content": "You are kind"},
                {"role": "user", "content": "Classify a"},
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True},
            },
            "temperature": 0,
        },
    }


def test_answers_have_columns_that_the_table_does_not_have() -> None:
    plain = answer_columns(["id", "answer"], None)
    assert plain.names == ["answer_answer", "error"]
    assert plain.values(RowOutcome(text="yes")) == {"answer_answer": "yes", "error": None}
    assert plain.values(RowOutcome(error="bad")) == {"answer_answer": None, "error": "bad"}
    assert plain.values(None)["error"] == "the row has no result"


def test_each_field_of_a_schema_is_a_column() -> None:
    columns = answer_columns(["id"], _SCHEMA)
    assert columns.names == ["label", "id_answer", "error"]
    assert columns.values(RowOutcome(text='{"label": "good", "id": 3}')) == {
        "label": "good",
        "id_answer": 3,
        "error": None,
    }
    assert columns.values(RowOutcome(text="[1]"))["error"] == "the answer is not a JSON object: [1]"
    assert columns.values(RowOutcome(text="oops"))["error"] == "the answer is not a JSON object: oops"


@pytest.mark.parametrize("text", ["[" * 5000, '{"label":' * 5000])
def test_an_answer_that_is_nested_too_deep_does_not_cost_the_other_rows_theirs(text: str) -> None:
    """A small model that is held to JSON may repeat an opening bracket until its tokens are used up."""
    columns = answer_columns(["id"], {"properties": {"label": {}}})
    values = columns.values(RowOutcome(text=text))
    assert values["label"] is None
    assert values["error"].startswith("the answer is not a JSON object: ")


@pytest.mark.parametrize("content", ["nope", "[]", "{}", '{"properties": {}}'])
def test_a_schema_describes_an_object(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(click.UsageError, match="--schema"):
        load_schema(path)


def test_outcomes_are_read_from_both_files(tmp_path: Path) -> None:
    output, errors = tmp_path / "o", tmp_path / "e"

    def answer(custom_id: str, message: object) -> str:
        body = {"choices": [{"message": message}] if message else []}
        return json.dumps({"custom_id": custom_id, "response": {"body": body}, "error": None}) + "\n"

    output.write_text(answer("a", {"content": "hi"}) + answer("b", {"refusal": "no"}) + answer("c", None))
    errors.write_text(json.dumps({"custom_id": "d", "response": None, "error": {"code": "x", "message": "y"}}) + "\n")
    assert dict(read_outcomes(output, errors, tmp_path / "none")) == {
        "a": RowOutcome(text="hi"),
        "b": RowOutcome(error="no"),
        "c": RowOutcome(error="the answer has no text"),
        "d": RowOutcome(error="x: y"),
    }


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (rb'{"choices":[{"message":{"content":"cut \ud83d"}}]}', RowOutcome(text="cut \ufffd")),
        (
            b'{"choices":[{"message":{"content":[{"type":"thinking","thinking":[]},{"type":"text","text":"hi"}]}}]}',
            RowOutcome(text="hi"),
        ),
        (b'{"choices":null}', RowOutcome(error="the answer cannot be read as a chat completion")),
        (
            b'{"choices":[{"message":{"content":7}}]}',
            RowOutcome(error="the answer cannot be read as a chat completion"),
        ),
        (b'{"error":{"code":"bad","message":"no such field"}}', RowOutcome(error="bad: no such field")),
    ],
)
def test_an_unusual_answer_does_not_cost_the_other_rows_theirs(
    tmp_path: Path, body: bytes, outcome: RowOutcome
) -> None:
    """D1: a model's server may send half an emoji, content in parts, or what is no chat completion at all."""
    usual = b'{"custom_id":"b","response":{"body":{"choices":[{"message":{"content":"hi"}}]}},"error":null}\n'
    lost = b'{"custom_id":null,"response":null,"error":{"code":"internal_error","message":"damaged"}}\n'
    path = tmp_path / "o"
    path.write_bytes(b'{"custom_id":"a","response":{"body":%b},"error":null}\n' % body + lost + usual)
    assert dict(read_outcomes(path)) == {"a": outcome, "b": RowOutcome(text="hi")}
