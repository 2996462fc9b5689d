"""Tables that become the input of a batch."""

import json
from pathlib import Path

from batchline.pipeline.rows.requests import write_requests
from batchline.ports import TableForm

FORM = TableForm(filename="rows.csv", prompt="Say {word}", system="", model="m")


def _write(folder: Path, content: bytes, form: TableForm = FORM, *, max_rows: int = 10) -> tuple[list[str], list[str]]:
    """Return the prompts that were written, and the faults with their lines."""
    source, target = folder / "in", folder / "out"
    source.write_bytes(content)
    target.write_bytes(b"")
    verdict = write_requests(source, target, form, max_rows=max_rows)
    assert verdict.faults or verdict.bytes == target.stat().st_size
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(1, len(lines) + 1)]
    texts = ["|".join(message["content"] for message in line["body"]["messages"]) for line in lines]
    return texts, [f"{fault.line}: {fault.message}" for fault in verdict.faults]


def test_each_row_is_a_request(tmp_path: Path) -> None:
    assert _write(tmp_path, b"word,n\none,1\ntwo,2\n") == (["Say one", "Say two"], [])
    form = TableForm(filename="ROWS.TSV", prompt="{n}", system="Be {word}", model="m")
    assert _write(tmp_path, b"word\tn\nkind\t1\n", form) == (["Be kind|1"], [])


def test_every_row_with_a_fault_is_named(tmp_path: Path) -> None:
    _, faults = _write(tmp_path, b"word,n\none\ntwo,2\n1,2,3\n")
    assert faults == ["2: 1 value for 2 columns", "4: 3 values for 2 columns"]
    assert _write(tmp_path, b"word\none,two\n")[1] == ["2: 2 values for 1 column"]


def test_a_table_or_a_template_that_cannot_be_used_is_a_fault(tmp_path: Path) -> None:
    assert _write(tmp_path, b"")[1] == ["None: rows.csv is empty"]
    assert _write(tmp_path, b"word\n")[1] == ["None: rows.csv has no rows"]
    assert _write(tmp_path, b"other\n1\n")[1] == ["None: Prompt: the table has no column 'word'; it has: other"]
    assert _write(tmp_path, b"word\n" + b"w\n" * 11)[1] == ["None: The table has more than 10 rows"]
    unclosed = TableForm(filename="rows.csv", prompt="{word", system="", model="m")
    assert "a brace has no partner" in _write(tmp_path, b"word\nw\n", unclosed)[1][0]


def test_no_more_than_a_hundred_faults_are_listed(tmp_path: Path) -> None:
    assert len(_write(tmp_path, b"word,n\n" + b"one\n" * 300, max_rows=1000)[1]) == 100
