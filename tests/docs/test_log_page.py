"""docs/reference/log-events.md says what the loggers of the code say."""

import re

from tests.docs.log_page import PAGE, events, page


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run: make log-page"


def test_messages_that_the_page_about_monitoring_explains_exist() -> None:
    text = (PAGE.parents[1] / "how-to" / "monitoring.md").read_text()
    table = text.partition("| Message | Fields |")[2]
    named = re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(named) >= 4
    found = {event.message: event.fields for event in events()}
    assert {message: tuple(re.findall(r"\w+", fields)) for message, fields in named} == {
        message: found[message] for message, _ in named
    }


def test_every_message_has_words_to_search_for() -> None:
    assert [event for event in events() if not re.search("[a-z]{3}", event.message)] == []


def test_the_events_of_a_pause_name_their_upstream() -> None:
    """The fields come from a variable with a type, and from both cases of a condition."""
    found = [event for event in events() if event.module == "pipeline.dispatch.circuit_breaker"]
    assert len(found) >= 4
    assert all({"upstream", "model"} <= set(event.fields) for event in found)


def test_a_message_begins_small_and_has_no_full_stop() -> None:
    """They are fragments that are searched for, one form for all."""
    wrong = [
        event.message
        for event in events()
        if event.message[0].isupper() or (event.message.endswith(".") and ". " not in event.message)
    ]
    assert wrong == []
