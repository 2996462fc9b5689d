"""Times and usual reasons in what `batchline run` says about lines that wait (D11)."""

import time

import pytest

from batchline.cli.run.waiting import describe_wait, is_unusual
from batchline.domain.wait_text import AnyWait

UPSTREAM = "default"


@pytest.mark.rule("D11", "The end of a wait that the upstream asked for is shown in local time.")
def test_the_end_of_a_wait_is_shown_in_local_time() -> None:
    until = 1_760_000_000
    text = describe_wait(AnyWait(reason="retry_after", upstream=UPSTREAM, model="x", until=until))
    local = time.strftime("%H:%M:%S", time.localtime(until))
    assert text == f"waiting until {local}, as the upstream asked (Retry-After)"


def test_what_any_running_batch_waits_for_is_not_unusual() -> None:
    usual = [AnyWait(reason="slots", in_flight=4), AnyWait(reason="retrying"), AnyWait(reason="queued")]
    unusual = [AnyWait(reason="slots", in_flight=4, by_other_projects=1), AnyWait(reason="rate_limit")]
    assert [is_unusual(wait) for wait in usual + unusual] == [False] * 3 + [True] * 2
