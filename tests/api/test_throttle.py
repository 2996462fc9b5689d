"""No project takes the service from the others: A4."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest

from batchline.api.throttle import BodyBytes, BodyReservation, Throttle
from batchline.domain.errors import RateLimited
from tests.support.api_server import CHAT, LINE, Api, Held, wait_until
from tests.support.manual_upstream import ManualUpstream

KiB = 1024


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


def _body_bytes(*, limit: int, project_limit: int) -> Callable[..., AbstractContextManager[BodyReservation]]:
    """Return a function that reserves room for a body, and covers the bytes that arrived if it is told how many."""
    body_bytes = BodyBytes(limit=limit * KiB, project_limit=project_limit * KiB)

    @contextmanager
    def hold(project: str, size: int | None, *, arrived: int = 0) -> Iterator[BodyReservation]:
        known = None if size is None else size * KiB
        with body_bytes.reserve(project, known, max_size=4096 * KiB) as reservation:
            reservation.cover(arrived * KiB)
            yield reservation

    return hold


def test_a_body_is_held_until_its_call_ends_and_one_always_fits() -> None:
    """A4"""
    hold = _body_bytes(limit=1000, project_limit=600)
    with hold("a", 3000, arrived=3000):
        for project in ("a", "b"):
            with pytest.raises(RateLimited), hold(project, 65):
                """Neither the project nor the service has room."""
    with hold("a", 600, arrived=600), hold("b", 400, arrived=400):
        with pytest.raises(RateLimited) as project_full, hold("a", 1):
            """The project has no room."""
        with pytest.raises(RateLimited) as full, hold("c", 65):
            """The service has no room."""
        with hold("c", 0):
            """Nothing takes no room."""
    assert (project_full.value.bound, full.value.bound) == ("project_call_bytes", "call_bytes")
    with hold("c", 1000, arrived=1000):
        """What was given back can be reserved again."""


def test_bodies_that_do_not_arrive_take_no_room_from_other_projects() -> None:
    """A4: only what has arrived counts for the service, whether or not the size is known."""
    hold = _body_bytes(limit=1000, project_limit=1000)
    with hold("a", 1000), hold("b", None, arrived=1), hold("c", 900, arrived=900):
        with hold("d", 90, arrived=90):
            """The service has room, since little has arrived."""
        with pytest.raises(RateLimited), hold("a", 1):
            """The project has announced as much as it may."""


@pytest.mark.parametrize("size", [900, None])
def test_a_body_that_outgrows_the_room_while_it_arrives_is_refused(size: int | None) -> None:
    """A4: what it held is free again."""
    hold = _body_bytes(limit=1000, project_limit=5000)
    with hold("a", 900) as first:
        with hold("b", size, arrived=600) as second:
            first.cover(400 * KiB)
            with pytest.raises(RateLimited) as full:
                second.cover(601 * KiB)
        assert full.value.bound == "call_bytes"
        first.cover(900 * KiB)
        with hold("b", 100, arrived=100):
            """There is room for this one."""


@pytest.mark.parametrize("size", [64, None])
def test_a_project_that_holds_nothing_is_accepted_with_a_small_body(size: int | None) -> None:
    """A4: its bytes count all the same, and a second body of the project has to fit."""
    hold = _body_bytes(limit=1000, project_limit=5000)
    with hold("a", 1000, arrived=1000), hold("b", size, arrived=64) as small:
        with pytest.raises(RateLimited), hold("b", 1):
            """The project holds a body already."""
        with pytest.raises(RateLimited):
            small.cover(64 * KiB + 1)


def test_slow_bodies_of_some_projects_do_not_refuse_the_calls_of_others(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """A4"""
    api = serve(
        upstream_url=manual_upstream.url,
        max_request_bytes=600_000,
        max_project_call_bytes=1_200_000,
        max_call_bytes=1_200_000,
    )
    other = api.new_account("other")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 500_000}]}).encode()
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        for framing in ("transfer-encoding: chunked", "content-length: 600000"):
            slow = stack.enter_context(api.connect())
            slow.sendall(api.head(f"POST {CHAT}", framing) + b"1\r\n{\r\n")
        wait_until(lambda: api.requests_in_flight() == 2)
        call = pool.submit(api.call, "POST", CHAT, body=body, account=other)
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b"{}")
        assert call.result().status == 200
