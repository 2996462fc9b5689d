"""Turns rows into the lines of batches, and answers back into values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import DecodeError, Raw, Struct, field
from msgspec.json import Decoder
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.cli.run.result_lines import FailureReason, decode_line
from batchline.domain.merge_patch import MergePatch
from batchline.pipeline.rows.requests import Prompts, request_line
from batchline.pipeline.rows.table import Row

_ANSWER, _ERROR = "answer", "error"


class RowRequests(Struct, frozen=True, kw_only=True):
    """The options by which a row becomes a request."""

    prompts: Prompts
    patch: dict[str, Any]

    def lines(self, rows: Iterable[Row]) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the line of a batch for each row."""
        patch = MergePatch.parse(encode_json(self.patch))
        for number, row in enumerate(rows, 1):
            yield number, request_line(number, Raw(patch.apply(encode_json(self.prompts.body(row)))))


def load_schema(path: Path) -> dict[str, Any]:
    """Return the JSON schema in a file. Raise UsageError if it describes no object with properties."""
    try:
        schema = decode_json(path.read_bytes())
    except (DecodeError, UnicodeDecodeError):
        raise click.UsageError(f"--schema: {path} is not JSON") from None
    if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict) or not schema["properties"]:
        raise click.UsageError(f"--schema: {path} must describe an object with properties: each becomes a column")
    return schema


class AnswerColumns(Struct, frozen=True, kw_only=True):
    """The columns that answers are written to, under names that the table does not have."""

    fields: dict[str, str]
    """The column of each field of the schema; empty without a schema."""
    answer: str
    error: str

    @property
    def names(self) -> list[str]:
        """All columns in order."""
        return [*(self.fields.values() or [self.answer]), self.error]

    def values(self, outcome: "RowOutcome | None") -> Row:
        """Return the values for the outcome of a row."""
        empty: Row = dict.fromkeys(self.names)
        if outcome is None:
            return empty | {self.error: "the row has no result"}
        if outcome.error is not None:
            return empty | {self.error: outcome.error}
        if not self.fields:
            return empty | {self.answer: outcome.text}
        return empty | self._parsed(outcome.text)

    def _parsed(self, text: str) -> Row:
        try:
            answer = decode_json(text.encode())
        except (DecodeError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            return {self.error: f"the answer is not a JSON object: {text}"}
        return {column: answer.get(name) for name, column in self.fields.items()}


def answer_columns(columns: Sequence[str], schema: Mapping[str, Any] | None) -> AnswerColumns:
    """Return the columns for answers beside those of the table."""
    taken = set(columns)

    def free(name: str) -> str:
        while name in taken:
            name += "_answer"
        taken.add(name)
        return name

    fields = {} if schema is None else {name: free(name) for name in schema["properties"]}
    return AnswerColumns(fields=fields, answer=free(_ANSWER) if not fields else _ANSWER, error=free(_ERROR))


class RowOutcome(Struct, frozen=True, kw_only=True):
    """The result of a row."""

    text: str = ""
    error: str | None = None


class _Part(Struct):
    text: str = ""


class _Message(Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None


class _Choice(Struct):
    message: _Message = field(default_factory=_Message)


class _Body(Struct):
    choices: list[_Choice] = field(default_factory=list)
    error: FailureReason | None = None


class _Response(Struct):
    body: _Body


class _ResultLine(Struct):
    response: _Response | None = None
    error: FailureReason | None = None


class _Named(Struct):
    custom_id: str | None = None


_result_line, _named = Decoder(_ResultLine), Decoder(_Named)


def read_outcomes(*paths: Path) -> Iterator[tuple[str, RowOutcome]]:
    """Yield the custom_id and the outcome of each line of files of results. Files that do not exist are empty."""
    for path in paths:
        if path.exists():
            with path.open("rb") as file:
                for raw in file:
                    custom_id = decode_line(_named, raw).custom_id
                    if custom_id is not None:
                        yield custom_id, _outcome(raw)


def _outcome(raw: bytes) -> RowOutcome:
    try:
        line = decode_line(_result_line, raw)
    except DecodeError:
        return RowOutcome(error="the answer cannot be read as a chat completion")
    error = line.error or (line.response and line.response.body.error)
    if error:
        return RowOutcome(error=f"{error.code}: {error.message}")
    choices = [] if line.response is None else line.response.body.choices
    if not choices:
        return RowOutcome(error="the answer has no text")
    content = choices[0].message.content
    if content is None:
        return RowOutcome(error=choices[0].message.refusal or "the answer has no text")
    return RowOutcome(text=content if isinstance(content, str) else "".join(part.text for part in content))
