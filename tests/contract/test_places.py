"""How the place of a mutation is found in a package, wherever its file lies."""

from pathlib import Path

import pytest

from tests.contract.patterns import PatternError
from tests.contract.places import edit_python, edit_query

_QUERIES = (
    "-- name: one\nSELECT a\n    FROM t WHERE b = :b;\n\n-- name: two\nSELECT a FROM t WHERE b = :b AND b = :bc;\n"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    for path, text in {
        "first.py": "LIMIT = 3\n\n\nclass Thing:\n    size: int = 4\n\n    def go(self):\n        return 1\n",
        "below/second.py": "def go():\n    return 1\n\n\nclass Other:\n    async def stop(self):\n        return 1\n",
        "below/third.py": "def go():\n    return 1\n",
        "below/sqlite/queries.sql": _QUERIES,
        "below/postgres/queries.sql": _QUERIES,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "find", "path"),
    [
        ("LIMIT", "3", "first.py"),
        ("Thing", "4", "first.py"),
        ("Thing.size", "4", "first.py"),
        ("Thing.go", "1", "first.py"),
        ("Other.stop", "1", "below/second.py"),
        ("third.go", "1", "below/third.py"),
        ("below.third.go", "1", "below/third.py"),
    ],
)
def test_python_is_found_by_its_name(package: Path, name: str, find: str, path: str) -> None:
    edit = edit_python(package, name=name, find=find, new="9")
    assert edit.path == package / path
    assert edit.text.count("9") == 1


@pytest.mark.parametrize(
    ("name", "find", "new", "problem"),
    [
        ("go", "1", "2", "defined 2 times below package: below/second.py, below/third.py"),
        ("Thing.stop", "1", "2", "nowhere"),
        ("hing.go", "1", "2", "nowhere"),
        ("Thing.go", "2", "3", "found 0 times"),
        ("Thing.go", "1", "1", "the same"),
        ("Thing.go", "1", "self.length", "names that the module does not have: length"),
    ],
)
def test_a_mutation_that_cannot_be_made_is_refused(package: Path, name: str, find: str, new: str, problem: str) -> None:
    with pytest.raises(PatternError, match=problem):
        edit_python(package, name=name, find=find, new=new)


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_a_fragment_of_a_query_is_replaced(package: Path, backend: str) -> None:
    edit = edit_query(package, backend=backend, name="one", find="a FROM t", new="c FROM t")
    assert edit.path.parent.name == backend
    assert edit.text == _QUERIES.replace("a\n    FROM t", "c FROM t")


def test_a_fragment_consists_of_whole_words(package: Path) -> None:
    edit = edit_query(package, backend="sqlite", name="two", find="b = :b", new="TRUE")
    assert edit.text.endswith("WHERE TRUE AND b = :bc;\n")


@pytest.mark.parametrize(
    ("backend", "name", "find", "problem"),
    [
        ("sqlite", "three", "a", "defined 0 times"),
        ("oracle", "one", "a", "defined 0 times"),
        ("sqlite", "one", "c", "found 0 times"),
        ("sqlite", "two", "b", "found 3 times"),
    ],
)
def test_a_query_that_is_not_there_once_is_refused(
    package: Path, backend: str, name: str, find: str, problem: str
) -> None:
    with pytest.raises(PatternError, match=problem):
        edit_query(package, backend=backend, name=name, find=find, new="d")
