"""Numbers, sizes and times as people read them."""

import sys

import pytest
from click.testing import CliRunner

from batchline.cli import main
from batchline.cli.text import (
    counted,
    format_age,
    format_duration,
    format_rate,
    format_size,
    format_units,
    printable,
    shortened,
    wrapped,
)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (3.44, "3.4 s"), (59.6, "1:00"), (307, "5:07"), (3907, "1:05:07")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (12_345, "12.3 KB"),
        (999_999, "1 MB"),
        (104_857_600, "105 MB"),
    ],
)
def test_sizes_have_the_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (172_900, "2d")])
def test_ages_have_one_unit(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(0.25, "0.25/s"), (3.14, "3.1/s"), (1250.0, "1,250/s")])
def test_rates_have_few_digits(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(3e-06, "0.000003"), (1e-09, "0.000000001"), (0.25, "0.25"), (24.0, "24"), (1e7, "10000000")]
)
def test_units_are_decimals_as_in_the_usage(amount: float, text: str) -> None:
    assert format_units(amount) == text


def test_one_thing_is_singular() -> None:
    assert [counted(number, "line") for number in (0, 1, 2000)] == ["0 lines", "1 line", "2,000 lines"]
    assert counted(2, "batch") == "2 batches"


@pytest.mark.parametrize("char", ["\x1b", "\n", "\r", "\x07", "\x9b", "\u202e", "\u2066", "\u200b", "\ud800"])
def test_text_of_strangers_is_inert(char: str) -> None:
    """Controls and changes of text direction are shown escaped."""
    assert char not in printable(f"a{char}b")
    assert printable(f"a{char}b").isprintable()
    assert shortened(char * 300, length=3).isprintable()


def test_a_text_is_wrapped_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a text of several words"
    assert wrapped(text, indent=2) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "12")
    assert wrapped(text, indent=2) == "a text of\n  several\n  words"
    assert wrapped(text, indent=2, begun=7) == "a\n  text of\n  several\n  words"


def test_errors_are_wrapped_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_terminal(_: object) -> bool:
        return True

    runner = CliRunner()
    with runner.isolation():
        stream = type(sys.stderr)
    monkeypatch.setattr(stream, "isatty", is_terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    result = runner.invoke(main, ["usage", "--since", "2026-11-02", "--until", "2026-11-01"])
    assert result.exit_code == 2
    assert result.stderr.endswith("Error: --until must be later than\n  --since\n")
