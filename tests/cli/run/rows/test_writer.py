"""Tables that are written: CSV, TSV, JSONL."""

from pathlib import Path

import pytest

from batchline.cli.run.rows.writer import row_writer


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
