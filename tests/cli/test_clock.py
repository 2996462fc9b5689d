"""`batchline clock` as a command; tests/store/sqlite/test_clock.py has what it does."""

from pathlib import Path

from click.testing import CliRunner

from batchline.cli import main
from batchline.store.sqlite.clock import ClockFile, SavedTime
from tests.support.command_line import Shell


def test_the_trusted_time_is_shown(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell.json("clock", "show")["last_trusted"] is None
    ClockFile(tmp_path).save(SavedTime(time=1_800_000_000.5, uptime=1.0, held=True))
    shown = shell.json("clock", "show")
    assert (shown["last_trusted"], shown["held"]) == (1_800_000_000, True)
    assert "yes: nothing expires and nothing is deleted" in shell.text("clock", "show")


def test_accepting_the_clock_leaves_word_for_the_service(tmp_path: Path) -> None:
    assert "The service trusts the clock within 5 s" in Shell(tmp_path).text("clock", "accept")
    assert ClockFile(tmp_path).take_acceptance()
    assert not ClockFile(tmp_path).take_acceptance()


def test_a_fleet_has_the_clock_of_its_database() -> None:
    result = CliRunner(env={"BATCHLINE_DATABASE_URL": "postgresql://h/n"}).invoke(main, ["clock", "accept"])
    assert result.exit_code == 1
    assert "The clock of the PostgreSQL server decides" in result.stderr


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    code, text = Shell(tmp_path / "typo").refusal("clock", "accept")
    assert code == 1
    assert "typo" in text
