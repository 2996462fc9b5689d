"""Tables: CSV, TSV, JSONL, Parquet."""

import sys
from pathlib import Path

import click
import pytest

from batchline.cli.run.rows.table import open_table, row_writer


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
    rows = open_table(_table(tmp_path, "a.jsonl", b'{"a": 1, "b": null}\n\n{"a": 2}\n'))
    assert rows.columns == ["a", "b"]
    assert list(rows) == [{"a": 1, "b": None}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the same name"),
        ("a.csv", b"a,b\n1\n", "line 2: 1 values for 2 columns"),
        ("a.csv", b'a,b\n1,"2\n', "near line 2: the text has quotes that do not match"),
        ("a.csv", b"a,b\n1,\xff\n", "the text is not UTF-8"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2: expected a JSON object"),
        ("a.xlsx", b"", "--prompt needs a table: .csv, .tsv, .jsonl, .parquet"),
    ],
)
def test_what_is_no_table_is_refused_in_words(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    with pytest.raises(click.UsageError, match=text):
        list(open_table(_table(tmp_path, name, content)))


def test_without_its_library_parquet_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(click.UsageError, match=r"pip install 'batchline\[parquet\]'"):
        open_table(_table(tmp_path, "a.parquet", b""))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("o.csv", 'a,b\n1,"x,\ny"\n,"{""c"":1}"\n'),
        ("o.tsv", 'a\tb\n1\t"x,\ny"\n\t"{""c"":1}"\n'),
        ("o.jsonl", '{"a":1,"b":"x,\\ny"}\n{"a":null,"b":{"c":1}}\n'),
    ],
)
def test_rows_are_written_as_the_suffix_says(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    with row_writer(path, ["a", "b"], suffix=path.suffix) as write:
        write({"a": 1, "b": "x,\ny"})
        write({"a": None, "b": {"c": 1}})
    assert path.read_text() == content
