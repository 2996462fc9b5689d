"""Answers in the order of the input, and answers as they come."""

import json
from pathlib import Path

import pytest
from msgspec import Raw

from batchline.cli.run.answers import AnswerPrinter, put_in_order
from batchline.client.models import RemotePage


def _line(custom_id: str, **more: object) -> str:
    return json.dumps({"custom_id": custom_id} | more) + "\n"


def test_results_are_put_in_the_order_of_the_input(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\ufeff" + _line("b") + "\n" + _line("a") + _line("c"))
    output.write_text(_line("c", n=3) + _line("a", n=1) + _line("b", n=2))
    put_in_order(source, output)
    assert output.read_text() == _line("b", n=2) + _line("a", n=1) + _line("c", n=3)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_a_last_line_without_an_end_is_not_joined_to_another(tmp_path: Path) -> None:
    """Other servers than batchline may write their files so."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(_line("a") + _line("b"))
    output.write_text(_line("b") + _line("a").rstrip("\n"))
    put_in_order(source, output)
    assert output.read_text() == _line("a") + _line("b")


def test_lines_without_a_readable_custom_id_come_last(tmp_path: Path) -> None:
    """C12: a damaged line has null in its place. D1: an answer may hold half an emoji. The input may be edited."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(_line("b") + "edited meanwhile\n" + _line("a"))
    lost = json.dumps({"custom_id": None}) + "\n"
    output.write_text(lost + _line("a", n=1) + _line("b", answer="\ud83d"))
    put_in_order(source, output)
    assert output.read_text() == _line("b", answer="\ud83d") + _line("a", n=1) + lost


class _Steps:
    """Answers that are recorded page by page."""

    def __init__(self, pages: dict[str | None, RemotePage]) -> None:
        self._pages = pages

    def recorded_answers(self, batch_id: str, *, after: str | None) -> RemotePage:
        return self._pages.get(after, RemotePage(data=[]))


def test_each_answer_is_printed_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pages: dict[str | None, RemotePage] = {None: RemotePage(data=[Raw(b"1"), Raw(b"2")], last_id="c2")}
    printer = AnswerPrinter(_Steps(pages), "batch_1")  # type: ignore[arg-type]
    printer.print_new()
    printer.print_new()
    pages["c2"] = RemotePage(data=[Raw(b"3")], last_id="c3")
    printer.print_new()
    assert capfdbinary.readouterr().out == b"1\n2\n3\n"
