"""F6: ``batchline fsck`` says in sentences and in JSON what is wrong, and its exit code says whether anything is."""

import json
from pathlib import Path
from typing import NoReturn

import pytest
from click.testing import CliRunner

from batchline.app import maintenance
from batchline.cli import main
from tests.support.stored_data import StoredData, empty_data, make_data


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> StoredData:
    return make_data(empty_data(tmp_path_factory.mktemp("original")))


@pytest.fixture
def data(original: StoredData, tmp_path: Path) -> StoredData:
    return original.copy(tmp_path, None, None)


def test_a_sound_service_is_reported_in_two_lines(data: StoredData) -> None:
    result = data.fsck()
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith("Checked batches: 7, segments: ")
    assert second == "Nothing is wrong."
    assert result.stderr == ""


@pytest.mark.rule("F6", "Without --repair nothing changes; with it, what was done is said, and the exit code is 0.")
def test_a_problem_is_told_with_the_remedy_and_then_with_what_was_done(data: StoredData) -> None:
    row, batch_id = data.result("large"), data.batches["large"]
    data.delete(row["object_key"])
    told = data.fsck()
    assert told.exit_code == 1
    assert told.stdout.splitlines()[1:] == [
        "",
        "Result files (1)",
        f"  {batch_id}: its output file {row['id']} ({row['object_key']}) is missing.",
        "    It can be made again from the segments of the batch: run with --repair.",
        "",
        "1 problem found.",
    ]
    repaired = data.fsck("--repair")
    assert repaired.exit_code == 0
    assert repaired.stdout.splitlines()[4:] == [
        "    Repaired. It was made again from the segments of the batch.",
        "",
        "1 problem found, 1 repaired, 0 left.",
    ]
    assert data.fsck().exit_code == 0


def test_what_cannot_be_repaired_stays_a_problem(data: StoredData) -> None:
    data.change("UPDATE ledger SET requests = requests + 1 WHERE batch_id = $1", data.batches["small"])
    result = data.fsck("--repair")
    assert result.exit_code == 1
    assert "Usage in the ledger (1)" in result.stdout
    assert result.stdout.endswith("1 problem found, 0 repaired, 1 left.\n")


def test_what_was_handed_over_is_checked_again_later(data: StoredData) -> None:
    data.delete(data.segment("running", inline=False)["object_key"])
    result = data.fsck("--repair")
    assert result.exit_code == 1
    assert "Run the check again when the batch has ended." in result.stdout


def test_leftovers_are_named_and_are_no_problem(data: StoredData) -> None:
    data.put("uploads/file-unknown", b"?")
    result = data.fsck()
    assert result.exit_code == 0
    assert "  uploads/file-unknown has no row." in result.stdout.splitlines()
    assert result.stdout.endswith("\nNothing is wrong.\n")


@pytest.mark.rule("F6", "--json prints one document of a fixed shape.")
def test_the_json_has_a_fixed_shape(data: StoredData) -> None:
    key = data.segment("running", inline=False)["object_key"]
    data.delete(key)
    result = data.fsck("--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    [finding] = document.pop("findings")
    checked, found = document.pop("checked"), document.pop("found")
    assert document == {"clean": False, "repair": False, "repaired": 0, "remaining": 1}
    assert checked.keys() == {"batches", "segments", "files", "objects", "organizations", "bytes"}
    assert found == {name: int(name == "segment") for name in found}
    assert (finding.pop("problem").startswith(f"the segment {key}"), bool(finding.pop("next"))) == (True, True)
    assert finding == {
        "note": False,
        "kind": "segment",
        "batch": data.batches["running"],
        "file": None,
        "object": key,
        "shard": None,
        "organization": None,
        "repair_status": "not_tried",
    }


@pytest.mark.rule("F6", "If nothing can be checked, the exit code is 2.")
def test_what_cannot_be_checked_is_refused(data: StoredData, tmp_path: Path) -> None:
    nothing = CliRunner().invoke(main, ["fsck", f"--data-dir={tmp_path / 'nothing'}"])
    assert nothing.exit_code == 2
    assert nothing.stderr.startswith("Error: There is no service in the data folder")
    assert not (tmp_path / "nothing").exists()
    unavailable = CliRunner().invoke(main, ["fsck", "--database-url=postgresql://postgres@127.0.0.1:1/nothing"])
    assert unavailable.exit_code == 2
    assert "BATCHLINE_DATABASE_URL cannot be used" in unavailable.stderr
    (data.data_dir / "batchline.sqlite").write_bytes(b"no database at all, but long enough to be read as one" * 99)
    (data.data_dir / "batchline.sqlite-wal").unlink(missing_ok=True)
    assert data.fsck().exit_code == 2


def test_an_interrupted_check_is_not_taken_for_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code 1 says that something is wrong. After Ctrl-C that is not known."""

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(maintenance, "check_stored_data", interrupt)
    assert CliRunner().invoke(main, ["fsck", "--data-dir", str(tmp_path)]).exit_code == 130
