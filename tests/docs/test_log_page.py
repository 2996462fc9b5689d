"""docs/reference/log-events.md says what the loggers of the code say."""

import re

from tests.docs.log_page import PAGE, events, page


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run: make log-page"


def test_messages_that_the_page_about_monitoring_explains_exist() -> None:
    text = (PAGE.parents[1] / "how-to" / "monitoring.md").read_text()
    table = text.partition("| Message | Fields |")[2]
    named = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(named) >= 4
    assert set(named) <= {event.message for event in events()}


def test_a_message_begins_small_and_has_no_full_stop() -> None:
    """They are fragments that are searched for, one form for all."""
    wrong = [
        event.message
        for event in events()
        if event.message[0].isupper() or (event.message.endswith(".") and ". " not in event.message)
    ]
    assert wrong == []
