"""Tables: CSV, TSV, JSONL, Parquet."""

import sys
from datetime import date
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from batchline.pipeline.rows.fault import RowsFault
from batchline.pipeline.rows.table import DelimitedRows, open_table
from batchline.pipeline.rows.template import as_text


def _table(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_csv_has_its_columns_in_the_first_line(tmp_path: Path) -> None:
    content = '\ufeffid,text\r\n1,"a ""b"", c"\r\n\r\n2,"two\nlines"\r\n'.encode()
    rows = open_table(_table(tmp_path, "in.CSV", content))
    assert rows.columns == ["id", "text"]
    assert list(rows) == list(rows) == [{"id": "1", "text": 'a "b", c'}, {"id": "2", "text": "two\nlines"}]


def test_tsv_and_objects_are_tables_too(tmp_path: Path) -> None:
    assert list(open_table(_table(tmp_path, "a.tsv", b"a\tb\n1\t2\n"))) == [{"a": "1", "b": "2"}]
    rows = open_table(_table(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"a": 1, "b": null}\n\n{"a": 2, "c": 3}\n'))
    assert rows.columns == ["a", "b", "c"], "those of the first object are not all"
    assert list(rows) == [{"a": 1, "b": None}, {"a": 2, "c": 3}]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the same name"),
        ("a.csv", b"a,b\n1\n", "line 2: 1 value for 2 columns"),
        ("a.csv", b'a,b\n1,"2\n', "near line 2: the text has quotes that do not match"),
        (
            "a.csv",
            b"a,b\n1," + b"x" * 1_048_577,
            "near line 2: a value has more than 1,048,576 characters, or the quote",
        ),
        ("a.csv", b"a,b\n1,\xff\n", "a.csv, line 2: the text is not UTF-8"),
        ("a.csv", b"a,\xff\n1,2\n", "a.csv, line 1: the text is not UTF-8"),
        ("a.csv", b"a,b\r" + b"1,2\r" * 5000 + b"1,\xed\xa0\xbd\r", "a.csv, line 5002: the text is not UTF-8"),
        ("a.tsv", "a\tb\n".encode("utf-16"), "a.tsv, line 1: the text is not UTF-8"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2: expected a JSON object"),
        ("a.jsonl", b'{"a": 1}\n{"a": NaN}\n', "line 2: expected a JSON object"),
        ("a.jsonl", b'{"a": "\xff"}\n', "line 1: the text is not UTF-8"),
        ("a.jsonl", rb'{"a": "\ud83d"}', r"line 1: a text has half of a surrogate pair, such as \\ud83d, which"),
        ("a.jsonl", rb'{"\udc00": "\ud83d\ude00"}', "line 1: a text has half of a surrogate pair"),
        ("a.jsonl", b'{"a": 1}\n{"a": [1e400]}\n', "line 2: a number is too large"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}\n", "line 1: a number is too large"),
        ("a.jsonl", b'{"a": ' + b"[" * 5000, "line 1: expected a JSON object"),
        ("a.xlsx", b"", "a template needs a table: .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_what_is_no_table_is_refused_in_words(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    with pytest.raises(RowsFault, match=text):
        list(open_table(_table(tmp_path, name, content)))


def test_without_its_library_parquet_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(RowsFault, match=r"pip install 'batchline\[parquet\]'"):
        open_table(_table(tmp_path, "a.parquet", b""))


def test_a_parquet_file_is_a_table(tmp_path: Path) -> None:
    """Its values are those of JSON; a value that JSON does not know becomes text."""
    path = tmp_path / "rows.parquet"
    columns = {"id": [1, 2, 3], "review": ["good, or so", None, "bad"], "at": [date(2026, 11, 1), None, None]}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    rows = open_table(path)
    assert list(rows.columns) == ["id", "review", "at"]
    for _ in range(2):
        assert [row["id"] for row in rows] == [1, 2, 3], "it can be read again"
    first, second, _ = rows
    assert (first["review"], second["review"]) == ("good, or so", None)
    assert str(first["at"]) == "2026-11-01"


def test_a_parquet_file_may_have_nanoseconds(tmp_path: Path) -> None:
    """Pandas writes every time with them, and a time of Python has none."""
    path = tmp_path / "rows.parquet"
    times = pyarrow.array([1_793_491_200_000_000_001], pyarrow.timestamp("ns", "UTC"))
    parquet.write_table(pyarrow.table({"at": times}), path)
    assert [as_text(row["at"]) for row in open_table(path)] == ["2026-11-01T00:00:00Z"]


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([10_000_000], pyarrow.date32()),
        pyarrow.array([-10_000_000], pyarrow.date32()),
        pyarrow.array([2**60], pyarrow.timestamp("us")),
        pyarrow.array([[10_000_000]], pyarrow.list_(pyarrow.date32())),
    ],
)
def test_a_time_of_a_parquet_file_that_python_lacks_is_refused_in_words(tmp_path: Path, values: object) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"], "at": values}), path)
    with pytest.raises(RowsFault, match=r"^rows.parquet: the rows cannot be read: date value out of range$"):
        list(open_table(path))


def test_a_parquet_file_that_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": [str(number) * 50 for number in range(3000)]}), path)
    content = bytearray(path.read_bytes())
    content[200:2000] = bytes(1800)
    path.write_bytes(content)
    with pytest.raises(RowsFault, match=r"^rows.parquet: the rows cannot be read: "):
        list(open_table(path))
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, path)
    with pytest.raises(RowsFault, match="two columns have the same name"):
        open_table(path)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_file_that_cannot_be_opened_is_refused_in_words(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(RowsFault, match=f"^{name} cannot be read: "):
        open_table(tmp_path / name)


def test_a_fault_stands_in_place_of_its_row(tmp_path: Path) -> None:
    path = _table(tmp_path, "upload", b'a,b\n1,2\n3\n4,5\n6,"7\n')
    first, second, third, last = DelimitedRows(path, name="rows.csv").with_faults()
    assert [first, third] == [{"a": "1", "b": "2"}, {"a": "4", "b": "5"}]
    assert (str(second), str(last)) == (
        "rows.csv, line 3: 1 value for 2 columns",
        "rows.csv, near line 5: the text has quotes that do not match",
    )
