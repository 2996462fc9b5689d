"""Makes the line of a batch from a row of a table."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Raw, Struct
from msgspec.json import encode as encode_json

from batchline.domain.endpoints import CHAT
from batchline.domain.limits import MAX_FAULTS
from batchline.domain.records import InputFault
from batchline.durable import sync
from batchline.pipeline.rows.fault import RowsFault
from batchline.pipeline.rows.table import DelimitedRows, Row
from batchline.pipeline.rows.template import Template, parse_template
from batchline.ports import TableForm, TableVerdict


class Prompts(Struct, frozen=True, kw_only=True):
    """The request that each row becomes, and its model."""

    prompt: Template
    system: Template | None
    model: str
    schema: dict[str, Any] | None = None
    """The JSON schema of the answers, or None if they are texts."""

    def body(self, row: Row) -> dict[str, Any]:
        """Return the body of the request for a row."""
        messages = [{"role": "user", "content": self.prompt.fill(row)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system.fill(row)})
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.schema is not None:
            form = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def require_columns(self, known: list[str]) -> None:
        """Raise RowsFault if the table lacks a column that a template names."""
        self.prompt.require_columns(known)
        if self.system is not None:
            self.system.require_columns(known)


def row_id(number: int) -> str:
    """Return the custom_id of a row, counted from 1."""
    return f"row-{number}"


def request_line(number: int, body: dict[str, Any] | Raw) -> bytes:
    """Return the line of a batch that has the body for a row."""
    return encode_json({"custom_id": row_id(number), "method": "POST", "url": CHAT, "body": body}) + b"\n"


def write_requests(source: Path, target: Path, form: TableForm, *, max_rows: int) -> TableVerdict:
    """Write a request for each row of ``source`` to ``target``, which is durable only if there are no faults."""
    try:
        rows, prompts = DelimitedRows(source, name=form.filename), _prompts(form)
        prompts.require_columns(rows.columns)
    except RowsFault as fault:
        return TableVerdict(faults=[InputFault(fault.text, fault.line)])
    with target.open("wb") as file:
        faults = list(islice(_write_rows(file, rows, prompts, max_rows=max_rows), MAX_FAULTS))
        if not faults and not file.tell():
            faults = [InputFault(f"{form.filename} has no rows")]
        if not faults:
            file.flush()
            sync(file.fileno())
        return TableVerdict(faults=faults, bytes=file.tell())


def _write_rows(file: BinaryIO, rows: DelimitedRows, prompts: Prompts, *, max_rows: int) -> Iterator[InputFault]:
    """Write the requests, and yield a fault for each row that cannot be used."""
    number = 0
    for row in rows.with_faults():
        if isinstance(row, RowsFault):
            yield InputFault(row.text, row.line)
            continue
        number += 1
        if number > max_rows:
            yield InputFault(f"The table has more than {max_rows:,} rows")
            return
        file.write(request_line(number, prompts.body(row)))


def _prompts(form: TableForm) -> Prompts:
    return Prompts(
        prompt=parse_template("Prompt", form.prompt),
        system=parse_template("System message", form.system) if form.system.strip() else None,
        model=form.model,
    )
