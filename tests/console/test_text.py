"""Text of strangers, and numbers as people read them."""

import pytest
from jinja2 import DictLoader

from batchline.console.pages import Pages
from batchline.console.text import age, cut, inert, metadata_of, moment, money, name_of, rate, shell, size, span


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain", "plain"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x00", "␀"),
        ("\x1b[31m", "␛[31m"),
        ("\x7f\x9b", "␡\ufffd"),
        ("a\u202eb", "a⟦U+202E⟧b"),
        ("\u2066\u200b", "⟦U+2066⟧⟦U+200B⟧"),
        ("\U000e0041", "⟦U+E0041⟧"),
        ("\ud800", "\ufffd"),
        ("naïve 日本 👩\u200d🔬", "naïve 日本 👩\u200d🔬"),
        (None, ""),
    ],
)
def test_characters_that_do_something_are_shown_instead(text: str | None, seen: str) -> None:
    assert inert(text) == seen


def test_a_template_makes_every_value_inert_without_being_asked() -> None:
    pages = Pages()
    pages._templates.loader = DictLoader({"t": "<a title='{{ v }}'>{{ v }}</a>{{ v|cut(3) }}"})
    assert (
        pages.fragment("t", {"v": "<\u202e'>"})
        == "<a title='&lt;⟦U+202E⟧&#39;&gt;'>&lt;⟦U+202E⟧&#39;&gt;</a>&lt;⟦U+202E⟧…"
    )


def test_a_long_word_is_cut() -> None:
    assert cut("w" * 1_000_000, 10) == "wwwwwwwww…"
    assert cut(" a \n b ", 10) == "a b"


def test_numbers_read_well() -> None:
    assert [size(n) for n in (0, 999, 1500, 2_000_000_000)] == ["0 B", "999 B", "1.5 KB", "2.0 GB"]
    assert [span(n) for n in (0, 59, 61, 3600, 5400, 90_000)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h",
        "1 h 30 min",
        "1 d 1 h",
    ]
    assert [rate(n) for n in (1234.5, 2.34, 0.1, 0)] == ["1,234/s", "2.3/s", "6.0/min", "0/s"]
    assert [age(n) for n in (-1, 59, 119, 3700, 90_000)] == [
        "just now",
        "just now",
        "1 min ago",
        "1 h 1 min ago",
        "1 d 1 h ago",
    ]
    assert moment(0) == "1970-01-01 00:00:00 UTC"


@pytest.mark.parametrize(
    ("amount", "seen"),
    [
        (0, "0"),
        (120_000_000_000, "120.00"),
        (-1_234_567_000_000, "-1,234.57"),
        (144_036_900, "0.144"),
        (-1_275, "-0.00000128"),
        (7, "0.000000007"),
    ],
)
def test_money_has_no_more_digits_than_a_person_reads(amount: int, seen: str) -> None:
    assert money(amount) == seen


def test_a_name_is_one_word_of_a_command() -> None:
    assert [shell(text) for text in ("acme", "two words", "a'; rm x")] == ["acme", "'two words'", "'a'\"'\"'; rm x'"]


@pytest.mark.parametrize("raw", [b"", b"[1]", b"{", b'{"a":' * 5000])
def test_metadata_that_cannot_be_read_is_empty(raw: bytes) -> None:
    assert metadata_of(raw) == {}


def test_metadata_that_is_not_text_is_shown_as_json() -> None:
    nested = '{"a":' * 600 + "1.10" + "}" * 600
    raw = f'{{"text":"\\u0041","number":1e5,"nothing":null,"nested":{nested}}}'.encode()
    assert metadata_of(raw) == {"text": "A", "number": "1e5", "nothing": "null", "nested": nested}


def test_the_name_of_a_batch_is_in_its_metadata() -> None:
    assert name_of(metadata_of(b'{"name":" ","title":"T","n":1}')) == "T"
    assert name_of({}) == ""
