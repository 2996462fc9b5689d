"""Writes the lines that are sent, and checks that each came back exactly once."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from msgspec import Struct
from msgspec.json import Decoder

CHAT = "/v1/chat/completions"
MAX_BATCH_LINES = 50_000
"""The most lines of one batch."""

_SYSTEM = "You are a terse assistant of a support desk and answer in one or two sentences."
_PROMPT = "[line {}] A customer writes that the export button of the web console does nothing. What do you answer?"


class WrongResults(Exception):
    """Results lack a line, have one twice, have an unknown one, or have one with the answer to another."""


def request_body(number: int, more: str = "") -> dict[str, object]:
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _PROMPT.format(number) + more}]
    return {"model": "bench", "messages": messages, "max_tokens": 64}


def write_input(path: Path, numbers: range, *, line_bytes: int = 0) -> None:
    """Write an input file with these lines; the upstream and the check identify a line by its number.

    Lines are as long as the prompt makes them, or padded to this many bytes if that is longer.
    """
    with path.open("w") as file:
        for n in numbers:
            line = _line(n, "")
            file.write(line if len(line) >= line_bytes else _line(n, " " + "x" * (line_bytes - len(line) - 1)))


def _line(number: int, more: str) -> str:
    line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": request_body(number, more)}
    return json.dumps(line, separators=(",", ":")) + "\n"


def batches_of(lines: int) -> list[range]:
    """Return the numbers of this many lines, divided into as few batches as possible."""
    return [range(first, min(lines, first + MAX_BATCH_LINES)) for first in range(0, lines, MAX_BATCH_LINES)]


class Outcome(Struct, frozen=True, kw_only=True):
    answered: int
    failed: int


class _Message(Struct):
    content: str


class _Choice(Struct):
    message: _Message


class _Body(Struct):
    choices: list[_Choice]


class _Response(Struct):
    body: _Body
    status_code: int = 200


class _Record(Struct):
    custom_id: str
    response: _Response | None = None
    error: object = None


_RECORDS = Decoder(_Record)


def check_results(output: Path, errors: Path, numbers: range) -> Outcome:
    """Check that every line is in one of the two files, once, with its own answer. Raise WrongResults if not."""
    missing = {f"line-{n}" for n in numbers}
    answered = failed = 0
    for record in _records(output):
        _remove_from(record, missing)
        _check_answer(record)
        answered += 1
    for record in _records(errors):
        _remove_from(record, missing)
        if record.error is None:
            raise WrongResults(f"{record.custom_id} is in the error file without an error")
        failed += 1
    if missing:
        raise WrongResults(f"{len(missing)} of {len(numbers)} lines are missing, such as {list(islice(missing, 3))}")
    return Outcome(answered=answered, failed=failed)


def _records(path: Path) -> Iterator[_Record]:
    if path.exists():
        with path.open("rb") as file:
            yield from map(_RECORDS.decode, file)


def _remove_from(record: _Record, missing: set[str]) -> None:
    try:
        missing.remove(record.custom_id)
    except KeyError:
        raise WrongResults(f"{record.custom_id} came back twice, or was never sent") from None


def _check_answer(record: _Record) -> None:
    number = record.custom_id.removeprefix("line-")
    if record.response is None or record.response.status_code != 200:
        raise WrongResults(f"{record.custom_id} is in the output file without an answer")
    if f"[line {number}]" not in record.response.body.choices[0].message.content:
        raise WrongResults(f"{record.custom_id} has the answer to another line")
