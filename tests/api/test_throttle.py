"""No project takes the service from the others: A4."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from batchline.api.throttle import BodyBytes, Throttle
from batchline.domain.errors import RateLimited
from tests.support.api_server import CHAT, LINE, Api, Held


@pytest.mark.rule("A4", "A project with too much under way is 429 with Retry-After, and no other.")
def test_a_project_over_its_places_is_throttled_and_no_other(serve: Callable[..., Api]) -> None:
    """A4: 429 of the transient kind, with a time to try again, and only for the project that has too much under way."""
    held: list[Held] = []

    def hold(validator: Any) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(wrap_validator=hold, max_project_requests=1)
    file_id = api.upload(LINE).json["id"]
    other = api.new_account("other")
    create = {"input_file_id": file_id, "endpoint": CHAT}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: api.create(**create))
        assert held[0].entered.wait(60)
        refused = api.create(**create)
        remote = api.upload(LINE, account=other)
        api.await_(held[0].drop())
        assert first.result().status == 200
    assert refused.status == 429
    assert (refused.error["type"], refused.error["code"]) == ("rate_limit_exceeded", "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"
    assert remote.status == 200
    assert api.create(**create).status == 200


@pytest.mark.rule("A4", "A place is free again however it was left.")
def test_a_place_is_free_again_however_it_was_left() -> None:
    """A4: a request that fails gives its place back."""
    throttle = Throttle(1, of="things", bound="things")
    with pytest.raises(KeyError), throttle.slot("p"):
        raise KeyError
    with throttle.slot("p"):
        with pytest.raises(RateLimited), throttle.slot("p"):
            pass
        with throttle.slot("q"):
            pass


def test_a_body_is_held_until_its_call_ends_and_one_always_fits() -> None:
    """A4"""
    body_bytes = BodyBytes(limit=100, project_limit=60)
    with body_bytes.reserve("a", 500):
        for project in ("a", "b"):
            with pytest.raises(RateLimited), body_bytes.reserve(project, 1):
                """Neither the project nor the service has room."""
    with body_bytes.reserve("a", 60), body_bytes.reserve("b", 40):
        with pytest.raises(RateLimited) as project_full, body_bytes.reserve("a", 1):
            """The project has no room."""
        with pytest.raises(RateLimited) as full, body_bytes.reserve("c", 1):
            """The service has no room."""
        with body_bytes.reserve("c", 0):
            """Nothing takes no room."""
    assert (project_full.value.bound, full.value.bound) == ("project_call_bytes", "call_bytes")
    with body_bytes.reserve("c", 100):
        """What was given back can be reserved again."""
