"""Health, readiness and metrics, for the operator: F5."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from batchline.api import health
from batchline.api.health import HealthRoutes
from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.records import QueueState, SchemaVersions
from batchline.ports import ClockState
from batchline.telemetry.metrics import Metrics
from tests.support.api_server import Api, Faulty
from tests.support.clocks import SettableClock


def test_a_living_process_says_so_to_anyone(api: Api) -> None:
    """F5"""
    reply = api.call("GET", "/healthz", anonymous=True)
    assert (reply.status, reply.json) == (200, {"status": "ok"})


def test_a_ready_service_says_so_to_anyone(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    api.await_(api.services.identity.claim())
    reply = api.call("GET", "/readyz", anonymous=True)
    parts = dict.fromkeys(("database", "migrations", "storage", "identity", "clock"), "ok")
    assert (reply.status, reply.json) == (200, {"status": "ready"} | parts)


def with_versions(database: int, program: int) -> Callable[[Any], Any]:
    async def schema_versions() -> SchemaVersions:
        return SchemaVersions(database=database, program=program)

    def wrap(store: Any) -> Any:
        store.schema_versions = schema_versions
        return store

    return wrap


@pytest.mark.rule("F5", "/readyz fails if the database lacks migrations.")
def test_a_database_of_an_older_version_is_not_ready(serve: Callable[..., Api]) -> None:
    """F5: a process cannot start on one, but a backup may be restored under it."""
    api = serve(wrap_store=with_versions(3, 4))
    api.await_(api.services.identity.claim())
    reply = api.call("GET", "/readyz", anonymous=True)
    assert reply.status == 503
    assert reply.error["message"] == (
        "Not ready: migrations differ: the database has version 3 of the tables, this process has 4. "
        "Run: batchline migrate"
    )


@pytest.mark.rule("F5", "/readyz says that the database was migrated by a newer version, and the process goes on.")
def test_a_database_of_a_newer_version_is_said_to_be_one(serve: Callable[..., Api]) -> None:
    """F5: during an upgrade of a fleet, the nodes of the former version serve until the new ones have started."""
    api = serve(wrap_store=with_versions(5, 4))
    api.await_(api.services.identity.claim())
    reply = api.call("GET", "/readyz", anonymous=True)
    assert (reply.status, reply.json["status"]) == (200, "ready")
    assert reply.json["migrations"] == (
        "differ: the database has version 5 of the tables, this process has 4. "
        "Restart it with the new version of batchline"
    )


@pytest.mark.rule("F5", "/readyz says what is wrong with the clock, and stays 200.")
def test_a_clock_in_doubt_is_named(serve: Callable[..., Api]) -> None:
    """F5: lines run and results are served meanwhile, so the service is ready."""
    api = serve()
    api.await_(api.services.identity.claim())
    api.clock.state = ClockState(ahead_seconds=90_000.0, held=True, problem="the clock is 25.0 hours ahead")
    reply = api.call("GET", "/readyz", anonymous=True)
    assert (reply.status, reply.json["clock"]) == (200, "the clock is 25.0 hours ahead")


@pytest.mark.rule("F5", "/readyz fails while the objects are those of another database.")
def test_objects_of_another_database_are_red(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    api.await_(api.services.identity.claim())
    api.await_(api.services.objects.put("identity/other-1", b""))
    reply = api.call("GET", "/readyz", anonymous=True)
    assert (reply.status, reply.error["message"]) == (503, "Not ready: identity failed")


@pytest.mark.rule("F5", "/healthz and /readyz need no credentials, and a part that fails is named.")
@pytest.mark.parametrize(
    ("broken", "red", "green"),
    [
        ({"wrap_store": lambda store: Faulty(store, check=StoreDown("secret.db is locked"))}, "database", "storage"),
        (
            {"wrap_store": lambda store: Faulty(store, schema_versions=StoreDown("secret"))},
            "migrations failed",
            "storage",
        ),
    ],
)
def test_a_part_that_fails_is_named_without_internals(
    serve: Callable[..., Api], broken: dict[str, Any], red: str, green: str
) -> None:
    """F5, A6"""
    api = serve(**broken)
    reply = api.call("GET", "/readyz", anonymous=True)
    assert reply.status == 503
    assert red in reply.error["message"]
    assert green not in reply.error["message"]
    assert "secret" not in reply.error["message"]
    assert api.call("GET", "/healthz").status == 200


@pytest.mark.rule("F5", "Without the storage a process with the API stays ready for reads, and says what failed.")
@pytest.mark.parametrize("error", [ObjectsDown("/srv/secret"), ValueError("secret")])
def test_an_api_without_its_storage_is_degraded_and_not_gone(serve: Callable[..., Api], error: Exception) -> None:
    api = serve(wrap_objects=lambda part: Faulty(part, check=error))
    reply = api.call("GET", "/readyz", anonymous=True)
    assert (reply.status, reply.json["status"], reply.json["storage"]) == (200, "degraded", "failed")
    assert (reply.json["database"], reply.json["identity"]) == ("ok", "not checked")
    assert "secret" not in reply.body.decode()


class _Parts:
    """A store, objects and an identity that count their checks, and whose storage may be down."""

    def __init__(self, *, storage: Exception | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._storage = storage

    async def check(self) -> None:
        self.counts["check"] += 1
        await asyncio.sleep(0)
        if self._storage is not None:
            raise self._storage

    async def schema_versions(self) -> SchemaVersions:
        return SchemaVersions(database=1, program=1)


def routes_of(parts: Any, clock: SettableClock, *, storage: Any = None, needs_storage: bool = False) -> HealthRoutes:
    return HealthRoutes(
        store=parts,
        objects=storage or parts,
        identity=parts,
        metrics=Metrics(),
        clock=clock,
        admin_token=None,
        needs_storage=needs_storage,
    )


@pytest.mark.anyio
@pytest.mark.rule("F5", "However many ask, the checks of /readyz run once in a few seconds.")
async def test_all_who_ask_within_a_few_seconds_share_one_check() -> None:
    clock, parts = SettableClock(), _Parts()
    routes = routes_of(parts, clock)
    request = Request({"type": "http", "headers": []})
    for _ in range(3):
        answers = await asyncio.gather(*(routes.readyz(request) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
    assert parts.counts["check"] == 3
    clock.advance(6)
    await routes.readyz(request)
    assert parts.counts["check"] == 6


@pytest.mark.anyio
@pytest.mark.parametrize(("needs_storage", "message"), [(True, "process is not ready"), (False, "process is degraded")])
async def test_a_change_of_readiness_is_logged_once(
    caplog: pytest.LogCaptureFixture, *, needs_storage: bool, message: str
) -> None:
    """F5: probes come every few seconds, and their answers are debug lines."""
    caplog.set_level(logging.INFO)
    clock, storage = SettableClock(), _Parts(storage=ObjectsDown("down"))
    routes = routes_of(_Parts(), clock, storage=storage, needs_storage=needs_storage)
    request = Request({"type": "http", "headers": []})
    for problem in (ObjectsDown("down"), ObjectsDown("down"), None, None):
        storage._storage = problem
        await routes.readyz(request)
        clock.advance(6)
    changed, again = [record for record in caplog.records if record.message.startswith("process is")]
    assert changed.message.startswith(message)
    assert (changed.levelname, changed.__dict__["reason"]) == ("WARNING", "storage failed")
    assert (again.levelname, again.message) == ("INFO", "process is ready again")


@pytest.mark.anyio
async def test_a_worker_without_its_storage_is_not_ready() -> None:
    """F5: and it notices within a second that the storage is back."""
    clock, storage = SettableClock(), _Parts(storage=ObjectsDown("down"))
    routes = routes_of(_Parts(), clock, storage=storage, needs_storage=True)
    request = Request({"type": "http", "headers": []})
    answer = await routes.readyz(request)
    assert (answer.status_code, b"Not ready: storage failed" in answer.body) == (503, True)
    storage._storage = None
    clock.advance(1.5)
    assert (await routes.readyz(request)).status_code == 200


class _Hanging:
    async def check(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.anyio
async def test_readyz_names_a_part_that_does_not_answer_in_time() -> None:
    """F5"""
    hanging: Any = _Hanging()
    routes = HealthRoutes(
        store=hanging,
        objects=hanging,
        identity=hanging,
        metrics=Metrics(),
        clock=SettableClock(),
        admin_token=None,
        needs_storage=False,
        check_timeout_seconds=0.01,
    )
    answer = await routes.readyz(Request({"type": "http", "headers": []}))
    assert answer.status_code == 503
    assert b"database did not answer within 0.01 seconds; storage did not answer" in answer.body


def test_a_real_disk_that_refuses_is_red(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    (api.folder / "objects").write_bytes(b"no folder")
    assert api.call("GET", "/readyz").json["storage"] == "failed"


def test_metrics_are_open_on_this_machine_and_named_for_us(api: Api) -> None:
    """F5"""
    reply = api.call("GET", "/metrics", anonymous=True)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    names = [line.split()[2] for line in reply.body.decode().splitlines() if line.startswith("# TYPE")]
    assert names
    assert all(name.startswith("batchline_") for name in names)


def test_requests_are_counted(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    for _ in range(3):
        api.call("GET", "/v1/nothing")
    api.call("PROPFIND", "/v1/nothing")
    api.run_pending()
    text = api.call("GET", "/metrics").body.decode()
    assert 'batchline_http_request_seconds_count{method="GET",route="unknown",status="404"} 3.0' in text
    assert 'batchline_http_request_seconds_count{method="other",route="unknown",status="404"} 1.0' in text


def test_requests_are_timed_by_their_route_and_never_by_an_id(serve: Callable[..., Api]) -> None:
    """F5"""
    api = serve()
    for path in ("/v1/files/file-a", "/v1/files/file-b", "/v1/files/"):
        api.call("GET", path)
    api.run_pending()
    text = api.call("GET", "/metrics").body.decode()
    count = 'batchline_http_request_seconds_count{method="GET",route="/v1/files/{file_id}",status="%s"} %s'
    assert count % (404, "2.0") in text
    assert count % (400, "1.0") in text
    assert 'batchline_http_request_seconds_count{method="POST",route="/v1/batches",status="200"} 0.0' in text
    assert "file-a" not in text


TOKEN = "a-long-admin-token"


@pytest.mark.rule("F5", "/metrics is open on loopback, else it needs the token.")
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer ", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer wrong", 403),
        ("Bearer caf\xe9", 403),
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
    ],
)
@pytest.mark.parametrize("relay", ["x-forwarded-for", "forwarded", "origin", "x-real-ip", "via"])
def test_metrics_want_the_token_from_whoever_only_looks_local(
    shared: Callable[..., Api], relay: str, authorization: str | None, status: int
) -> None:
    """F5"""
    api = shared(admin_token=TOKEN)
    headers = {relay: "203.0.113.9"} | ({} if authorization is None else {"authorization": authorization})
    reply = api.call("GET", "/metrics", anonymous=True, headers=headers)
    assert reply.status == status
    if status != 200:
        assert reply.error["type"] == "authentication_error"


@pytest.mark.rule("F5", "From an address that sent 20 wrong tokens, the token is refused for a minute.")
def test_the_token_cannot_be_guessed_quickly_at_the_metrics(serve: Callable[..., Api]) -> None:
    api = serve(admin_token=TOKEN)

    def status(token: str, relay: str = "x-forwarded-for") -> int:
        headers = {relay: "203.0.113.9", "authorization": f"Bearer {token}"}
        return api.call("GET", "/metrics", anonymous=True, headers=headers).status

    assert [status("guess") for _ in range(21)] == [403] * 20 + [429]
    assert status(TOKEN) == 429
    assert status(TOKEN, relay="origin") == 200, "it came from no proxy"
    assert api.call("GET", "/metrics", anonymous=True).status == 200


@pytest.mark.rule("F5", "A request to /metrics under the name of another host does not count as local.")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("rebound.example:8000", 401),
        ("localhost.rebound.example", 401),
        ("127.0.0.1.rebound.example", 401),
        ("10.0.0.1", 401),
    ],
)
def test_metrics_are_not_open_under_a_rebound_name(api: Api, host: str, status: int) -> None:
    """F5: a web page can have its name resolve to 127.0.0.1, and then reads what is open there."""
    assert api.call("GET", "/metrics", anonymous=True, headers={"host": host}).status == status


def test_without_a_token_metrics_stay_closed_to_others(api: Api) -> None:
    """F5"""
    headers = {"x-forwarded-for": "203.0.113.9", "authorization": "Bearer None"}
    assert api.call("GET", "/metrics", headers=headers).status == 403


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("2001:db8::1", False),
        (None, False),
    ],
)
def test_loopback_in_all_its_spellings(host: str | None, local: bool) -> None:
    """F5"""
    scope: dict[str, Any] = {"type": "http", "headers": [], "client": None if host is None else (host, 1)}
    assert health._is_local(Request(scope)) is local


_OLDEST_AT = 1_000_000


class _SlowCount:
    """A store in which counting takes a while."""

    def __init__(self, clock: SettableClock, *, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self.counts = 0
        self.check: Any = None

    async def queue_state(self) -> QueueState:
        self.counts += 1
        self._clock.advance(self._seconds)
        return QueueState(
            lines=self.counts,
            open_batches={"in_progress": 2},
            oldest_created_at=_OLDEST_AT,
            nearest_expires_at=_OLDEST_AT + 86_400,
        )


@pytest.mark.anyio
@pytest.mark.parametrize(("seconds", "counts"), [(0.001, 100), (1.0, 10)])
async def test_queued_lines_are_counted_for_a_hundredth_of_the_time(seconds: float, counts: int) -> None:
    """F5: the cost grows with the number of open shards. It is paid every ten seconds, or less often."""
    clock = SettableClock(now=0)
    store: Any = _SlowCount(clock, seconds=seconds)
    routes = routes_of(store, clock)
    request = Request({"type": "http", "headers": [], "client": ("127.0.0.1", 1)})
    end = clock.steady() + 1000
    while clock.steady() < end:
        await routes.metrics(request)
        clock.advance(2)
    assert counts * 0.9 <= store.counts <= counts


@pytest.mark.anyio
async def test_ages_are_those_of_the_moment_even_if_the_counts_are_older() -> None:
    """F5"""
    clock = SettableClock(now=_OLDEST_AT + 60)
    routes = routes_of(_SlowCount(clock, seconds=0), clock)
    request = Request({"type": "http", "headers": [], "client": ("127.0.0.1", 1)})
    read = []
    for _ in range(2):
        text = bytes((await routes.metrics(request)).body).decode()
        read.append({line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line[0] != "#"})
        clock.advance(2)
    assert [each["batchline_queue_lines"] for each in read] == [1, 1]
    assert [each['batchline_open_batches{status="in_progress"}'] for each in read] == [2, 2]
    assert [each["batchline_oldest_line_seconds"] for each in read] == [60, 62]
    assert [each["batchline_nearest_deadline_seconds"] for each in read] == [86_340, 86_338]
